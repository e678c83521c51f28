"""Schedules without a flush: a forward reads older weights, which are stashed for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from pipetrain.schedule.actions import Op, Program, ScheduleError
from pipetrain.schedule.programs.order import Reads, Work, in_flight, newest, one_stage, require, versioned


def pipedream(ranks: int, batches: int, microbatches: int, replicas: Sequence[int] | None = None) -> Program:
    """1F1B without flushes, with weight stashing: a forward reads the newest weights of its stage.

    Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", sections 3.2-3.3.
    `replicas`: of each rank; all are kept busy.
    """
    require("pipedream", ranks=ranks, batches=batches, microbatches=microbatches)
    return _unflushed(batches, microbatches, newest, in_flight(replicas or [1] * ranks))


def pipedream_2bw(
    ranks: int, batches: int, microbatches: int, replicas: Sequence[int] | None = None
) -> Program:
    """1F1B without flushes, with two weight versions: batch n reads the version that batch n - 2 made.

    Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1. The delay is one
    update on every stage, so a batch must fill the pipeline: microbatches >= ranks. `replicas`: of each rank.
    """
    require("pipedream_2bw", ranks=ranks, batches=batches, microbatches=microbatches)
    if microbatches < ranks:
        raise ScheduleError(
            f"schedule pipedream_2bw needs microbatches >= stages; "
            f"got microbatches={microbatches}, stages={ranks}"
        )
    depths = [min(depth, microbatches) for depth in in_flight(replicas or [1] * ranks)]
    return _unflushed(batches, microbatches, _fixed(1), depths)


def ssp(
    ranks: int,
    batches: int,
    microbatches: int,
    buffer: int | Sequence[int] | None = None,
    buffer_size: int = 1,
) -> Program:
    """1F1B without flushes, with a ring of weight versions: batch t reads version max(0, t - (buffer - 1)).

    OneFlow's SSP, 2020. `buffer`: the weight versions that a stage holds, for all stages or by stage; None:
    S - i at stage i, which for one microbatch a batch makes PipeDream's program. Otherwise the two differ:
    PipeDream reads the newest version, so microbatches of one batch may read two; here all microbatches of a
    batch read the version at a fixed distance, even if newer ones exist.

    A stage has at most `buffer` batches open, and each later rank one microbatch less, as in PipeDream. With
    twice PipeDream's delay at stage 0 it is two less, and so on, so that messages may take longer.
    """
    require("ssp", ranks=ranks, batches=batches, microbatches=microbatches)
    buffers, mbs = _buffers(buffer, ranks), range(batches * microbatches)
    bounds = [*accumulate(buffers, min)]  # a stage gets no more forwards than the stages before it may run
    ahead = min(max(1, (buffers[0] - 1) // max(1, ranks - 1)), 2 * buffer_size)  # of the next stage
    program: Program = []
    forwards = [mb + 1 - ahead for mb in mbs]  # how many come before each backward, on the stage after
    for stage in reversed(range(ranks)):
        forwards = [
            min(after + ahead, (mb // microbatches + bounds[stage]) * microbatches, len(mbs))
            for mb, after in zip(mbs, forwards, strict=True)
        ]
        order = _order(stage, forwards)
        program.insert(0, versioned(order, microbatches, _fixed(buffers[stage] - 1)))
    return program


def _buffers(buffer: int | Sequence[int] | None, ranks: int) -> list[int]:
    """Return the versions of each stage. Raises ScheduleError."""
    if buffer is None:
        return [ranks - stage for stage in range(ranks)]
    buffers = list(buffer) if isinstance(buffer, Sequence) else [buffer] * ranks
    if len(buffers) != ranks or any(type(size) is not int or size < 1 for size in buffers):
        raise ScheduleError(
            f"schedule ssp needs buffer to be null, a number of weight versions >= 1, or one for each of "
            f"{ranks} stages; got buffer={buffer}"
        )
    return buffers


def _fixed(delay: int) -> Reads:
    """Read the version that was the newest `delay` batches ago."""
    return lambda batch, latest: max(0, batch - delay)


def _order(stage: int, forwards: Sequence[int]) -> list[Work]:
    """Return the work of a stage: `forwards[mb]` forwards come before backward mb."""
    order: list[Work] = []
    for mb, (done, count) in enumerate(pairwise([0, *forwards])):
        order += [*((Op.F, stage, forward) for forward in range(done, count)), (Op.B, stage, mb)]
    return order


def _unflushed(batches: int, microbatches: int, reads: Reads, depths: Sequence[int]) -> Program:
    """One stage per rank, 1F1B through the window's microbatches across batches, with these depths."""
    mbs = range(batches * microbatches)
    return [
        versioned(one_stage(stage, mbs, depth - 1), microbatches, reads) for stage, depth in enumerate(depths)
    ]
