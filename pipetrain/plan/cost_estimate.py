"""Estimates each layer's cost and output, and which gradients are needed, by running it once.

A layer runs on copies of its tensors, so that weights, BatchNorm's statistics and the random generators do
not change. A cheap layer runs on real numbers. An expensive layer, or one of a model on the meta device, runs
under FakeTensorMode, on tensors without data: fast for any size, but it loads torch's compiler, which takes a
second. A layer that branches on values (`if torch.rand(()) < p`) always needs real numbers.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction

from pipetrain.config.settings import Settings
from pipetrain.errors import ConfigError, one_line
from pipetrain.model.chain import Chain
from pipetrain.model.network import INPUT, Network, Tensors, ValueId, evaluating
from pipetrain.model.numerics import Numerics
from pipetrain.model.random_numbers import RngSnapshot
from pipetrain.model.specs import Packing, Size, TensorSpec, ValueSpec, differentiable, leaves_of, specs_of
from pipetrain.model.tensor_places import named_tensors, names_by_id, places, standing_in, tensors_in
from pipetrain.model.trial_tensors import graph_of, made_up_samples, storage_of
from pipetrain.plan.operation_costs import NOTHING, Kept, SavedWatch, Spy

CHEAP = 2.5e9  # most multiplications of a cheap layer, about a tenth of a second


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer between possible cuts, as estimated for one microbatch size.

    `requires_grad`: which of its outputs depend on weights; None, if unknown, as in an evaluation, stands for
    every floating-point tensor. `paths`: for each output, which inputs get a gradient from it; `reached`:
    which inputs get a gradient on the way from the loss to weights.
    """

    name: str
    params: int  # elements, each shared parameter once
    flops: int  # of one forward, plus one per output element
    output: ValueSpec
    requires_grad: tuple[bool, ...] | None = None
    takes: tuple[ValueId, ...] = ()
    paths: tuple[tuple[bool, ...], ...] = ()
    reached: tuple[bool, ...] = ()
    draws: bool = False  # random numbers
    operations: int = field(default=0, compare=False)  # a checksum of all operations
    writes: frozenset[ValueId] = frozenset()  # inputs that it modifies in place
    views: tuple[ValueId | None, ...] = ()  # for each output: the input with the same memory, if any
    keeps_output: bool = False  # its output may change later: the layer keeps it, or returns it twice
    borrows: tuple[str, ...] = ()  # tensors of other layers that it uses, not registered in it
    saved: Kept = NOTHING  # by autograd
    for_w: Kept = NOTHING  # between I and W
    products: Kept = NOTHING  # the results that a selective recompute keeps
    weights: Mapping[str, TensorSpec] = field(default_factory=dict)  # what it trains, by name in the model
    frozen: Mapping[str, TensorSpec] = field(default_factory=dict)
    buffers: Mapping[str, TensorSpec] = field(default_factory=dict)
    foreign: tuple[Tensor, ...] = field(default=(), compare=False)  # used, but no weights or buffers
    weight_flops: int = 0  # the part of `flops` with a trained weight; the weight's gradient takes as many


def origin(layers: Sequence[Layer], value: ValueId, start: int = 0) -> ValueId:
    """Return the first value with this memory, as layers from `start` on pass it on."""
    while value.layer >= start and (views := layers[value.layer].views) and (before := views[value.number]):
        value = before
    return value


def estimate(
    model: nn.Sequential | Network, inputs: ValueSpec, numerics: Numerics | None = None, training: bool = True
) -> list[Layer]:
    """Estimate every layer of a model for one microbatch. `inputs`: of the model.

    `training`: in the modes of its modules, with the gradients that are needed; otherwise in evaluation mode.
    Raises ConfigError with the name of a layer that cannot process its inputs, or trains unregistered
    weights.
    """
    network = model if isinstance(model, Network) else Chain(model)
    trial = _Trial(network, numerics or Numerics(), training)
    mode = nullcontext() if training else evaluating(network.model, *network.modules)
    with quiet(), RngSnapshot().replayed(), mode:
        for seed in (torch.default_generator.manual_seed, random.seed, np.random.seed):
            seed(0)  # so that every rank makes the same plan
        try:
            tensors = made_up_samples(inputs)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"a microbatch of {inputs} cannot be made: {one_line(error)}") from error
        values = {ValueId(INPUT, number): t for number, t in enumerate(tensors)}
        specs, runs = [inputs], []
        for index in range(len(network.names)):
            takes = network.takes(index, specs)
            run = trial.run(index, takes, tuple(values[value] for value in takes), tuple(specs))
            values |= {ValueId(index, number): t for number, t in enumerate(run.outputs)}
            specs.append(run.layer.output)
            runs.append(run)
        layers = [run.layer for run in runs]
        return _joined(with_gradients(layers) if training else layers)


def estimate_short(model: Network, inputs: ValueSpec, numerics: Numerics) -> list[Layer]:
    """Estimate every layer for a microbatch of a short batch. Raises ConfigError with advice."""
    try:
        return estimate(model, inputs, numerics)
    except ConfigError as error:
        raise ConfigError(
            f"of the last batch's microbatches, {error}: leave that batch out, as DataLoader(drop_last=True) "
            f"and data.drop_last=true do, or choose another batch size"
        ) from error


def estimates(
    settings: Settings,
    model: Network | list[Layer],
    example: ValueSpec,
    trained: Collection[Size],
    evaluated: Collection[Size],
) -> tuple[Numerics, dict[Size, list[Layer]], dict[Size, list[Layer]]]:
    """Choose the memory format, and estimate the layers for each size of a microbatch. Raises ConfigError.

    For training, the full size first, and for evaluation. `model`: or the layers of a full microbatch.
    """
    if isinstance(model, list):
        return Numerics(), {settings.full: model}, {settings.full: model}

    def estimated(numerics: Numerics) -> tuple[Numerics, dict[Size, list[Layer]], dict[Size, list[Layer]]]:
        training = {
            size: (estimate_short if size < settings.full else estimate)(model, example.of(size), numerics)
            for size in (settings.full, *sorted({*trained} - {settings.full}))
        }
        evaluation = {
            size: estimate(model, example.of(size), numerics, False) for size in sorted({*evaluated})
        }
        return numerics, training, evaluation

    numerics = Numerics(settings.precision == "bf16", settings.memory_format == "channels_last")
    if settings.memory_format == "auto" and settings.dtype == torch.float32:
        with suppress(ConfigError):  # as of a view that needs the channels outermost
            return estimated(replace(numerics, channels_last=True))
    return estimated(numerics)


def _joined(layers: Sequence[Layer]) -> list[Layer]:
    """Name saved values by their origins; a product that another layer overwrites is not kept."""
    written = {origin(layers, value) for layer in layers for value in layer.writes}

    def renamed(saved: Kept, lost: Collection[ValueId] = ()) -> Kept:
        values = {origin(layers, value): nbytes for value, nbytes in saved.values.items()}
        return Kept({value: nbytes for value, nbytes in values.items() if value not in lost}, saved.inside)

    return [
        replace(
            layer,
            saved=renamed(layer.saved),
            for_w=renamed(layer.for_w),
            products=renamed(layer.products, written),
        )
        for layer in layers
    ]


class _Run(NamedTuple):
    layer: Layer
    outputs: Tensors  # without graph


class _Trial:
    """Runs the layers of a network one by one."""

    def __init__(self, network: Network, numerics: Numerics, training: bool) -> None:
        self._network, self._numerics, self._training = network, numerics, training
        tensors = named_tensors(network.model)
        self._meta = any(tensor.is_meta for tensor in tensors.values())
        self._ids = names_by_id(network.model)
        self._names = {storage_of(tensor): (name, tensor.requires_grad) for name, tensor in tensors.items()}

    def run(
        self, index: int, takes: tuple[ValueId, ...], entering: Tensors, earlier: Sequence[ValueSpec]
    ) -> _Run:
        """Run a layer. Raises ConfigError with its name."""
        where = f"layer {index} ({self._network.names[index]}) of the model"
        try:
            return self._tried(index, entering, lambda mode: self._run(index, takes, entering, earlier, mode))
        except _Wrong as error:
            raise ConfigError(f"{where} {error}") from error
        except Exception as error:
            taken = ValueSpec(specs_of(entering), single=False)
            raise ConfigError(f"{where} cannot take {taken}: {one_line(error)}") from error

    def _tried(self, index: int, inputs: Tensors, run: Callable[[FakeTensorMode | None], _Run]) -> _Run:
        """Run a layer on real or, if it is expensive, fake tensors; if that fails, the other way."""
        # Each weight is multiplied at every position of an image.
        positions = [t.numel() / t.shape[1] if t.dim() > 1 and t.shape[1] else t.numel() for t in inputs]
        weights = sum(p.numel() for p in self._network.modules[index].parameters())
        expensive = max(positions, default=1) * weights > CHEAP or self._meta
        try:
            return run(fake_mode() if expensive else None)
        except _Wrong:
            raise
        except Exception as error:
            if not expensive and not isinstance(error, NotImplementedError):  # as of a GPU operation
                raise
            return run(None if expensive else fake_mode())

    def _run(
        self,
        index: int,
        takes: tuple[ValueId, ...],
        entering: Tensors,
        earlier: Sequence[ValueSpec],
        mode: FakeTensorMode | None,
    ) -> _Run:
        module, last = self._network.modules[index], index == len(self._network.names) - 1
        used = tensors_in(module, self._ids)
        copies = {id(tensor): self._stand_in(tensor, mode) for tensor in used.values()}
        with torch.set_grad_enabled(self._training), mode or nullcontext(), standing_in(module, copies):
            # In the memory format in which they arrive from another stage.
            arranged = (self._numerics.arrange(_copied(t, mode)).detach() for t in entering)
            leaves = tuple(
                t.requires_grad_(original.requires_grad)
                for t, original in zip(arranged, entering, strict=True)
            )
            inputs = tuple(leaf.clone() for leaf in leaves)  # a leaf must not be modified in place
            versions = [t._version for t in inputs]
            known_tensors = [*copies.values(), *inputs]
            storages, registered = [storage_of(t) for t in known_tensors], named_tensors(module)
            trained = [t for t in copies.values() if t.requires_grad and t.dim() > 1]  # a bias is added
            with (
                self._numerics.context("cpu"),
                Spy(self._names, known_tensors, trained) as spy,
                SavedWatch(copies.values()) as saving,
            ):
                result = self._network.call(index, inputs, earlier)
            packing = Packing.from_value(result)
            if packing is not None and not last and (other := packing.other):
                raise TypeError(
                    f"it returns {other}, and a layer before the last must return a tensor, or tuples, lists "
                    f"or dicts of tensors"
                )
            if storages != [storage_of(t) for t in known_tensors]:
                raise _Wrong("replaces the data of a parameter or of its input; change these in place")
            if new := sorted(named_tensors(module).keys() - registered.keys()):
                raise _Wrong(f"makes its {new[0]} when it first runs; make it when the layer is made")
            if spy.wrong:
                raise _Wrong(spy.wrong)
            outputs = leaves_of(result)
            returned = [storage_of(t) for t in outputs]
            of_module = {storage_of(place.tensor) for place in places(module)}
            entering_by = {storage_of(t): value for t, value in zip(inputs, takes, strict=True)}
            returned_values = {key: ValueId(index, number) for number, key in enumerate(returned)}
            saved, for_w, products = saving.kept(returned_values | entering_by)
            changed = (t._version != version for t, version in zip(inputs, versions, strict=True))
            layer = Layer(
                name=self._network.names[index],
                params=sum(p.numel() for p in module.parameters()),
                flops=spy.flops + sum(t.numel() for t in outputs),
                weight_flops=spy.weight_flops,
                output=ValueSpec(
                    specs_of(tuple(map(self._numerics.narrow, outputs))),
                    isinstance(result, Tensor),
                    packing=packing,
                ),
                requires_grad=tuple(t.requires_grad for t in outputs) if self._training else None,
                takes=takes,
                paths=tuple(_reached(t, leaves) for t in outputs) if self._training else (),
                draws=spy.draws,
                operations=spy.digest,
                writes=frozenset(value for value, other in zip(takes, changed, strict=True) if other),
                views=tuple(map(entering_by.get, returned)),
                keeps_output=not of_module.isdisjoint(returned) or len(set(returned)) < len(returned),
                borrows=tuple(sorted(spy.borrowed)),
                foreign=tuple(spy.foreign.values()),
                saved=saved,
                for_w=for_w,
                products=products,
                **_specs_by_kind(used),
            )
            handed_on = {id(t): given for t, given in zip(inputs, entering, strict=True)}
        left = (t if differentiable(t) else handed_on.get(id(t), t) for t in outputs)  # with its numbers
        return _Run(layer, tuple(t.detach().requires_grad_(t.requires_grad) for t in left))

    def _stand_in(self, tensor: Tensor, mode: FakeTensorMode | None) -> Tensor:
        """Return a copy; of a meta tensor, one with its shape or, without a mode, with its values."""
        with torch.no_grad():
            if tensor.is_meta and mode is not None:
                shape, strides = tensor.shape, tensor.stride()
                with mode:
                    other = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="cpu")
            elif tensor.is_meta:
                name, values = self._ids[id(tensor)], self._network.values
                assert values is not None
                other = values.tensors([name])[name].to(tensor.dtype)
            else:
                other = mode.from_tensor(tensor) if mode else tensor.clone()
            if isinstance(tensor, nn.Parameter):
                other = self._numerics.arrange(other)
        return other.requires_grad_(tensor.requires_grad)


def _specs_by_kind(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the specs of a layer's trained weights, frozen parameters and buffers, by name."""
    specs: dict[str, dict[str, TensorSpec]] = {"weights": {}, "frozen": {}, "buffers": {}}
    for name, tensor in tensors.items():
        trained = "weights" if tensor.requires_grad else "frozen"
        specs[trained if isinstance(tensor, nn.Parameter) else "buffers"][name] = specs_of([tensor])[0]
    return specs


class _Wrong(Exception):
    """Why a pipeline would train a layer differently than one process."""


def _copied(tensor: Tensor, mode: FakeTensorMode | None) -> Tensor:
    if mode is not None:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
    if not isinstance(tensor, FakeTensor):
        return tensor
    real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return real.uniform_() if real.is_floating_point() else real.zero_()


def with_gradients(layers: Sequence[Layer], used: Sequence[bool] | None = None) -> list[Layer]:
    """Find which tensors have a gradient, from the last layer to the first as in a backward.

    `used`: which outputs of the last layer the loss uses; None: all.
    """
    updated: list[Layer] = []
    requires = layers[-1].requires_grad or ()
    needed = {ValueId(len(layers) - 1, number): use for number, use in enumerate(used or requires)}
    for index, layer in reversed(list(enumerate(layers))):
        paths = [path for number, path in enumerate(layer.paths) if needed.get(ValueId(index, number))]
        reached = tuple(any(path[number] for path in paths) for number in range(len(layer.takes)))
        for value, reaches in zip(layer.takes, reached, strict=True):
            needed[value] = needed.get(value, False) or reaches
        updated.append(replace(layer, reached=reached))
    return updated[::-1]


def _reached(output: Tensor, leaves: Sequence[Tensor]) -> tuple[bool, ...]:
    """Return which leaves get a gradient from an output."""
    nodes = graph_of(output)
    if not any(isinstance(node, BackwardCFunction) for node in nodes):
        ends = {id(getattr(node, "variable", None)) for node in nodes}
        return tuple(id(leaf) in ends for leaf in leaves)
    # A custom autograd Function may return no gradient for an input: only a backward shows that.
    try:
        torch.autograd.backward(output, torch.ones_like(output), retain_graph=True)
    except Exception:  # a Function that needs real numbers: assume that every possible gradient exists
        return tuple(leaf.requires_grad for leaf in leaves)
    reached = tuple(leaf.grad is not None for leaf in leaves)
    for leaf in leaves:
        leaf.grad = None
    return reached


@cache
def fake_mode() -> FakeTensorMode:
    """Return the mode under which tensors have no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's traceback of an error that is reported otherwise."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
