"""A module as a network: an nn.Sequential is a chain of layers, with skips marked by Stash and Pop.

Any other module is traced, see tracing/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, TypeGuard

from torch import Tensor, nn

from pipetrain.errors import ConfigError
from pipetrain.model import random_numbers as draws
from pipetrain.model.network import Network, Part, See, Slice, Tensors, ValueId
from pipetrain.model.specs import Value, ValueSpec, as_tuple, leaves_of, named_layers, packer


class Stash(nn.Module):
    """A layer of an nn.Sequential that returns its input and stashes it for the Pop that names it."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Value] = []  # at most one, between Stash and Pop in one process

    def forward(self, value: Value) -> Value:
        self._kept[:] = [value]
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": []}  # the rest of a failed forward is not copied


class Pop(nn.Module):
    """A later layer that returns its input and a Stash's value, as one tuple of tensors.

        stash = Stash()
        nn.Sequential(down, stash, inner, Pop(stash), join)  # join takes the tuple
        nn.Sequential(down, stash, inner, Pop(stash, join))  # the same, in one layer

    The stashed value is sent directly to the stage of the Pop. Each Stash has one Pop.
    """

    def __init__(self, stash: Stash, join: nn.Module | None = None) -> None:
        super().__init__()
        self._of = [stash]  # in a list: no submodule
        self.join = nn.Identity() if join is None else join

    @property
    def stash(self) -> Stash:
        return self._of[0]

    def forward(self, value: Value) -> Any:
        """Return the tensors of the value, then those of the stash, or `join` of this tuple."""
        if not self.stash._kept:
            raise RuntimeError("a Pop ran before its Stash: put the Stash into a layer before it")
        return self.join((*as_tuple(value), *as_tuple(self.stash._kept.pop())))


class Chain(Network):
    """An nn.Sequential; each layer takes the output of the one before, a Pop also its Stash's value."""

    model: nn.Sequential
    way_out = (
        "its layers exchange something that they do not return: let them return it, or keep them in one "
        "stage by partition="
    )

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.names, self.modules = zip(*named_layers(model), strict=True)
        self.stashes = _stashes(self.names, self.modules)
        """Pop -> Stash, by the numbers of the layers."""

    def takes(self, index: int, specs: Sequence[ValueSpec]) -> tuple[ValueId, ...]:
        layers = [index - 1, *([self.stashes[index]] if index in self.stashes else [])]
        return tuple(ValueId(layer, k) for layer in layers for k in range(len(specs[layer + 1].specs)))

    def call(self, index: int, tensors: Tensors, specs: Sequence[ValueSpec]) -> Value:
        module = self.modules[index]
        if isinstance(module, Pop):
            joined: Value = module.join(tensors)
            return joined
        value: Value = specs[index].pack(tensors)
        return value if isinstance(module, Stash) else module(value)

    def run(self, inputs: ValueSpec, tensors: Tensors) -> Any:
        return self.model(inputs.pack(tuple(tensors)))

    def part(self, slice: Slice, evaluated: Slice | None = None) -> Part:
        return _ChainPart(self, slice, evaluated)

    def twin(self) -> Chain:
        twin = Chain(deepcopy(self.model))
        twin.values = self.values
        return twin

    def spare(self) -> Chain:
        values = (value for module in self.model.modules() for value in vars(module).values())
        if any(getattr(value, "__closure__", None) for value in values):
            return self  # a copy's functions would still refer to the layers of this one
        try:
            return self.twin()
        except Exception:  # a layer may hold anything
            return self


def _stashes(names: Sequence[str], modules: Sequence[nn.Module]) -> dict[int, int]:
    """Map each Pop to its Stash, by number. Raises ConfigError for one without the other."""
    waiting: dict[Stash, int] = {}
    stash_of: dict[int, int] = {}
    wrong: list[int] = []
    for index, module in enumerate(modules):
        if isinstance(module, Stash) and module not in waiting:
            waiting[module] = index
        elif isinstance(module, Pop) and module.stash in waiting:
            stash_of[index] = waiting.pop(module.stash)
        elif any(isinstance(inner, Stash | Pop) for inner in module.modules()):
            wrong.append(index)
    for index in (*wrong, *waiting.values()):
        raise ConfigError(
            f"layer {index} ({names[index]}) is no Stash with a Pop behind it, nor such a Pop: each Stash is "
            f"a layer of the nn.Sequential itself, with one Pop behind it that names it"
        )
    return stash_of


class _ChainPart(Part):
    """Layers of a Chain, under their own names."""

    def __init__(self, chain: Chain, slice: Slice, evaluated: Slice | None) -> None:
        super().__init__(slice, evaluated)
        self._stashes = {pop: stash for pop, stash in chain.stashes.items() if slice.start <= pop < slice.end}
        self._leaving = [value.layer for value in slice.leaves if value.number == 0]
        for index in range(slice.start, slice.end):
            self._modules[chain.names[index]] = chain.modules[index]  # add_module refuses a layer named pack
        # In the form that the last layer returned; in a list, as setting a module's attribute takes 6 us.
        self._packs: list[Callable[[Tensors], Any]] = [tuple]

    def forward(self, *tensors: Tensor) -> Tensors:
        return self.observed(tensors)

    def observed(self, tensors: Tensors, see: See | None = None) -> Tensors:
        slice = self.slice
        values: dict[int, tuple[Tensor, ...]] = {}  # of the layer before, and of stashes
        for entering, tensor in zip(slice.enters, tensors, strict=True):
            values[entering.layer] = (*values.get(entering.layer, ()), tensor)
        value: Any = slice.form.pack(values[slice.start - 1])
        for index, (name, layer) in enumerate(self._modules.items(), slice.start):
            assert layer is not None
            if index in slice.drawing:
                draws.begin(index)
            if isinstance(layer, Pop):
                value = layer.join((*as_tuple(value), *values[self._stashes[index]]))
            elif isinstance(layer, Stash):
                values[index] = as_tuple(value)
            else:
                value = layer(value)
            if see is not None:
                see(name, leaves_of(value))
        self._packs[0], values[slice.end - 1] = packer(value), leaves_of(value)
        return tuple(tensor for layer in self._leaving for tensor in values[layer])

    def pack(self, outputs: Tensors) -> Any:
        return self._packs[0](outputs)


def is_chain(model: nn.Module) -> TypeGuard[nn.Sequential]:
    """Return whether a model runs its layers one by one and does nothing else, as nn.Sequential itself."""
    if not isinstance(model, nn.Sequential):
        return False
    methods = ("forward", "__call__", "_wrapped_call_impl", "_call_impl", "eval")
    plain = (getattr(type(model), method) is getattr(nn.Sequential, method) for method in methods)
    overrides = not all(plain) or any(method in vars(model) for method in methods)
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return not (overrides or any(getattr(model, kind) for kind in (*kinds, "_parameters", "_buffers")))


def network_of(model: nn.Module | Network, example: ValueSpec, autocast: bool = False) -> Network:
    """Return a model as a network for inputs like `example`; `autocast`: in bf16. Raises ConfigError."""
    if isinstance(model, Network):
        return model
    if is_chain(model):
        if example.names is not None:
            raise ConfigError(
                f"the inputs are a dict of {', '.join(example.names)}, and an nn.Sequential takes a tensor "
                f"or a tuple: let the data give that, or the model be a module with forward("
                f"{', '.join(example.names)})"
            )
        return Chain(model)
    from pipetrain.model.tracing.trace import trace  # imports torch.export, which takes a second

    return trace(model, example, autocast)
