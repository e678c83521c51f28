"""PipeDream's plans: replicas and cuts from its authors' profiles, and what they gain.

Narayanan et al., 2019, table 1, with an epoch's speed-up over data parallelism; beside what is planned here
by the paper's formula, with the all-reduce added to the work, and by the authors' own optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from comparison.table import Table
from pipetrain.plan import costs
from pipetrain.plan.replica_partition import LayerSums, Machines, Planner
from pipetrain.plan.text import joined
from published.measures import profile_of
from published.pipedream_optimizer import Level, Optimizer, States
from published.record import Chart, Check, Finding, How, Line, Results, Step

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


SETTINGS = {  # of the authors' optimizer: whether it knows of machines, and whether messages take time
    "flat": (False, True),
    "flat, messages free": (False, False),
    "by machine": (True, True),
    "by machine, messages free": (True, False),
}
MOST = 300  # sets of nodes between which it can plan machine by machine in seconds
AS_IT_IS = ", as profiled"
MARK = " †"  # of a row that the authors' own optimizer does not give


HEAD = [
    "model and machines",
    "published",
    "of it, here",
    "chosen here",
    "of the published, all-reduce added",
    "chosen so",
]
NOTE = (
    f"{MARK.strip()}: no setting gives the published plan. In brackets: gain over data parallelism. At "
    "least: between some cuts alone, and already faster than the published plan can be."
)


def steps(quick: bool) -> dict[str, Step]:
    """Choose all plans; by the authors' optimizer it takes a minute."""
    models = [*dict.fromkeys(model for model, *_ in PLANS)]
    return {
        "plans": Step(plans, timed=False),
        "authors": Step(authors, {"models": models[: 2 if quick else None]}, timed=False),
    }


def name(model: str, machines: Machines) -> str:
    """Return the name of a row."""
    return f"{model} on {machines.ranks // machines.per_machine} x {machines.per_machine}"


def plans() -> dict[str, dict[str, Any]]:
    """Return the published plans by row, and those that are chosen here from the same profiles.

    Plans as `15-1`; speeds in those of data parallelism: `speedup` as published, `predicted` of the published
    plan with its best cuts, `best` of the chosen one; `added`: these, if an all-reduce adds to the work.
    """
    rows = {}
    for model, scale, machines, replicas, speedup in PLANS:
        read = profile_of(model, scale)
        sums = LayerSums.from_table(costs.Table(read.layers, read.data, read.profile))
        row = {"published": joined(replicas), "speedup": speedup, **chosen(Planner(sums, machines), replicas)}
        added = chosen(Planner(sums, machines, adds_reduce=True), replicas)
        rows[name(model, machines)] = row | {"added": added}
    return rows


def chosen(planner: Planner, replicas: Sequence[int]) -> dict[str, Any]:
    """Return what a planner predicts of replicas, and what it chooses: see `plans`."""
    parallel_s = planner.priced([(0, planner.machines.ranks)]).seconds
    plan, best = planner.best(replicas), planner.best()
    assert plan is not None  # there are without a memory_limit
    assert best is not None
    return {
        "predicted": parallel_s / plan.seconds,
        "bound": plan.bound,
        "chosen": joined(best.replicas),
        "best": parallel_s / best.seconds,
        "best_bound": best.bound,
    }


def authors(models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return by row and setting what the authors' optimizer gives: a `plan` and its `speedup`.

    Where a profile has another batch than the published run, also for the profile as it is. `gives`: whether
    the published plan is one of its plans, which then is `plan`. With more than MOST sets it plans by machine
    between some of them: where that is faster than the published plan can be, that is none of its plans.
    """
    rows: dict[str, dict[str, Any]] = {}
    scaled = ((row, scale) for row in PLANS if row[0] in models for scale in dict.fromkeys((row[1], 1)))
    for (model, usual, machines, replicas, _), scale in scaled:
        as_it_is = AS_IT_IS * (scale != usual)
        states, of = States.read(model, scale), rows.setdefault(name(model, machines) + as_it_is, {})
        for setting, (by_machine, messages) in SETTINGS.items():
            within, between = 1 / machines.within_s, 1 / machines.between_s
            levels = [Level(machines.per_machine, within)] * by_machine
            levels += [Level(machines.ranks // (machines.per_machine if by_machine else 1), between)]
            some = by_machine and len(states.leaves) > MOST
            optimizer = Optimizer(states.chain() if some else states, levels, messages)
            gives = not some and optimizer.gives(replicas)
            if some and (max(replicas) > 1 or optimizer.seconds > states.longest_s):
                continue
            plan, speedup = replicas if gives else optimizer.plan(), optimizer.parallel_s / optimizer.seconds
            of[setting] = {"plan": joined(plan), "speedup": speedup, "gives": gives, "some": some}
    return rows


def show(results: Results) -> Iterator[Finding]:
    """Hold plans and speed-ups against the published ones."""
    rows, theirs = {}, results["authors"]
    for what, row in results["plans"].items():
        own = [of["gives"] for key in (what, what + AS_IT_IS) for of in theirs.get(key, {}).values()]
        rows[what + MARK * (own != [] and not any(own))] = row
    for what, row in rows.items():
        plan, here = row["published"], row["chosen"]
        yield Check(f"{what}: plan", plan, "the same", here, plan == here, How.PLANNED)
        if plan.isdigit():  # data parallelism, whose gain over itself is 1
            continue
        speedup, here = row["speedup"], row["predicted"]
        says, limits = f"{here:.2f}, bound by {row['bound']}", (speedup * (1 - NEAR), speedup * (1 + NEAR))
        yield Check.of(f"{what}: speed-up", f"{speedup:.2f}", limits, here, How.PLANNED, says)
    yield Table("Plans chosen here, and their gain", HEAD, [*map(cells, rows, rows.values())], (), HEAD)
    if theirs:
        head = [*HEAD[:2], *SETTINGS]
        lines = [
            [key + what[len(plain) :], *cells(what, row)[1:2], *told(theirs[key])]
            for what, row in rows.items()
            for plain in [what.removesuffix(MARK)]
            for key in (plain, plain + AS_IT_IS)
            if key in theirs
        ]
        yield Table("Plans of the authors' optimizer, and their gain", head, lines, [NOTE], head)
    same, added = "of the same plan", "of the same plan, all-reduce added"
    drawn = {
        ("published", How.PUBLISHED): [row["speedup"] for row in rows.values()],
        (same, How.PLANNED): [row["predicted"] for row in rows.values()],
        (added, How.PLANNED): [row["added"]["predicted"] for row in rows.values()],
        ("16 ranks", How.BOUND): [16] * len(rows),
    }
    drawn_lines = [Line(key, how, dict(enumerate(values, 1))) for (key, how), values in drawn.items()]
    yield Chart(
        "Speed-up over data parallelism", "model and machines", "x data parallel", drawn_lines, "y", [*rows]
    )


def cells(what: str, row: Mapping[str, Any]) -> list[str]:
    """Return a row's plans, with what they gain in brackets."""
    words = [f"{row['published']} ({row['speedup']:.2f})"]
    for of in (row, row["added"]):
        words += [f"{of['predicted']:.2f}", f"{of['chosen']} ({of['best']:.2f})"]
    return [what, *words]


def told(settings: Mapping[str, Any]) -> list[str]:
    """Return what each setting of the authors' optimizer gives."""
    every = (settings.get(setting) for setting in SETTINGS)
    return [f"{of['plan']} ({'at least ' * of['some']}{of['speedup']:.2f})" if of else "-" for of in every]
