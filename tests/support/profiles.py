"""Profiles that nobody measured: with times that a test chooses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipetrain.codec import Codecs
from pipetrain.network.network import INPUT, Made
from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan.costs import Predictor
from pipetrain.plan.estimate import Layer, estimate
from pipetrain.plan.profile import LayerTime, Profile
from pipetrain.plan.saved import Storages
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


@dataclass(frozen=True)
class Skip:
    """A value that layers behind the next one take; `maker`: the layer that makes it, or INPUT."""

    maker: int
    users: tuple[int, ...]
    nbytes: int
    needs_grad: bool = True


def bytes_of(n: int) -> TensorSpec:
    return TensorSpec((n,), torch.uint8)


def estimates_of(
    layers: Sequence[LayerTime],
    saved: Sequence[int] = (),
    trained: Sequence[int] = (),
    inputs: int = 0,
    skips: Sequence[Skip] = (),
    without_gradient: Collection[int] = (),
) -> tuple[list[Layer], ValueSpec]:
    """A chain of layers of these outputs that save so many bytes each, with weights of so many; its input."""
    made = {maker: [skip for skip in skips if skip.maker == maker] for maker in range(INPUT, len(layers))}

    def estimated(index: int, one: LayerTime) -> Layer:
        own, kept = saved[index] if saved else 0, made[index]
        needs = (index not in without_gradient, *(skip.needs_grad for skip in kept))
        far = [
            (Made(maker, number), skip.needs_grad)
            for maker, of in made.items()
            for number, skip in enumerate(of, 1)
            if index in skip.users
        ]
        return Layer(
            one.name,
            0,
            1,
            ValueSpec(tuple(map(bytes_of, (one.output_bytes, *(skip.nbytes for skip in kept)))), not kept),
            needs_grad=needs,
            requires_grad=needs,
            takes=(Made(index - 1, 0), *(value for value, _ in far)),
            reached=(index > 0, *(needs for _, needs in far)),
            storages=Storages(
                (one.output_bytes, own, *(skip.nbytes for skip in kept)),
                (0, *range(2, 2 + len(kept))),
                frozenset([1]),
            ),
            weights={f"{index}.weight": bytes_of(trained[index])} if trained else {},
        )

    entry = ValueSpec(tuple(map(bytes_of, (inputs, *(skip.nbytes for skip in made[INPUT])))))
    return [estimated(index, one) for index, one in enumerate(layers)], entry


class Wire(Codecs):
    """The bytes on the wire, there and back, of tensors of so many bytes; by default those of the tensors."""

    def __init__(self, sizes: Mapping[int, tuple[int, int]]) -> None:
        super().__init__()
        object.__setattr__(self, "sizes", sizes)

    def wire_bytes(self, specs: Sequence[TensorSpec], forward: bool) -> int:
        known = (self.sizes.get(spec.nbytes, (spec.nbytes,) * 2) for spec in specs)  # type: ignore[attr-defined]
        return sum(there if forward else back for there, back in known)


def predictor_of(
    layers: Sequence[LayerTime],
    placement: Sequence[int],
    counts: Sequence[Sequence[Counts]],
    model: tuple[list[Layer], ValueSpec] | None = None,
    wire: Mapping[int, tuple[int, int]] | None = None,
    latency_s: float = 0,
    s_per_byte: float = 0,
    **others: Any,
) -> Predictor:
    """What predicts stages of these layers; `wire`: by default the bytes of outputs and gradients."""
    estimated, inputs = model or estimates_of(layers)
    known = {one.output_bytes: (one.output_bytes, one.gradient_bytes) for one in layers} | (wire or {})
    schedule: dict[str, Any] = {"microbatches": 4, "buffer_size": 2, "codecs": Wire(known), **others}
    return Predictor(profile(layers, latency_s, s_per_byte), estimated, inputs, placement, counts, **schedule)


def held_by(activations: Sequence[int], versions: Sequence[int], bound: int = 2) -> list[list[Counts]]:
    """What stages in a row hold at these peaks, with full edges."""
    near = {
        edge: bound for stage in range(len(activations)) for edge in ((stage, stage + 1), (stage + 1, stage))
    }
    last = len(activations) - 1
    near = {edge: of for edge, of in near.items() if max(edge) <= last}
    pairs = zip(activations, versions, strict=True)
    return [[fullest(stage, *pair, near)] for stage, pair in enumerate(pairs)]


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
