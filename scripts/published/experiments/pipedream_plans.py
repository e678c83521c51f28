"""PipeDream's plans: replicas and cuts from its authors' profiles, and what they gain.

Narayanan et al., 2019, table 1, with an epoch's speed-up over data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from pipetrain.plan.costs import Table
from pipetrain.plan.replica_choice import joined
from pipetrain.plan.replica_partition import LayerSums, Machines, Planner
from published.measures import profile_of
from published.record import Chart, Check, Finding, How, Line, Results, Series, Step

NEAR = 0.25  # of a published speed-up

# Nominal links: of cluster A PCIe 3.0 x16 and 10 Gbit/s, of B NVLink and 25 Gbit/s.
A = Machines(16, 4, 1e-9 / 16, 1e-9 / 1.25)
B = Machines(16, 8, 1e-9 / 150, 1e-9 / 3.125)
PLANS = [  # model, samples beside those of its profile, machines, replicas, speed-up
    ("vgg16", 0.5, A, [15, 1], 5.28),
    ("vgg16", 0.5, B, [15, 1], 2.98),
    ("alexnet", 1, A, [15, 1], 4.92),
    ("alexnet", 1, B, [15, 1], 2.04),
    ("resnet50", 1, A, [16], 1),
    ("resnet50", 1, B, [16], 1),
    ("gnmt16", 1, A, [1] * 16, 2.34),
    ("gnmt16", 1, B, [1] * 16, 3.14),
    ("gnmt8", 1, replace(A, ranks=12), [1] * 12, 2.95),
    ("gnmt8", 1, B, [16], 1),
]


def steps(quick: bool) -> dict[str, Step]:
    """Choose all plans: it takes seconds."""
    return {"plans": Step(plans)}


def plans() -> list[dict[str, Any]]:
    """Return the published plans, and those that are chosen here from the same profiles."""
    return [of._asdict() for of in compared()]


class Comparison(NamedTuple):
    """A published plan beside the one chosen here. Plans as `15-1`; speeds in those of data parallelism."""

    model: str
    machines: str
    published: str
    speedup: float  # as published
    predicted: float  # of the published plan, with its best cuts
    bound: str
    chosen: str
    best: float  # predicted of the chosen plan
    best_bound: str


def compared() -> Iterator[Comparison]:
    """Give all published plans, with what is predicted of them and of those chosen here."""
    for model, scale, machines, replicas, speedup in PLANS:
        read = profile_of(model, scale)
        planner = Planner(LayerSums.from_table(Table(read.layers, read.data, read.profile)), machines)
        parallel = planner.priced([(0, machines.ranks)])
        plan, chosen = planner.best(replicas), planner.best()
        assert plan is not None  # there are without a memory_limit
        assert chosen is not None
        yield Comparison(
            model,
            f"{machines.ranks // machines.per_machine} x {machines.per_machine}",
            joined(plan.replicas),
            speedup,
            parallel.seconds / plan.seconds,
            plan.bound,
            joined(chosen.replicas),
            parallel.seconds / chosen.seconds,
            chosen.bound,
        )


def show(results: Results) -> Iterator[Finding]:
    """Hold plans and speed-ups against the published ones."""
    rows = [Comparison(**values) for values in results["plans"]]
    names = [f"{of.model} on {of.machines}" for of in rows]
    for what, of in zip(names, rows, strict=True):
        near = abs(of.predicted / of.speedup - 1) <= NEAR
        yield Check(f"{what}: plan", of.published, of.chosen, of.chosen == of.published)
        says = f"{of.predicted:.2f}, bound by {of.bound}"
        yield Check(f"{what}: speed-up", f"{of.speedup:.2f}", says, near)
    theirs, same, best = (
        {what: getattr(of, name) for what, of in zip(names, rows, strict=True)}
        for name in ("speedup", "predicted", "best")
    )
    yield Series("the same plan", "speed-up", "", same, How.PLANNED, "x", theirs)
    yield Series("the plan chosen here", "speed-up", "", best, How.PLANNED, "x")
    lines = [
        Line("published", How.PUBLISHED, {n: of.speedup for n, of in enumerate(rows, 1)}),
        Line("of the same plan", How.PLANNED, {n: of.predicted for n, of in enumerate(rows, 1)}),
        Line("16 ranks", How.BOUND, {n: 16 for n, _ in enumerate(rows, 1)}),
    ]
    yield Chart("Speed-up over data parallelism", "row of the table", "x data parallel", lines, "y")
