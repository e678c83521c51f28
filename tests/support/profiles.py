"""Profiles that nobody measured: with times that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipetrain.network.boundary import TensorSpec, ValueSpec
from pipetrain.network.network import Made
from pipetrain.plan.estimate import Layer, estimate
from pipetrain.plan.profile import LayerTime, Profile
from pipetrain.plan.saved import Storages
from pipetrain.plan.stages import Model, Traffic
from pipetrain.schedule.memory import Counts, fullest


def layer(name: str = "layer", forward_s: float = 1, backward_s: float = 2, **others: Any) -> LayerTime:
    """A layer that takes nothing but what is said."""
    sizes = dict.fromkeys(("peak_bytes", "output_bytes", "gradient_bytes", "state_bytes"), 0)
    halves = {
        "recorded_s": forward_s,
        "kept_s": forward_s,
        "again_s": forward_s / 4,
        "input_s": backward_s / 2,
        "weight_s": backward_s / 2,
    }
    return LayerTime(name, forward_s, backward_s=backward_s, **{"step_s": 0, **halves, **sizes, **others})


def profile(layers: Sequence[LayerTime], latency_s: float = 0, s_per_byte: float = 0) -> Profile:
    return Profile({"model": "fake"}, {"device": "paper"}, latency_s, s_per_byte, list(layers))


def estimates_of(
    layers: Sequence[LayerTime], saved: Sequence[int] = (), trained: Sequence[int] = (), inputs: int = 0
) -> Model:
    """A chain of layers of these outputs that save so many bytes each, with weights of so many."""

    def bytes_of(n: int) -> TensorSpec:
        return TensorSpec((n,), torch.uint8)

    def estimated(index: int, one: LayerTime) -> Layer:
        own = saved[index] if saved else 0
        return Layer(
            one.name,
            0,
            1,
            ValueSpec((bytes_of(one.output_bytes),)),
            needs_grad=(True,),
            requires_grad=(True,),
            takes=(Made(index - 1, 0),),
            reached=(index > 0,),
            storages=Storages((one.output_bytes, own), (0,), frozenset([1])),
            weights={f"{index}.weight": bytes_of(trained[index])} if trained else {},
        )

    entry = ValueSpec((bytes_of(inputs),))
    return Model([estimated(index, one) for index, one in enumerate(layers)], entry)


def held_by(activations: Sequence[int], versions: Sequence[int], bound: int = 2) -> list[list[Counts]]:
    """What stages in a row hold at these peaks, with full edges."""
    near = {
        edge: bound for stage in range(len(activations)) for edge in ((stage, stage + 1), (stage + 1, stage))
    }
    last = len(activations) - 1
    near = {edge: of for edge, of in near.items() if max(edge) <= last}
    pairs = zip(activations, versions, strict=True)
    return [[fullest(stage, *pair, near)] for stage, pair in enumerate(pairs)]


def handed_on(layers: Sequence[LayerTime], wire: Sequence[tuple[int, int]] = ()) -> list[Traffic]:
    """What each layer hands to the next; `wire`: (forward, back) bytes, by default those of the tensors."""
    wire = wire or [(layer.output_bytes, layer.gradient_bytes) for layer in layers]
    return [
        Traffic(index, (index + 1,), *wire[index], layers[index].output_bytes)
        for index in range(len(layers) - 1)
    ]


def profile_of(
    model: nn.Sequential, entry: ValueSpec, seconds: Sequence[float], latency_s: float = 0
) -> Profile:
    """A profile of a real model's layers: `seconds` for each one's forward, and twice that backward."""
    layers = [
        layer(
            estimated.name,
            forward_s,
            2 * forward_s,
            output_bytes=estimated.output.nbytes,
            gradient_bytes=sum(s.nbytes for n, s in enumerate(estimated.output.specs) if estimated.needs(n)),
        )
        for estimated, forward_s in zip(estimate(model, entry), seconds, strict=True)
    ]
    return profile(layers, latency_s)
