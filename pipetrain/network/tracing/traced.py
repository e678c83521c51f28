"""A traced model as a network: its layers, what each takes, and slices of it as modules.

The modules hold the very parameters and buffers of the user's model, under their names there. Their code is
that of the traced operations, see layering.py. Training and evaluation have graphs of their own, which are
cut at the same places; the values that cross there may differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy, deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_unflatten

from pipetrain.network.network import LastLayer, Made, Network, Part, See, Slice, Tensors
from pipetrain.network.tracing.dataflow import Dataflow, spec_of
from pipetrain.network.tracing.grouping import Group
from pipetrain.network.tracing.layering import Code, Layers
from pipetrain.network.tracing.reading import canonical
from pipetrain.network.values import TensorSpec, Value, ValueSpec


class Traced(Network):
    """Any nn.Module, as traced by torch.export. Layers return tuples; see trace.py for how it is made."""

    modules: list[Part]
    shared_buffers_are_read_only = True  # what is written and read elsewhere too keeps layers together

    def __init__(
        self, model: nn.Module, modes: Mapping[bool, tuple[Dataflow, Sequence[int]]], groups: Sequence[Group]
    ) -> None:
        self.model = model
        self.names = [group.name for group in groups]
        self._modes = {training: Layers(*flow_and_cuts) for training, flow_and_cuts in modes.items()}
        both = zip(*(mode.held for mode in self._modes.values()), strict=True)
        self.placed = _placed(model, [dict.fromkeys(trained + evaluated) for trained, evaluated in both])
        """The names of the tensors of each layer; one without use has a place too."""
        self.modules = [self.part(self.alone(n), self.alone(n, False)) for n in range(len(groups))]

    def alone(self, index: int, training: bool = True) -> Slice:
        """Return one layer as a slice."""
        return self._modes[training].slices[index]

    def takes(self, index: int, made: Sequence[ValueSpec]) -> tuple[Made, ...]:
        return self.modules[index].slice.enters

    def call(self, index: int, tensors: Tensors, made: Sequence[ValueSpec]) -> Value:
        result: Tensors = self.modules[index](*tensors)
        return self.pack(result) if index == len(self.names) - 1 else result

    def part(self, slice: Slice, evaluated: Slice | None = None) -> Part:
        return TracedPart(self, slice, evaluated)

    def twin(self) -> Traced:
        made = copy(self)
        made.model, made.modules = deepcopy((self.model, self.modules))  # at once, for they share tensors
        return made

    def pack(self, outputs: Tensors) -> Any:
        """Return the tensors of the last layer as the model returns them."""
        tensors, operations = iter(outputs), self._modes[True].flow.operations
        flat = [next(tensors) if isinstance(out, fx.Node) else out for out in operations.outputs]
        return tree_unflatten(flat, operations.tree)

    def code(self, slice: Slice, training: bool, device: torch.device) -> Code:
        """Return the code of some layers in a mode."""
        return self._modes[training].code(slice, device)

    def spec(self, made: Made, samples: int) -> TensorSpec:
        """Return what a value is in evaluation, for a number of samples."""
        return spec_of(self._modes[False].values[made].meta["val"], samples)

    def __deepcopy__(self, memo: object) -> Traced:
        return self  # copies of a part share it


class TracedPart(Part):
    """Layers of a traced model, with code of their own for training and for evaluation."""

    def __init__(self, network: Traced, slice: Slice, evaluated: Slice | None = None) -> None:
        super().__init__(slice, evaluated)
        self._network = network
        names = chain(*network.placed[slice.start : slice.end])
        self._held = {name: _hold(self, network.model, name) for name in names}
        """By name the registry, which copies have of their own, and the key in it."""

    def forward(self, *tensors: Tensor) -> Tensors:
        return self._run(self.slice, tensors)

    def _run(self, slice: Slice, tensors: Sequence[Tensor]) -> Tensors:
        first = tensors[0] if tensors else next(self.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        code = self._network.code(slice, self.training, device)
        registries = map(self._held.__getitem__, code.held)
        return code.function(*tensors, *(registry[key] for registry, key in registries))

    def observed(self, tensors: Tensors, see: See) -> Tensors:
        network, values = self._network, dict(zip(self.slice.enters, tensors, strict=True))
        for index in range(self.slice.start, self.slice.end):
            layer = network.alone(index, self.training)
            outputs = self._run(layer, [values[made] for made in layer.enters])
            outputs = see(network.names[index], network.modules[index], outputs)
            values |= {Made(index, number): tensor for number, tensor in enumerate(outputs)}
        return tuple(values[made] for made in self.slice.leaves)

    def pack(self, outputs: Tensors) -> Any:
        return self._network.pack(outputs)

    def last_layer(self) -> LastLayer:
        network = self._network
        alone = network.alone(len(network.names) - 1, training=False)
        return LastLayer(alone.enters, network.spec, lambda tensors: self.pack(self._run(alone, tensors)))


def _placed(model: nn.Module, used: Sequence[Collection[str]]) -> list[list[str]]:
    """Return the tensors of each layer; one that none uses is where the one before it in the model is."""
    placed, last = [list(names) for names in used], 0
    for name in canonical(model).values():
        last = next((index for index, names in enumerate(used) if name in names), last)
        if name not in used[last]:
            placed[last].append(name)
    return placed


def _hold(root: nn.Module, model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Register a model's tensor below `root` under its name; return the registry with its key."""
    path, _, key = name.rpartition(".")
    for part in path.split(".") if path else ():
        root = root._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    owner = model.get_submodule(path)
    registry, held = ("_parameters" if key in owner._parameters else "_buffers"), vars(root)
    held[registry][key] = getattr(owner, registry)[key]
    if key in owner._non_persistent_buffers_set:
        root._non_persistent_buffers_set.add(key)
    return held[registry], key
