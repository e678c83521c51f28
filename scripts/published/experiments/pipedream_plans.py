"""PipeDream's plans: replicas and cuts from its authors' profiles, and what they gain.

Narayanan et al., 2019, table 1, with an epoch's speed-up over data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipetrain.plan.costs import Table
from pipetrain.plan.replica_partition import LayerSums, Machines, Planner
from pipetrain.plan.text import joined
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
    """Return the published plans, and those that are chosen here from the same profiles.

    Plans as `15-1`; speeds in those of data parallelism: `speedup` as published, `predicted` of the published
    plan with its best cuts, `best` of the chosen one.
    """
    rows = []
    for model, scale, machines, replicas, speedup in PLANS:
        read = profile_of(model, scale)
        planner = Planner(LayerSums.from_table(Table(read.layers, read.data, read.profile)), machines)
        parallel_s = planner.priced([(0, machines.ranks)]).seconds
        plan, chosen = planner.best(replicas), planner.best()
        assert plan is not None  # there are without a memory_limit
        assert chosen is not None
        rows.append(
            {
                "model": model,
                "machines": f"{machines.ranks // machines.per_machine} x {machines.per_machine}",
                "published": joined(plan.replicas),
                "speedup": speedup,
                "predicted": parallel_s / plan.seconds,
                "bound": plan.bound,
                "chosen": joined(chosen.replicas),
                "best": parallel_s / chosen.seconds,
                "best_bound": chosen.bound,
            }
        )
    return rows


def show(results: Results) -> Iterator[Finding]:
    """Hold plans and speed-ups against the published ones."""
    rows = {f"{row['model']} on {row['machines']}": row for row in results["plans"]}
    for what, row in rows.items():
        (plan, chosen), same = (row["published"], row["chosen"]), row["published"] == row["chosen"]
        yield Check(f"{what}: plan", plan, "the same", chosen, same, How.PLANNED)
        theirs, here = row["speedup"], row["predicted"]
        says, limits = f"{here:.2f}, bound by {row['bound']}", (theirs * (1 - NEAR), theirs * (1 + NEAR))
        yield Check.of(f"{what}: speed-up", f"{theirs:.2f}", limits, here, How.PLANNED, says)
    published, same, best = (
        {what: row[key] for what, row in rows.items()} for key in ("speedup", "predicted", "best")
    )
    yield Series("the same plan", "speed-up", "", same, How.PLANNED, "x", published)
    yield Series("the plan chosen here", "speed-up", "", best, How.PLANNED, "x")
    lines = [
        Line(name, how, dict(enumerate(values, 1)))
        for name, how, values in (
            ("published", How.PUBLISHED, published.values()),
            ("of the same plan", How.PLANNED, same.values()),
            ("16 ranks", How.BOUND, [16] * len(rows)),
        )
    ]
    yield Chart(
        "Speed-up over data parallelism", "model and machines", "x data parallel", lines, "y", [*rows]
    )
