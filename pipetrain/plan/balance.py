"""Chooses the cuts: the first layer of each stage but the first.

The slowest stage limits a pipeline, so automatic cuts minimise the largest stage, exactly, by dynamic
programming over contiguous slices (the linear partition problem). Where ranks have several stages each, the
slowest rank limits it, and a large stage still holds up the filling: both are minimised together, by search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from pipetrain.errors import ConfigError
from pipetrain.plan.estimate import Layer


def choose_cuts(partition: str | Sequence[int], layers: Sequence[Layer], where: Sequence[int]) -> list[int]:
    """Return the first layers of stages 1, 2, ...: as given, or by one of STRATEGIES.

    `where`: the rank of each stage. Raises ConfigError, with the list of layers, if there are too few, a
    stage would be empty or a cut is outside the model.
    """
    stages, listed = len(where), ", ".join(f"{i} {layer.name}" for i, layer in enumerate(layers))
    if stages > len(layers):
        raise ConfigError(
            f"stages={stages} needs at least as many layers, but the model has {len(layers)}: "
            f"{listed}; choose fewer stages or a deeper model"
        )
    if partition == "even":
        return [round(len(layers) * stage / stages) for stage in range(1, stages)]
    if isinstance(partition, str):
        return balance([getattr(layer, partition) for layer in layers], where)
    rising = all(a < b for a, b in pairwise([0, *partition, len(layers)]))
    if len(partition) != stages - 1 or not rising:
        raise ConfigError(
            f"partition={list(partition)} does not cut the model into {stages} stages: give {stages - 1} "
            f"rising numbers from 1 to {len(layers) - 1}, their first layers, out of: {listed}"
        )
    return list(partition)


def balance(weights: Sequence[float], where: Sequence[int]) -> list[int]:
    """Cut `weights` into a slice for each stage, which rank `where[stage]` holds.

    Where each rank has one, the largest sum of a slice is as small as possible. Else that and the largest sum
    of a rank are as small together as a local search finds. It starts from slices of equal sums, and from
    such slices of each share of the weights for the first half of the stages.
    """
    stages, half = len(where), len(where) // 2
    until = [0.0, *accumulate(weights)]

    def even(start: int, end: int, stages: int) -> list[int]:
        cuts, _ = best_cuts(end - start, stages, lambda stage, a, b: until[start + b] - until[start + a])
        return [start + cut for cut in cuts]

    def size(cuts: Sequence[int]) -> float:
        held = dict.fromkeys(where, 0.0)
        sums = [until[end] - until[start] for start, end in pairwise([0, *cuts, len(weights)])]
        for rank, weight in zip(where, sums, strict=True):
            held[rank] += weight
        return max(held.values()) + max(sums)

    equal = even(0, len(weights), stages)
    if len(set(where)) in (1, stages):
        return equal
    turns = range(half, len(weights) - (stages - half) + 1)
    starts = [[*even(0, t, half), t, *even(t, len(weights), stages - half)] for t in turns]
    return min((_refined(start, len(weights), size) for start in [equal, *starts]), key=size)


def _refined(cuts: list[int], layers: int, size: Callable[[Sequence[int]], float]) -> list[int]:
    """Move one cut after the other anywhere between its neighbours, as long as that is smaller."""
    best, before = size(cuts), math.inf
    while best < before:
        before = best
        for i in range(len(cuts)):
            ends = [0, *cuts, layers]
            ways = ([*cuts[:i], cut, *cuts[i + 1 :]] for cut in range(ends[i] + 1, ends[i + 2]))
            cuts = min(ways, key=size)
        best = size(cuts)
    return cuts


def best_cuts(layers: int, stages: int, cost: Callable[[int, int, int], float]) -> tuple[list[int], float]:
    """Cut `layers` layers into `stages` non-empty slices so that the largest cost of a slice is smallest.

    Returns the cuts and that cost. `cost(stage, start, end)` is the cost of layers `start` to `end`
    (exclusive) as that stage. Among equal cuts the later slices are smaller where one choice decides it. It
    calls `cost` O(stages layers^2) times.
    """
    # best[k][i]: the smallest largest cost of the first i layers in k slices; cut[k][i]: its last cut.
    best = [[math.inf] * (layers + 1) for _ in range(stages + 1)]
    cut = [[stage - 1] * (layers + 1) for stage in range(stages + 1)]
    best[0][0] = 0.0
    for k in range(1, stages + 1):
        for i in range(k, layers + 1):
            for j in range(k - 1, i):
                largest = max(best[k - 1][j], cost(k - 1, j, i))
                if largest < best[k][i]:
                    best[k][i], cut[k][i] = largest, j
    cuts, end = [], layers
    for k in range(stages, 1, -1):
        end = cut[k][end]
        cuts.append(end)
    return cuts[::-1], best[stages][layers]
