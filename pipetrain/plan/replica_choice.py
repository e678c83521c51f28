"""Cuts and replicas by the times of a file, as text, compared with data parallelism and no replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

from pipetrain.errors import ConfigError
from pipetrain.plan.replica_partition import Planner
from pipetrain.schedule.memory import GIB
from pipetrain.schedule.text import aligned, counted


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
