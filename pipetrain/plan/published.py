"""Cuts and replicas by the times of a file, as text, beside data parallelism and the straight pipeline.

And the plans that PipeDream published (Narayanan et al., 2019, table 1, with an epoch's speed-up over data
parallelism) beside those that are chosen here, from the profiles that its authors measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, ListConfig

from pipetrain.errors import ConfigError
from pipetrain.plan.costs import Table
from pipetrain.plan.describe import state_of
from pipetrain.plan.replicas import LayerSums, Machines, Planner
from pipetrain.plan.rows import read_rows
from pipetrain.rules import COUNT, PATH, POSITIVE, whole
from pipetrain.schedule.draw import aligned, counted
from pipetrain.schedule.memory import GIB

RANKS = whole(1, 64)  # some seconds: a stage can be added in about ranks^4 / 24 ways
PUBLISHED = "published"

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


def show_replicas(cfg: DictConfig) -> None:
    """Print cuts and replicas for the layers of costs=, or all published plans. Raises ConfigError."""
    if unused := [key for key in ("out", "span", "compare", "advise") if cfg[key] not in (None, False)]:
        raise ConfigError(f"{unused[0]}= shows a plan with a schedule: leave it out, or ranks=")
    if cfg.costs == PUBLISHED:
        print(published_table())
        return
    if cfg.costs is None:
        raise ConfigError("ranks= chooses cuts and replicas by the times of a file: give costs=FILE.csv")
    ranks, machines = RANKS.read("ranks", cfg.ranks), COUNT.read("machines", cfg.machines)
    if ranks % machines:
        raise ConfigError(f"ranks={ranks} cannot be shared equally by machines={machines}: choose a multiple")
    speeds = [*cfg.bandwidth] if isinstance(cfg.bandwidth, ListConfig) else [cfg.bandwidth] * 2
    if len(speeds) != 2 or None in speeds:
        raise ConfigError("ranks= needs bandwidth=GB/s, or [GB/s within a machine,GB/s between two]")
    seconds = [1e-9 / POSITIVE.read("bandwidth", speed) for speed in speeds]
    limit, scale = (POSITIVE.read(key, cfg[key], null=True) for key in ("memory_limit", "scale"))
    rows = read_rows(PATH.read("costs", cfg.costs), scale=scale or 1.0)
    sums = LayerSums.of(Table(rows.layers, rows.data, rows.profile, state_of=state_of(cfg)))
    planner = Planner(sums, Machines(ranks, ranks // machines, *seconds), limit=(limit or inf) * GIB)
    print(describe_replicas(planner, [layer.name for layer in rows.layers]))


def describe_replicas(planner: Planner, names: Sequence[str]) -> str:
    """Return the plans for layers of these names as text. Raises ConfigError if none fits."""
    ranks = planner.machines.ranks
    if (chosen := planner.best()) is None:
        raise ConfigError(
            f"memory_limit={planner.limit / GIB:g} is too small for all cuts and replicas on "
            f"{counted(ranks, 'rank')}: choose a larger one, or more ranks"
        )
    parallel = replace(planner, limit=inf).priced([(0, ranks)])
    rows = [["plan", "replicas", "cut before layers", "ms a microbatch", "x data parallel", "bound by"]]
    ways = {"data parallel": planner.best([ranks]), "straight pipeline": planner.best([1] * ranks)}
    for name, plan in {**ways, "chosen": chosen}.items():
        if plan is None:
            rows.append([name, *"----", "has too few layers, or too little memory"])
            continue
        speed = [f"{1e3 * plan.seconds:.2f}", f"{parallel.seconds / plan.seconds:.2f}"]
        rows.append([name, _joined(plan.replicas), ",".join(map(str, plan.cuts)), *speed, plan.bound])
    stages, first = [["stage", "ranks", "layers", *(f"{part} ms" for part in chosen.parts[0])]], 0
    for n, (start, end) in enumerate(pairwise([0, *chosen.cuts, len(names)])):
        layers, last = f"{start}-{end - 1} {names[start]}..{names[end - 1]}", first + chosen.replicas[n] - 1
        parts = (f"{1e3 * seconds:.2f}" for seconds in chosen.parts[n].values())
        stages.append([str(n), f"{first}-{last}" if last > first else str(first), layers, *parts])
        first = last + 1
    return f"{aligned(rows)}\n\n{aligned(stages)}"


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
        read = read_rows(Path(model), scale=scale)
        planner = Planner(LayerSums.of(Table(read.layers, read.data, read.profile)), machines)
        parallel = planner.priced([(0, machines.ranks)])
        plan, chosen = planner.best(replicas), planner.best()
        assert plan is not None  # there are without a memory_limit
        assert chosen is not None
        yield Comparison(
            model,
            f"{machines.ranks // machines.each} x {machines.each}",
            _joined(plan.replicas),
            speedup,
            parallel.seconds / plan.seconds,
            plan.bound,
            _joined(chosen.replicas),
            parallel.seconds / chosen.seconds,
            chosen.bound,
        )


def published_table() -> str:
    """Return the published plans as Markdown, with what is predicted of them, and of those chosen here."""
    head = ["model", "machines", "published", "x data parallel", "predicted of it"]
    rows = [[*head, "chosen here", "predicted of that"], ["---"] * 7]
    for of in compared():
        predicted = f"{of.predicted:.2f}, {of.bound}", of.chosen, f"{of.best:.2f}, {of.best_bound}"
        rows.append([of.model, of.machines, of.published, f"{of.speedup:.2f}", *predicted])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _joined(replicas: Sequence[int]) -> str:
    """Return replicas as 15-1."""
    return "straight" if len(replicas) > 1 and set(replicas) == {1} else "-".join(map(str, replicas))
