"""Schedules without a flush: a forward reads older weights, which are kept for its backward."""

from __future__ import annotations

from pipetrain.schedule.actions import Program, ScheduleError
from pipetrain.schedule.programs.order import Reads, newest, one_stage, require, versioned


def pipedream(ranks: int, batches: int, microbatches: int) -> Program:
    """1F1B without flushes, with weight stashing: a forward reads the newest weights of its stage.

    Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", sections 3.2-3.3.
    """
    require("pipedream", ranks=ranks, batches=batches, microbatches=microbatches)
    return _unflushed(ranks, batches, microbatches, newest)


def pipedream_2bw(ranks: int, batches: int, microbatches: int) -> Program:
    """1F1B without flushes, with two weight versions: batch n reads what batch n - 2 made.

    Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1. The delay is one
    update on every stage, so a batch must fill the pipeline: microbatches >= ranks.
    """
    require("pipedream_2bw", ranks=ranks, batches=batches, microbatches=microbatches)
    if microbatches < ranks:
        raise ScheduleError(
            f"schedule pipedream_2bw needs microbatches >= stages; "
            f"got microbatches={microbatches}, stages={ranks}"
        )
    return _unflushed(ranks, batches, microbatches, lambda batch, newest: max(0, batch - 1))


def _unflushed(ranks: int, batches: int, microbatches: int, reads: Reads) -> Program:
    """One stage per rank, 1F1B through the window's microbatches across batches."""
    mbs = range(batches * microbatches)
    return [
        versioned(one_stage(stage, mbs, ranks - 1 - stage), microbatches, reads) for stage in range(ranks)
    ]
