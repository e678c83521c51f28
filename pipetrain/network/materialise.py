"""The numbers that a model begins with: those of its own tensors, of a factory, or of a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError
from pipetrain.network.model import cast_exactly
from pipetrain.network.network import Network
from pipetrain.network.places import in_place_of, named_tensors, places, replace


@torch.no_grad()
def materialise(network: Network, layers: Iterable[int], more: Iterable[str] = ()) -> None:
    """Give layers of a network, by number, and tensors named `more`, the numbers of its `values`, if any.

    Tensors on the meta device are replaced in every place where the model or a layer keeps them, so that what
    is shared stays shared; others are overwritten. The network has no `values` any more. Raises ConfigError
    for numbers that would be rounded.
    """
    values, network.values = network.values, None
    if values is None:
        return
    tensors = named_tensors(network.model)
    names = {id(tensor): name for name, tensor in tensors.items()}
    used = (names.get(id(place.tensor)) for index in layers for place in places(network.modules[index]))
    made = values.tensors(list(dict.fromkeys([*filter(None, used), *more])))
    others: dict[int, Tensor] = {}
    for name in list(made):
        old, new = tensors[name], cast_exactly(name, made.pop(name), tensors[name].dtype)
        if old.is_meta:
            others[id(old)] = in_place_of(old, new)
        else:
            old.data.copy_(new)
    replace((network.model, *network.modules), others)


def without_numbers(model: nn.Module) -> list[str]:
    """Give memory to tensors on the meta device; return their names.

    They get the numbers of rank 0, as all tensors do, where that has them: it is so after another Pipeline of
    the model that was collected there. Raises ConfigError for a model on another device than the CPU.
    """
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        if tensor.device.type not in ("cpu", "meta"):
            raise ConfigError(
                f"{name} of the model is on {tensor.device}: build the model on the CPU, and Pipeline moves "
                f"the stages of each rank to its device"
            )
    empty = {name: tensor for name, tensor in tensors.items() if tensor.is_meta}
    others = {id(t): in_place_of(t, torch.zeros_like(t, device="cpu")) for t in empty.values()}
    replace([model], others)
    return list(empty)


def refuse_without_numbers(names: Sequence[str]) -> None:
    """Refuse a model of which rank 0 has no numbers. Raises ConfigError."""
    if names:
        raise ConfigError(
            f"{names[0]} of the model is on the meta device and has no values: give the function that makes "
            f"the model in place of it, Pipeline(lambda: ...); or where another Pipeline has trained it, "
            f"call its collect(), on all ranks, before its close()"
        )
