"""Profiles that nobody measured: with times that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipetrain.boundary import Boundary
from pipetrain.partition.estimate import estimate
from pipetrain.partition.profile import LayerTime, Profile
from pipetrain.partition.stages import Traffic


def layer(name: str = "layer", forward_s: float = 1, backward_s: float = 2, **others: Any) -> LayerTime:
    """A layer that takes nothing but what is said."""
    sizes = dict.fromkeys(("saved_bytes", "deferred_bytes", "peak_bytes"), 0)
    sizes |= dict.fromkeys(("output_bytes", "gradient_bytes"), 0)
    sizes |= dict.fromkeys(("param_bytes", "state_bytes", "fixed_bytes"), 0)
    halves = {"recorded_s": forward_s, "input_s": backward_s / 2, "weight_s": backward_s / 2}
    return LayerTime(name, forward_s, backward_s=backward_s, **{"step_s": 0, **halves, **sizes, **others})


def profile(layers: Sequence[LayerTime], latency_s: float = 0, s_per_byte: float = 0) -> Profile:
    return Profile({"model": "fake"}, {"device": "paper"}, 0, latency_s, s_per_byte, list(layers))


def handed_on(layers: Sequence[LayerTime], wire: Sequence[tuple[int, int]] = ()) -> list[Traffic]:
    """What each layer hands to the next; `wire`: (forward, back) bytes, by default those of the tensors."""
    wire = wire or [(layer.output_bytes, layer.gradient_bytes) for layer in layers]
    return [
        Traffic(index, (index + 1,), *wire[index], layers[index].output_bytes)
        for index in range(len(layers) - 1)
    ]


def profile_of(
    model: nn.Sequential, entry: Boundary, seconds: Sequence[float], latency_s: float = 0
) -> Profile:
    """A profile of a real model's layers: `seconds` for each one's forward, and twice that backward."""
    layers = [
        layer(
            estimated.name,
            forward_s,
            2 * forward_s,
            output_bytes=estimated.output.nbytes,
            gradient_bytes=sum(spec.nbytes for spec in estimated.output.gradients),
            saved_bytes=2**20,
            param_bytes=4 * estimated.params,
        )
        for estimated, forward_s in zip(estimate(model, entry), seconds, strict=True)
    ]
    return profile(layers, latency_s)
