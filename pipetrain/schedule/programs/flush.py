"""Schedules that flush: a batch ends on every stage before the next begins there, on the newest weights.

Each has some forwards ahead, then one forward and one backward in turn. An evaluation has forwards only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipetrain.schedule.actions import Action, Op, Placement, Program, ScheduleError
from pipetrain.schedule.programs.order import alternate, in_flight, one_stage, repeated, require


def layer_dist(ranks: int, batches: int, microbatches: int) -> Program:
    """One microbatch in flight: the model is spread over the ranks, which run in turn."""
    require("layer_dist", ranks=ranks, batches=batches, microbatches=microbatches)
    return _flushed(ranks, batches, microbatches, lambda stage: 0)


def gpipe(ranks: int, batches: int, microbatches: int) -> Program:
    """All forwards of a batch, then all its backwards, ascending too (Huang et al. 2019, figure 2c)."""
    require("gpipe", ranks=ranks, batches=batches, microbatches=microbatches)
    return _flushed(ranks, batches, microbatches, lambda stage: microbatches)


def one_f_one_b(
    ranks: int, batches: int, microbatches: int, replicas: Sequence[int] | None = None
) -> Program:
    """GPipe's time with fewer activations: backwards as early as possible (PipeDream-Flush).

    Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.2. `replicas`: of each
    rank; all are kept busy.
    """
    require("1f1b", ranks=ranks, batches=batches, microbatches=microbatches)
    depths = in_flight(replicas or [1] * ranks)
    return _flushed(ranks, batches, microbatches, lambda stage: depths[stage] - 1)


def interleaved_1f1b(ranks: int, batches: int, microbatches: int, virtual: int = 2) -> Program:
    """1F1B where each rank r holds the `virtual` stages r, ranks + r, ...: a smaller bubble.

    The order of Megatron-LM (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
    Clusters", section 2.2): microbatches go in groups of `ranks` through each virtual stage in turn. If the
    last group is not full, the order is made for a full one and the missing microbatches are left out, which
    cannot cause a deadlock. (A smaller last group can, with 5 ranks and 7 microbatches.) With virtual=1
    this is 1f1b; on one rank each microbatch goes forward and back before the next.
    """
    require("interleaved_1f1b", ranks=ranks, batches=batches, microbatches=microbatches, virtual=virtual)
    flush = microbatches if ranks > 1 else 1
    groups = [range(mb, mb + ranks) for mb in range(0, flush, ranks)]
    program: Program = []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual, ranks)
        ahead = (ranks - 1 - rank) * (2 if virtual > 1 else 1) + (virtual - 1) * ranks
        forwards = [(Op.F, stage, mb) for group in groups for stage in stages for mb in group]
        backwards = [(Op.B, stage, mb) for group in groups for stage in reversed(stages) for mb in group]
        order = [work for work in alternate(forwards, backwards, ahead) if work[2] < flush]
        program.append(repeated(order, flush, batches, microbatches))
    return program


def forward_only(placement: Placement, microbatches: int) -> Program:
    """Return the forwards of an evaluation, with replicas in turn.

    Ranks follow the diagonals stage + microbatch and wait only for earlier ones, so nothing can deadlock.
    """
    require("forward_only", stages=len(placement), microbatches=microbatches)
    ranks = {rank for replicas in placement for rank in replicas}
    if sorted(ranks) != list(range(len(ranks))):
        raise ScheduleError(f"placement must use ranks 0, 1, 2, ... without a gap; got {placement}")
    program: Program = [[] for _ in ranks]
    for diagonal in range(len(placement) + microbatches - 1):
        for stage in range(max(0, diagonal - microbatches + 1), min(diagonal + 1, len(placement))):
            mb = diagonal - stage
            program[placement[stage][mb % len(placement[stage])]].append(Action(stage, Op.F, mb, 0))
    return program


def _flushed(ranks: int, batches: int, microbatches: int, ahead: Callable[[int], int]) -> Program:
    """One stage per rank. `ahead(stage)`: warm-up forwards."""
    mbs = range(microbatches)
    return [
        repeated(one_stage(stage, mbs, ahead(stage)), microbatches, batches, microbatches)
        for stage in range(ranks)
    ]
