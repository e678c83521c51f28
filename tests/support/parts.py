"""Parts of hand-made models, for a stage by itself."""

from __future__ import annotations

from torch import nn

from pipetrain.network.boundary import Boundary
from pipetrain.network.chain import Chain
from pipetrain.network.network import Made, Part, Slice


def part_of(
    module: nn.Module, entry: Boundary | None = None, exit: Boundary | None = None, before: int = 0
) -> Part:
    """Return the layers of an nn.Sequential, or one layer named 0, as the end of a longer model.

    `entry` and `exit`: what enters and leaves, by default one tensor; `before`: the number of layers of the
    model before these.
    """
    layers = module._modules if isinstance(module, nn.Sequential) else {"0": module}
    model = nn.Sequential(*(nn.Identity() for _ in range(before)))
    model._modules = {f"before{name}": layer for name, layer in model._modules.items()} | layers
    entering, leaving = (range(1 if side is None else len(side.specs)) for side in (entry, exit))
    slice = Slice(
        start=before,
        end=len(model),
        enters=tuple(Made(before - 1, number) for number in entering),
        leaves=tuple(Made(len(model) - 1, number) for number in leaving),
        single=entry is None or entry.single,
    )
    return Chain(model).part(slice)
