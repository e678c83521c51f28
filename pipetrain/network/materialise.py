"""Gives some layers of a model their numbers: those that a rank trains.

Tensors on the meta device are replaced, in every place where the model or a layer keeps them, so that what is
shared stays shared; others are overwritten. The rest of the model stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError
from pipetrain.network.network import Network
from pipetrain.network.places import places, replace


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name, each once."""
    return dict(chain(model.named_parameters(), model.named_buffers()))


@torch.no_grad()
def materialise(network: Network, layers: Iterable[int], more: Iterable[str] = ()) -> None:
    """Give layers of a network, by number, and tensors named `more`, the numbers of its `values`, if any.

    The network has no `values` any more. Raises ConfigError for numbers that would be rounded.
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
        if not old.is_meta:
            old.data.copy_(new)
            continue
        others[id(old)] = in_place_of(old, new)
    replace((network.model, *network.modules), others)


def in_place_of(old: Tensor, new: Tensor) -> Tensor:
    """Return new numbers as the parameter or buffer that the old ones are."""
    if not isinstance(old, nn.Parameter) or isinstance(new, nn.Parameter):
        return new
    made = nn.Parameter(new, old.requires_grad)
    vars(made).update(vars(old))  # attributes set by a layer
    return made


def cast_exactly(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a model's tensor as another dtype. Raises ConfigError if that rounds it."""
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    if tensor.is_meta:  # whose numbers are not known yet
        exact = torch.promote_types(tensor.dtype, dtype) == dtype
    else:
        exact = torch.allclose(cast.to(tensor.dtype), tensor, rtol=0, atol=0, equal_nan=True)
    if not exact:
        raise ConfigError(
            f"{name} of the model is {_name(tensor.dtype)}, and dtype={_name(dtype)} would round it: choose "
            f"dtype={_name(tensor.real.dtype)}, or let the factory make it {_name(dtype)}"
        )
    return cast


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
