"""Where the model is cut: the first layer of each stage but the first.

A pipeline goes at the pace of its slowest stage, so the automatic cuts minimise the largest stage, exactly,
by dynamic programming over contiguous slices (the linear partition problem).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipetrain.errors import ConfigError
from pipetrain.partition.estimate import Layer, list_layers

STRATEGIES = ("even", "params", "flops")


def choose_cuts(partition: str | Sequence[int], layers: Sequence[Layer], stages: int) -> list[int]:
    """Return the first layers of stages 1, 2, ...: as given, or by one of STRATEGIES.

    Raises ConfigError, with the list of layers, where there are too few of them, a stage would be empty or a
    cut lies outside the model.
    """
    if stages > len(layers):
        raise ConfigError(
            f"stages={stages} needs at least as many layers, but the model has {len(layers)}: "
            f"{list_layers(layers)}; choose fewer stages or a deeper model"
        )
    if not isinstance(partition, str):
        return _given(list(partition), layers, stages)
    if partition == "even":
        return [round(len(layers) * stage / stages) for stage in range(1, stages)]
    if partition == "params":
        return balance([layer.params for layer in layers], stages)
    if partition == "flops":
        return balance([layer.flops for layer in layers], stages)
    raise ConfigError(
        f"partition={partition} is unknown; choose one of {', '.join(STRATEGIES)}, or give the first layer "
        f"of each stage but the first, such as partition=[{len(layers) // 2}]"
    )


def _given(cuts: list[int], layers: Sequence[Layer], stages: int) -> list[int]:
    if len(cuts) != stages - 1:
        raise ConfigError(
            f"partition={cuts} cuts the model into {len(cuts) + 1} stages, but there are {stages}; "
            f"give {stages - 1} first layers out of: {list_layers(layers)}"
        )
    edges = [0, *cuts, len(layers)]
    if any(a >= b for a, b in pairwise(edges)):
        raise ConfigError(
            f"partition={cuts} leaves a stage without layers; give {stages - 1} rising numbers from 1 to "
            f"{len(layers) - 1} out of: {list_layers(layers)}"
        )
    return cuts


def balance(weights: Sequence[float], stages: int) -> list[int]:
    """Cut `weights` into `stages` runs, none empty, whose largest sum is as small as it can be.

    Among equals the later runs are the smaller ones where one choice decides it. O(stages n^2) for n weights.
    """
    n = len(weights)
    prefix = [0.0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    # best[k][i]: the smallest possible largest sum of the first i weights in k runs; cut[k][i]: its last cut.
    best = [[float("inf")] * (n + 1) for _ in range(stages + 1)]
    cut = [[0] * (n + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for k in range(1, stages + 1):
        for i in range(k, n + 1):
            for j in range(k - 1, i):
                largest = max(best[k - 1][j], prefix[i] - prefix[j])
                if largest < best[k][i]:
                    best[k][i], cut[k][i] = largest, j
    cuts, end = [], n
    for k in range(stages, 1, -1):
        end = cut[k][end]
        cuts.append(end)
    return cuts[::-1]
