"""A model while a Pipeline has it.

Each rank trains the tensors of its stages: `materialise` gives these the numbers that they begin with. All
others of the model would show old numbers there and take its memory: they are on the meta device, where
computing with them is an error, until `collect` brings the numbers of all ranks to rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError
from pipetrain.network.model import cast_exactly
from pipetrain.network.network import Network
from pipetrain.network.places import in_place_of, named_tensors, on_meta, places, replace


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


class Loan:
    """What a rank has in the model that was given: `own`, the tensors of its stages by name, and no others.

    A process that is `alone` has all of them.
    """

    def __init__(self, network: Network, own: Mapping[str, Tensor], alone: bool) -> None:
        self._model = network.model
        self._alone = alone
        self._collected = False  # whether rank 0 has all numbers
        self._swapped: list[tuple[Tensor, Tensor]] = []  # what the stages need, and what was collected
        tensors = named_tensors(network.model)
        others = {id(t): own[name] if name in own else on_meta(t) for name, t in tensors.items()}
        replace((network.model, *network.modules), others)

    def collect(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors into the model, by name; without any, as on ranks but 0, only note that rank 0 has."""
        self.take_back()
        self._swapped = put(self._model, tensors)
        self._collected = True

    def take_back(self) -> None:
        """Let the stages have their tensors again, before they train."""
        if self._swapped:
            self._put_own()
        self._swapped = []
        self._collected = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let the stages have their tensors for a while, in which these do not change."""
        self._put_own()
        try:
            yield
        finally:
            self._put_collected()

    def end(self, rank: int) -> None:
        """Leave the model on rank 0 as collected, and elsewhere without numbers."""
        if not self._alone and not (self._collected and rank == 0):
            replace([self._model], {id(t): on_meta(t) for t in named_tensors(self._model).values()})

    def _put_own(self) -> None:
        replace([self._model], {id(collected): own for own, collected in self._swapped})

    def _put_collected(self) -> None:
        replace([self._model], {id(own): collected for own, collected in self._swapped})


def put(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Put tensors into a model by name; return each that was there with that which is there now."""
    now = named_tensors(model)
    others = {name: new for name, new in tensors.items() if new is not now[name]}
    pairs = [(now[name], in_place_of(now[name], new)) for name, new in others.items()]
    replace([model], {id(old): new for old, new in pairs})
    return pairs


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
