"""Cuts and replicas by the times of a file, as text, beside data parallelism and the straight pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

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


def show_replicas(cfg: DictConfig) -> None:
    """Print cuts and replicas for the layers of costs=. Raises ConfigError."""
    if unused := [key for key in ("out", "span", "compare", "advise") if cfg[key] not in (None, False)]:
        raise ConfigError(f"{unused[0]}= shows a plan with a schedule: leave it out, or ranks=")
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
        rows.append([name, joined(plan.replicas), ",".join(map(str, plan.cuts)), *speed, plan.bound])
    stages, first = [["stage", "ranks", "layers", *(f"{part} ms" for part in chosen.parts[0])]], 0
    for n, (start, end) in enumerate(pairwise([0, *chosen.cuts, len(names)])):
        layers, last = f"{start}-{end - 1} {names[start]}..{names[end - 1]}", first + chosen.replicas[n] - 1
        parts = (f"{1e3 * seconds:.2f}" for seconds in chosen.parts[n].values())
        stages.append([str(n), f"{first}-{last}" if last > first else str(first), layers, *parts])
        first = last + 1
    return f"{aligned(rows)}\n\n{aligned(stages)}"


def joined(replicas: Sequence[int]) -> str:
    """Return replicas as 15-1."""
    return "straight" if len(replicas) > 1 and set(replicas) == {1} else "-".join(map(str, replicas))
