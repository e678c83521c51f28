"""The schedules: pure functions (ranks, batches, microbatches a batch) -> compute-only Program.

A schedule decides two things: the order of a rank's forwards and backwards, and which weights a forward
reads. Every schedule here consists of some forwards ahead, then one forward and one backward in turn, and a
rule for the weights, combined by two helpers. `lower` adds the communication.

Forwards and backwards ascend in every stage, each backward reads its own forward's version, and a stage steps
directly after the last backward of a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from pipetrain.schedule.actions import Action, Op, Program, ScheduleError

Work = tuple[Op, int, int]  # (F or B, stage, microbatch), still without weight version
Reads = Callable[[int, int], int]  # (batch, newest version of the stage) -> the version that a forward reads


def layer_dist(ranks: int, batches: int, microbatches: int) -> Program:
    """One microbatch in flight: the model is spread over the ranks, which take turns."""
    _require("layer_dist", ranks=ranks, batches=batches, microbatches=microbatches)
    return _flushed(ranks, batches, microbatches, lambda stage: 0)


def gpipe(ranks: int, batches: int, microbatches: int) -> Program:
    """All forwards of a batch, then all its backwards, ascending too (Huang et al. 2019, figure 2c)."""
    _require("gpipe", ranks=ranks, batches=batches, microbatches=microbatches)
    return _flushed(ranks, batches, microbatches, lambda stage: microbatches)


def one_f_one_b(ranks: int, batches: int, microbatches: int) -> Program:
    """GPipe's time with fewer activations: backwards as early as possible (PipeDream-Flush).

    Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.2.
    """
    _require("1f1b", ranks=ranks, batches=batches, microbatches=microbatches)
    return _flushed(ranks, batches, microbatches, lambda stage: ranks - 1 - stage)


def interleaved_1f1b(ranks: int, batches: int, microbatches: int, virtual: int = 2) -> Program:
    """1F1B where each rank r holds the `virtual` stages r, ranks + r, ...: a smaller bubble.

    The order of Megatron-LM (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
    Clusters", section 2.2): microbatches go in groups of `ranks` through each virtual stage in turn. If the
    last group is not full, the order is made for a full one and the missing microbatches are left out, which
    cannot introduce a deadlock. (A smaller last group can, with 5 ranks and 7 microbatches.) With virtual=1
    this is 1f1b; on one rank each microbatch goes forward and back before the next.
    """
    _require("interleaved_1f1b", ranks=ranks, batches=batches, microbatches=microbatches, virtual=virtual)
    flush = microbatches if ranks > 1 else 1
    program: Program = []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual, ranks)
        ahead = (ranks - 1 - rank) * (2 if virtual > 1 else 1) + (virtual - 1) * ranks
        order: list[Work] = []
        for first in range(0, batches * microbatches, flush):
            groups = [range(mb, mb + ranks) for mb in range(first, first + flush, ranks)]
            forwards = [(Op.F, stage, mb) for group in groups for stage in stages for mb in group]
            backwards = [(Op.B, stage, mb) for group in groups for stage in reversed(stages) for mb in group]
            order += [work for work in _alternate(forwards, backwards, ahead) if work[2] < first + flush]
        program.append(_versioned(order, microbatches, _newest))
    return program


def pipedream(ranks: int, batches: int, microbatches: int) -> Program:
    """1F1B without flushes, with weight stashing: a forward reads the newest weights of its stage.

    Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", sections 3.2-3.3.
    """
    _require("pipedream", ranks=ranks, batches=batches, microbatches=microbatches)
    return _unflushed(ranks, batches, microbatches, _newest)


def pipedream_2bw(ranks: int, batches: int, microbatches: int) -> Program:
    """1F1B without flushes, with two weight versions: batch n reads what batch n - 2 made.

    Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1. The delay is one
    update on every stage, so a batch must fill the pipeline: microbatches >= ranks.
    """
    _require("pipedream_2bw", ranks=ranks, batches=batches, microbatches=microbatches)
    if microbatches < ranks:
        raise ScheduleError(
            f"schedule pipedream_2bw needs microbatches >= stages; "
            f"got microbatches={microbatches}, stages={ranks}"
        )
    return _unflushed(ranks, batches, microbatches, lambda batch, newest: max(0, batch - 1))


def forward_only(placement: list[int], microbatches: int) -> Program:
    """Return the forwards of an evaluation; `placement[stage]` is the stage's rank.

    Each rank follows the diagonals stage + microbatch. An action waits only for earlier diagonals, so no
    placement can deadlock.
    """
    _require("forward_only", stages=len(placement), microbatches=microbatches)
    if sorted(set(placement)) != list(range(max(placement) + 1)):
        raise ScheduleError(f"placement must use ranks 0, 1, 2, ... without a gap; got {placement}")
    program: Program = [[] for _ in range(max(placement) + 1)]
    for diagonal in range(len(placement) + microbatches - 1):
        for stage in range(max(0, diagonal - microbatches + 1), min(diagonal + 1, len(placement))):
            program[placement[stage]].append(Action(stage, Op.F, diagonal - stage, 0))
    return program


def _flushed(ranks: int, batches: int, microbatches: int, ahead: Callable[[int], int]) -> Program:
    """One stage per rank; every batch ends before the next begins. `ahead(stage)`: warm-up forwards."""
    mbs = range(batches * microbatches)
    return [
        _versioned(
            [work for batch in _groups(mbs, microbatches) for work in _one_stage(stage, batch, ahead(stage))],
            microbatches,
            _newest,
        )
        for stage in range(ranks)
    ]


def _unflushed(ranks: int, batches: int, microbatches: int, reads: Reads) -> Program:
    """One stage per rank, 1F1B through the window's microbatches across batches."""
    mbs = range(batches * microbatches)
    return [
        _versioned(_one_stage(stage, mbs, ranks - 1 - stage), microbatches, reads) for stage in range(ranks)
    ]


def _one_stage(stage: int, mbs: range, ahead: int) -> list[Work]:
    return _alternate([(Op.F, stage, mb) for mb in mbs], [(Op.B, stage, mb) for mb in mbs], ahead)


def _alternate(forwards: Sequence[Work], backwards: Sequence[Work], ahead: int) -> list[Work]:
    """Order the work: `ahead` forwards, then one forward and one backward in turn, then backwards."""
    ahead = min(ahead, len(forwards))
    order = list(forwards[:ahead])
    for pair in zip(forwards[ahead:], backwards, strict=False):
        order += pair
    return order + list(backwards[len(forwards) - ahead :])


def _versioned(order: Iterable[Work], microbatches: int, reads: Reads) -> list[Action]:
    """Add to each action the version that it reads, and a STEP after the last backward of each batch."""
    newest: dict[int, int] = defaultdict(int)
    read: dict[tuple[int, int], int] = {}
    actions: list[Action] = []
    for op, stage, mb in order:
        if op is Op.F:
            read[stage, mb] = reads(mb // microbatches, newest[stage])
        actions.append(Action(stage, op, mb, read[stage, mb]))
        if op is Op.B and (mb + 1) % microbatches == 0:
            newest[stage] += 1
            actions.append(Action(stage, Op.STEP, version=newest[stage]))
    return actions


def _newest(batch: int, newest: int) -> int:
    return newest


def _groups(mbs: range, size: int) -> list[range]:
    return [mbs[i : i + size] for i in range(0, len(mbs), size)]


def _require(schedule: str, **counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ScheduleError(f"schedule {schedule} needs {name} >= 1; got {name}={count}")
