"""Chooses the cuts: the first layer of each stage but the first.

The slowest stage limits a pipeline, so automatic cuts minimise the largest stage, exactly, by dynamic
programming over contiguous slices (the linear partition problem). Where ranks have several stages each, the
slowest rank limits it, and a large stage still holds up the filling: both are minimised together, by search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, combinations, pairwise, product

from pipetrain.errors import ConfigError
from pipetrain.network.values import ValueSpec
from pipetrain.plan.cut import values_entering
from pipetrain.plan.estimate import Layer

GIB = 2**30


def choose_cuts(
    partition: str | Sequence[int],
    layers: Sequence[Layer],
    stages: int,
    joins: Sequence[str] = (),
    where: Sequence[int] | None = None,
) -> list[int]:
    """Return the first layers of stages 1, 2, ...: as given, or by one of STRATEGIES.

    `joins`: why some layers are not finer. `where`: the rank of each stage; by default each has its own.
    Raises ConfigError, with the list of layers, if there are too few layers, a stage would be empty or a cut
    is outside the model.
    """
    listed = ", ".join(f"{i} {layer.name}" for i, layer in enumerate(layers))
    if stages > len(layers):
        raise ConfigError(
            f"stages={stages} needs at least as many layers, but the model has {len(layers)}: "
            f"{listed}{''.join(f'; {why}' for why in joins)}; choose fewer stages or a deeper model"
        )
    if partition == "even":
        return [round(len(layers) * stage / stages) for stage in range(1, stages)]
    if isinstance(partition, str):
        weights = [getattr(layer, partition) for layer in layers]
        return balance(weights, stages) if where is None else balance_ranks(weights, where)
    cuts = list(partition)
    if len(cuts) != stages - 1:
        raise ConfigError(
            f"partition={cuts} cuts the model into {len(cuts) + 1} stages, but there are {stages}; "
            f"give {stages - 1} first layers out of: {listed}"
        )
    if any(a >= b for a, b in pairwise([0, *cuts, len(layers)])):
        raise ConfigError(
            f"partition={cuts} leaves a stage without layers; give {stages - 1} rising numbers from 1 to "
            f"{len(layers) - 1} out of: {listed}"
        )
    return cuts


def balance(weights: Sequence[float], stages: int) -> list[int]:
    """Cut `weights` into `stages` non-empty slices whose largest sum is as small as possible."""
    until = [0.0, *accumulate(weights)]
    return best_cuts(len(weights), stages, lambda stage, start, end: until[end] - until[start])[0]


def balance_ranks(weights: Sequence[float], where: Sequence[int]) -> list[int]:
    """Cut `weights` into a slice for each stage, which rank `where[stage]` holds.

    The largest sum of a rank and the largest slice are as small together as a local search finds. It starts
    from slices of equal sums, and from such slices of each share of the weights for the first half of the
    stages.
    """
    stages, half = len(where), len(where) // 2
    if len(set(where)) == stages or len(set(where)) == 1:
        return balance(weights, stages)
    until = [0.0, *accumulate(weights)]

    def size(cuts: Sequence[int]) -> float:
        held = dict.fromkeys(where, 0.0)
        sums = [until[end] - until[start] for start, end in pairwise([0, *cuts, len(weights)])]
        for rank, weight in zip(where, sums, strict=True):
            held[rank] += weight
        return max(held.values()) + max(sums)

    starts = [balance(weights, stages)]
    for turn in range(half, len(weights) - (stages - half) + 1):
        above = [turn + cut for cut in balance(weights[turn:], stages - half)]
        starts.append([*balance(weights[:turn], half), turn, *above])
    return min((_refined(start, len(weights), size) for start in starts), key=size)


def _refined(cuts: list[int], layers: int, size: Callable[[Sequence[int]], float]) -> list[int]:
    """Move one cut anywhere between its neighbours, or two by a layer each, as long as that is smaller."""
    best, before = size(cuts), math.inf
    while best < before:
        before = best
        for moved in _moves(cuts, layers):
            if (moved_size := size(moved)) < best:
                best, cuts = moved_size, moved
    return cuts


def _moves(cuts: list[int], layers: int) -> Iterator[list[int]]:
    ends = [0, *cuts, layers]
    for i in range(len(cuts)):
        for cut in range(ends[i] + 1, ends[i + 2]):
            yield [*cuts[:i], cut, *cuts[i + 1 :]]
    for (i, j), by, other in product(combinations(range(len(cuts)), 2), (-1, 1), (-1, 1)):
        moved = list(cuts)
        moved[i], moved[j] = moved[i] + by, moved[j] + other
        if all(a < b for a, b in pairwise([0, *moved, layers])):
            yield moved


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


def lighter_cuts(layers: Sequence[Layer], cuts: Sequence[int], inputs: ValueSpec) -> list[int]:
    """Move cuts over a layer that only hands on what it takes, such as a Pop, where fewer bytes cross then.

    The stages' work stays the same. Behind a Pop a skip would travel to the Pop's stage, and on from there.
    """
    outputs = [inputs, *(layer.output for layer in layers)]

    def sent(cuts: Sequence[int]) -> int:
        entering = chain.from_iterable(values_entering(layers, cuts, len(inputs.specs))[1:])
        return sum(outputs[value.layer + 1].specs[value.number].nbytes for value in entering)

    best = list(cuts)
    for position in range(len(best)):
        for moved in (best[position] - 1, best[position] + 1):
            other = [*best[:position], moved, *best[position + 1 :]]
            if any(a >= b for a, b in pairwise([0, *other, len(layers)])):
                continue
            layer = layers[min(best[position], moved)]
            elements = sum(spec.numel for spec in layer.output.specs)
            idle = any(layer.views) and not layer.params and layer.flops == elements
            if idle and sent(other) < sent(best):
                best = other
                break
    return best
