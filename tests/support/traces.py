"""Traced windows made on paper: a simulation, as if it had been measured."""

from __future__ import annotations

from typing import Any

from pipetrain.schedule.actions import Program, Ties, ranks_of
from pipetrain.schedule.simulate import BufferSize, simulate
from pipetrain.schedule.timeline import Costs, Row, Span, Timeline, TracedWindow


def as_measured(
    program: Program,
    costs: Costs,
    microbatches: int = 1,
    *,
    windows: int = 1,
    microbatch: int = 4,
    ties: Ties = (),
    buffer_size: BufferSize = 2,
) -> list[TracedWindow]:
    """Windows of one epoch in which a lowered program ran by `costs`, one after the other."""
    run = simulate(program, microbatches, cost=costs, ties=ties, buffer_size=buffer_size)
    samples = [microbatch] * (1 + max(action.mb for actions in program for action in actions))
    made = []
    for window in range(windows):
        began, end = window * run.makespan, (window + 1) * run.makespan
        rows = []
        for row in run.rows:
            spans = [span._replace(start=began + span.start, end=began + span.end) for span in row.spans]
            drain = Span(None, spans[-1].end, end, end - spans[-1].end)
            rows.append(Row(began, end, [*spans, drain]))
        made.append(TracedWindow(0, samples, Timeline(rows, microbatches)))
    return made


def about(program: Program, microbatches: int, microbatch: int = 4) -> dict[str, Any]:
    """What a trace of these windows says of its run."""
    rank_of = [rank for rank, *_ in ranks_of(program)]
    return {
        "model": "mlp",
        "parameters": 1000,
        "schedule": "1f1b",
        "ranks": len(program),
        "placement": rank_of,
        "partition": list(range(1, len(rank_of))),
        "batch_size": microbatches * microbatch,
        "microbatches": microbatches,
        "dtype": "float32",
        "precision": "fp32",
        "memory_format": "channels_last",
    }
