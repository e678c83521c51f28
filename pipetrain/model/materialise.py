"""Gives a model that was built on the meta device its memory and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError
from pipetrain.model.network import Network
from pipetrain.model.requirements import cast_exactly
from pipetrain.model.tensor_places import in_place_of, named_tensors, names_by_id, replace, tensors_in


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
    names = names_by_id(network.model)
    used = (name for index in layers for name in tensors_in(network.modules[index], names))
    numbers = values.tensors(list(dict.fromkeys([*used, *more])))
    substitutes: dict[int, Tensor] = {}
    for name in list(numbers):
        old, new = tensors[name], cast_exactly(name, numbers.pop(name), tensors[name].dtype)
        if old.is_meta:
            alike = new.stride() == old.stride()
            laid = new if alike else torch.empty_like(old, device=new.device).copy_(new)
            substitutes[id(old)] = in_place_of(old, laid)
        else:
            old.data.copy_(new)
    replace((network.model, *network.modules), substitutes)


def give_memory(model: nn.Module) -> list[str]:
    """Give memory to tensors on the meta device; return their names.

    They get the numbers of rank 0, as all tensors do, where that has them: it is so after another Pipeline of
    the model that was collected there. Raises ConfigError for a model on another device than the CPU.
    """
    empty = []
    substitutes: dict[int, Tensor] = {}
    for name, tensor in named_tensors(model).items():
        if tensor.is_meta:
            empty.append(name)
            substitutes[id(tensor)] = in_place_of(tensor, torch.zeros_like(tensor, device="cpu"))
        elif tensor.device.type != "cpu":
            raise ConfigError(
                f"{name} of the model is on {tensor.device}: build the model on the CPU, and Pipeline moves "
                f"the stages of each rank to its device"
            )
    replace([model], substitutes)
    return empty


def refuse_without_numbers(names: Sequence[str]) -> None:
    """Refuse a model of which rank 0 has no numbers. Raises ConfigError."""
    if names:
        raise ConfigError(
            f"{names[0]} of the model is on the meta device and has no values: give the function that makes "
            f"the model in place of it, Pipeline(lambda: ...); or where another Pipeline has trained it, "
            f"call its collect(), on all ranks, before its close()"
        )
