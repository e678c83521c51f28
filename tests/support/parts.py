"""Parts of hand-made models, for a stage by itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from pipetrain.model.chain import Chain
from pipetrain.model.network import Part, Slice, ValueId
from pipetrain.model.specs import ValueSpec


def part_of(module: nn.Module, enters: int = 1, leaves: int = 1, before: int = 0, **known: Any) -> Part:
    """Return the layers of an nn.Sequential, or one layer named 0, as the end of a longer model.

    `enters` and `leaves`: how many tensors do; `before`: the number of layers of the model before these;
    `known`: more of a Slice.
    """
    layers = module._modules if isinstance(module, nn.Sequential) else {"0": module}
    model = nn.Sequential(*(nn.Identity() for _ in range(before)))
    model._modules = {f"before{name}": layer for name, layer in model._modules.items()} | layers
    slice = Slice(
        start=before,
        end=len(model),
        enters=tuple(ValueId(before - 1, number) for number in range(enters)),
        leaves=tuple(ValueId(len(model) - 1, number) for number in range(leaves)),
        form=ValueSpec((), single=enters == 1),
        **known,
    )
    return Chain(model).part(slice)
