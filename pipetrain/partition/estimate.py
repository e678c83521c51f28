"""What each layer costs, returns and has a gradient for, worked out without computing.

The layers run once under FakeTensorMode, on tensors that have a shape and no data: a pass that computes
would update BatchNorm's running statistics, and the meta device gets dtypes wrong under autocast. Only a
layer that reads numbers (`if torch.rand(()) < p`) has to be run for real, on copies of its tensors.

A training model is differentiated in the same way, layer by layer from the last to the first, which tells for
each tensor between two layers whether one process would need its gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from pipetrain.boundary import Boundary, TensorSpec, Value, as_tuple, describe, named_layers
from pipetrain.errors import ConfigError
from pipetrain.numerics import Numerics
from pipetrain.places import places, standing_in

MOST_REAL = 2**30  # bytes of input that a layer is run on for real


@dataclass(frozen=True, slots=True)
class Layer:
    """One cuttable layer, as estimated for one microbatch size."""

    name: str
    params: int  # elements, each shared parameter once
    flops: int  # of one forward, plus one per output element
    output: Boundary
    writes_input: bool = False  # it works in place on what it is given
    hands_through: bool = False  # what it returns shares memory with what it is given
    keeps_output: bool = (
        False  # what it returns may change later: the layer keeps it too, or returns it twice
    )
    borrows: tuple[str, ...] = ()  # tensors of other layers that it uses without having them registered


def estimate(
    model: nn.Sequential,
    example: TensorSpec,
    mode: FakeTensorMode | None = None,
    numerics: Numerics | None = None,
) -> list[Layer]:
    """Estimate every layer of `model` for one microbatch of the shape and dtype of `example`.

    Where the model is in training mode, the boundaries say which gradients are needed. Raises ConfigError
    with the layer's name where a layer cannot take what the one before it returns, or trains weights that
    nobody would see.
    """
    numerics = numerics or Numerics(example.dtype)
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    registered = _Registered(model)
    passes: list[_Pass] = []
    with _quiet():
        try:
            with mode:
                value: Value = torch.empty(example.shape, dtype=example.dtype)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"a microbatch of {example} cannot be: {_line(error)}") from error
        for index, (name, module) in enumerate(named_layers(model)):
            made = _Pass(name, module, value, numerics, mode, registered, model.training)
            try:
                made.forward()
            except Exception as error:
                raise ConfigError(
                    f"layer {index} ({name}) of the model cannot take {describe(value)}: {_line(error)}"
                ) from error
            if made.wrong:
                raise ConfigError(f"layer {index} ({name}) of the model {made.wrong}")
            value = made.handed_on(mode)
            passes.append(made)
        return _with_gradients(passes) if model.training else [made.layer for made in passes]


def _with_gradients(passes: Sequence[_Pass]) -> list[Layer]:
    layers: list[Layer] = []
    needed = tuple(t.requires_grad for t in passes[-1].outputs)
    for made in reversed(passes):
        requires = tuple(t.requires_grad for t in made.outputs)
        output = replace(made.layer.output, needs_grad=needed, requires_grad=requires)
        layers.append(replace(made.layer, output=output))
        needed = made.backward(needed)
    return layers[::-1]


class _Registered:
    """The parameters and buffers of a whole model."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.ids = {id(t) for _, t in tensors}
        self.names = {_storage(t): name for name, t in tensors}
        self.trained = {name for name, t in tensors if t.requires_grad}


class _Pass:
    """One layer's run, first under FakeTensorMode and, where that is not possible, for real."""

    layer: Layer
    outputs: tuple[Tensor, ...]

    def __init__(
        self,
        name: str,
        module: nn.Module,
        value: Value,
        numerics: Numerics,
        mode: FakeTensorMode,
        registered: _Registered,
        train: bool,
    ) -> None:
        self._name = name
        self._module = module
        self._value = value
        self._numerics = numerics
        self._mode: FakeTensorMode | None = mode
        self._registered = registered
        self._train = train
        self.wrong = ""  # what it does that would not be trained as in one process

    def forward(self) -> None:
        """Run the layer, and find out all about it."""
        try:
            self._forward()
        except Exception:
            if sum(t.nbytes for t in as_tuple(self._value)) > MOST_REAL:
                raise
            self._mode = None
            self._forward()

    def backward(self, needed: Sequence[bool]) -> tuple[bool, ...]:
        """Return which inputs have a gradient where these outputs have one."""
        outputs = [t for t, need in zip(self.outputs, needed, strict=True) if need and t.requires_grad]
        if not outputs or not any(leaf.requires_grad for leaf in self._leaves):
            return (False,) * len(self._leaves)
        try:
            with self._inside():
                torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        except Exception:  # it can be tried with numbers alone: then it is held to what its forward says
            return tuple(leaf.requires_grad for leaf in self._leaves)
        return tuple(leaf.grad is not None for leaf in self._leaves)

    def handed_on(self, mode: FakeTensorMode) -> Value:
        """Return the layer's outputs as the next one's input, without their graph."""
        tensors = [
            (t.detach() if self._mode else mode.from_tensor(t.detach())).requires_grad_(t.requires_grad)
            for t in self.outputs
        ]
        return tensors[0] if self.layer.output.single else tuple(tensors)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._mode or torch.random.fork_rng([]))
            stack.enter_context(standing_in(self._module, self._others))
            yield

    def _forward(self) -> None:
        given = as_tuple(self._value)
        self._others = {
            id(place.tensor): self._stand_in(place.tensor)
            for place in places(self._module)
            if id(place.tensor) in self._registered.ids
        }
        with torch.set_grad_enabled(self._train), self._inside():
            # In the order that they have where they come over a cut.
            self._leaves = tuple(
                self._numerics.arrange(self._numbers(t)).detach().requires_grad_(t.requires_grad)
                for t in given
            )
            inputs = tuple(leaf.clone() for leaf in self._leaves)  # a leaf must not be worked on in place
            before = [t._version for t in inputs]
            known = [*self._others.values(), *inputs]
            spy = _Spy(self._registered, known)
            held, names = [_storage(t) for t in known], _names(self._module)
            with self._numerics.context("cpu"), FlopCounterMode(display=False) as counter, spy:
                result = self._module(inputs[0] if isinstance(self._value, Tensor) else inputs)
            self.outputs = as_tuple(result)
            returned = [_storage(t) for t in self.outputs]
            kept = {_storage(place.tensor) for place in places(self._module)}
            self.wrong = spy.wrong
            if held != [_storage(t) for t in known]:
                self.wrong = "replaces the data of a parameter or of its input; change these in place"
            elif new := sorted(_names(self._module) - names):
                self.wrong = f"makes its {new[0]} when it first runs; make it when the layer is made"
            self.layer = Layer(
                name=self._name,
                params=sum(p.numel() for p in self._module.parameters()),
                flops=counter.get_total_flops() + sum(t.numel() for t in self.outputs),
                output=describe(self._numerics.narrow(result)),
                writes_input=[t._version for t in inputs] != before,
                hands_through=not {_storage(t) for t in inputs}.isdisjoint(returned),
                keeps_output=not kept.isdisjoint(returned) or len(set(returned)) < len(returned),
                borrows=tuple(sorted(spy.borrowed)),
            )

    def _stand_in(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            other = self._mode.from_tensor(tensor) if self._mode else tensor.clone()
            if isinstance(tensor, nn.Parameter):
                other = self._numerics.arrange(other)
        return other.requires_grad_(tensor.requires_grad)

    def _numbers(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the pass: itself, or for a real one ordinary numbers in its place."""
        if self._mode:
            return tensor
        real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return real.uniform_() if real.is_floating_point() else real.zero_()


class _Spy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which tensors a layer computes with beside its registered ones, which others stand in for."""

    def __init__(self, registered: _Registered, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._registered = registered
        self._known = {_storage(t) for t in known}
        self.wrong = ""
        self.borrowed: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _strided(args, kwargs):
            if _storage(tensor) not in self._known:
                self._look_at(tensor)
        result = func(*args, **(kwargs or {}))
        self._known.update(map(_storage, _strided(result)))
        return result

    def _look_at(self, tensor: Tensor) -> None:
        name = self._registered.names.get(_storage(tensor), "")
        if name in self._registered.trained:
            self._refuse(f"parameter {name}")
        elif name:
            self.borrowed.add(name)
        elif tensor.requires_grad and tensor.is_leaf:
            self._refuse(f"a parameter {list(tensor.shape)} of no layer")
        elif tensor.requires_grad:
            self.wrong = (
                f"uses a tensor {list(tensor.shape)} that a layer before it has made and not returned: hand "
                f"it on from layer to layer, as one of a tuple"
            )

    def _refuse(self, what: str) -> None:
        self.wrong = (
            f"uses {what}, which is not registered in it and would not be trained as in one process; make it "
            f"an attribute of the layer"
        )


def _strided(*values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.layout is torch.strided]


def _names(module: nn.Module) -> set[str]:
    """Name what is registered in a module."""
    return {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging a traceback of a failure that is told in a sentence."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def list_layers(layers: Sequence[Layer]) -> str:
    """Name the layers with their numbers, for an error about a cut."""
    return ", ".join(f"{i} {layer.name}" for i, layer in enumerate(layers))
