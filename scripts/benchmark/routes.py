"""Suite: the bytes that a U-Net's skips take by routes, and handed on by hand through every stage.

The same model, cut and batch, twice: with its skips as they are, each of which travels straight from the
stage that makes it to the one that uses it; and with layers that take and return tuples, so that each cut
between the two carries it once more. Nothing else can be done where a stage sends to the next one alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pipetrain.boundary import named_layers
from pipetrain.models import unet
from pipetrain.partition.network import Pop, Stash


class HandedOn(nn.Module):
    """A layer of a chain in which the open skips are handed on behind its own value, the latest one last.

    `opens`: its input is a skip, to be handed on from here; `closes`: it uses the latest skip.
    """

    def __init__(self, layer: nn.Module, opens: bool, closes: bool) -> None:
        super().__init__()
        self.layer = layer
        self._opens, self._closes = opens, closes

    def forward(self, value: Tensor | Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        first, *skips = (value,) if isinstance(value, Tensor) else value
        out: Tensor = self.layer((first, skips.pop())) if self._closes else self.layer(first)
        skips += [first] if self._opens else []
        return (out, *skips) if skips else out


def by_hand(**sizes: int) -> nn.Sequential:
    """Return a U-Net of the same layers and weights, whose skips go through every layer between their ends.

    A Stash and a Pop do nothing in it: the layer behind each begins or ends the skip, so that no cut carries
    a tensor twice.
    """
    model, handed = unet(**sizes), nn.Sequential()
    before: nn.Module | None = None
    for name, layer in named_layers(model):
        kept = nn.Identity() if isinstance(layer, Stash | Pop) else layer
        handed.add_module(name, HandedOn(kept, isinstance(before, Stash), isinstance(before, Pop)))
        before = layer
    return handed
