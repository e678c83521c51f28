"""The bytes of a stage, from the estimates of its layers; what they are for says schedule/memory.py.

A stage of layers `start` to `end` (exclusive) holds of each microbatch what enters it and what leaves it, and
what autograd saves of its layers; between I and W only what the operations need whose weight gradients were
put off. The last one holds the targets too, and what the loss saves. All of it follows from the layers,
whatever the other cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetrain.network.network import INPUT, Made
from pipetrain.network.tensors import made_up, quiet
from pipetrain.network.values import TensorSpec, ValueSpec, leaves_of
from pipetrain.plan.estimate import Layer, fake_mode
from pipetrain.plan.saved import NONE, Saving, Storages
from pipetrain.schedule.memory import Sizes
from pipetrain.tasks import Task

MOST_REAL = 2**26  # bytes of outputs for which the loss is tried on real numbers

_Key = tuple[Made, str]
"""A storage: of a value, or number n of those that a layer makes (`Made(layer, n)`), and which of these."""
_VALUE, _WIDE, _OWN, _LOSS = "value", "wide", "own", "loss"


@dataclass(frozen=True, slots=True)
class LossSizes:
    """The storages of a loss, which takes the model's outputs, and the bytes of the targets."""

    storages: Storages = NONE
    targets: int = 0


NO_LOSS = LossSizes()


def stage_sizes(
    layers: Sequence[Layer],
    inputs: ValueSpec,
    start: int,
    end: int,
    loss: LossSizes = NO_LOSS,
    *,
    averaged: bool = False,
    copies_input: bool = False,
    selective: bool = False,
) -> Sizes:
    """Return the bytes of a stage of these layers, without its optimizer's state and its messages.

    `inputs`: of the model; `averaged`: it keeps a moving average of its weights; `copies_input`: it does,
    before its layers; `selective`: until its R it holds the results of operations with a weight.
    """
    stage = _Stage(layers, inputs, start, end)
    entering = sum(map(stage.nbytes, stage.enters))
    around = [(value, _VALUE) for value in stage.enters]
    last = end == len(layers)
    if not last:
        around += [stage.sent(value) for value in stage.leaves]
    saved, kept, gradients = stage.saved()
    targets = 0
    if last:
        saved |= stage.of_loss(loss.storages)
        targets = loss.targets
    whole = sum(stage.size(key, loss) for key in saved | set(around)) + targets
    whole += entering if copies_input else 0
    if stage.has_gradient:
        after_i = sum(stage.size(key, loss) for key in kept) + gradients + targets
    else:  # W is then the whole backward
        after_i = whole + stage.leaving_gradients
    buffers = {name: spec for layer in layers[start:end] for name, spec in layer.buffers.items()}
    before_r = entering + targets + sum(spec.nbytes for spec in buffers.values())
    if selective:
        before_r += sum(stage.size(key, loss) for key in stage.results())
    trained, fixed = (sum(spec.nbytes for spec in of.values()) for of in tensors_of(layers[start:end]))
    return Sizes(
        saved=whole,
        before_r=before_r,
        after_i=after_i,
        weights=trained * (1 + averaged) + fixed,
        version=trained,
        gradient=trained,
    )


class _Stage:
    """Layers `start` to `end` of a model, and the storages of their values."""

    def __init__(self, layers: Sequence[Layer], inputs: ValueSpec, start: int, end: int) -> None:
        self._layers, self._inputs, self._start, self._end = layers, inputs, start, end
        taken = {value for layer in layers[start:end] for value in layer.takes}
        later = {value for layer in layers[end:] for value in layer.takes}
        self.enters = sorted(value for value in taken if value.layer < start)
        if not start:
            self.enters = [Made(INPUT, number) for number in range(len(inputs.specs))]
        self.leaves = sorted(value for value in later if start <= max(value.layer, 0) < end)
        made = [value for value in self.enters if value.layer != INPUT]
        requires = [layers[value.layer].requires_grad for value in made]
        self.has_gradient = any(
            known is None or known[value.number] for known, value in zip(requires, made, strict=True)
        )

    def nbytes(self, value: Made) -> int:
        """Return the bytes of a value as it crosses a cut."""
        output = self._inputs if value.layer == INPUT else self._layers[value.layer].output
        return output.specs[value.number].nbytes

    @property
    def leaving_gradients(self) -> int:
        """The bytes of the gradients that come back."""
        made = [value for value in self.leaves if value.layer != INPUT]
        return sum(self.nbytes(value) for value in made if self._layers[value.layer].needs(value.number))

    def key(self, value: Made) -> _Key:
        """Return the storage of a value in this stage."""
        if value.layer < self._start:
            narrows = value.layer != INPUT and value.number in self._layers[value.layer].narrows
            return value, _WIDE if narrows else _VALUE
        number = self._layers[value.layer].storages.returned[value.number]
        return self._numbered(value.layer, number)

    def _numbered(self, layer: int, number: int) -> _Key:
        if number >= 0:
            return Made(layer, number), _OWN
        return self.key(self._layers[layer].takes[-1 - number])

    def sent(self, value: Made) -> _Key:
        """Return the storage of a value as it leaves."""
        if value.layer != INPUT and value.number in self._layers[value.layer].narrows:
            return value, _VALUE
        return self.key(value)

    def saved(self) -> tuple[set[_Key], set[_Key], int]:
        """Return what autograd saves, what of it W needs after I, and the bytes of the gradients for W."""
        saved: set[_Key] = set()
        kept: set[_Key] = set()
        numbers = range(self._start, self._end)
        for layer in numbers:
            of = self._layers[layer].storages
            saved |= {self._numbered(layer, number) for number in of.saved}
            kept |= {self._numbered(layer, number) for number in of.dear}
        return saved, kept, sum(self._layers[layer].storages.gradients for layer in numbers)

    def results(self) -> set[_Key]:
        """Return the results of operations with a weight that no layer overwrites."""
        numbers = range(self._start, self._end)
        made = {
            self._numbered(layer, number)
            for layer in numbers
            for number in self._layers[layer].storages.results
        }
        written = [layer for layer in numbers if self._layers[layer].writes_input]
        return made - {self.key(value) for layer in written for value in self._layers[layer].takes}

    def of_loss(self, storages: Storages) -> set[_Key]:
        """Return what the loss saves."""
        last = self._end - 1
        return {
            (Made(last, number), _LOSS) if number >= 0 else self.key(Made(last, -1 - number))
            for number in storages.saved
        }

    def size(self, key: _Key, loss: LossSizes) -> int:
        """Return the bytes of a storage."""
        value, kind = key
        if kind == _OWN:
            return self._layers[value.layer].storages.made[value.number]
        if kind == _LOSS:
            return loss.storages.made[value.number]
        return self.nbytes(value) * (2 if kind == _WIDE else 1)  # float32, sent as bf16


def tensors_of(layers: Sequence[Layer]) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """Return the trained parameters of some layers, and the frozen ones and buffers, each once, by name."""
    trained = {name: spec for layer in layers for name, spec in layer.weights.items()}
    fixed = {
        name: spec for layer in layers for of in (layer.frozen, layer.buffers) for name, spec in of.items()
    }
    return trained, fixed


def assumed_loss(outputs: ValueSpec, dtype: torch.dtype | None) -> LossSizes:
    """Return what a loss saves whose targets are unknown: as much as a cross-entropy does."""
    nbytes = sum(spec.numel * (dtype or spec.dtype).itemsize for spec in outputs.specs)
    return LossSizes(Storages((nbytes,), (0,), frozenset([0])))


def loss_sizes(task: Task, outputs: ValueSpec, dtype: torch.dtype | None) -> LossSizes:
    """Return what a task's loss saves for the model's outputs, tried with targets that are made up.

    `dtype`: that of the run, in which autocast hands the outputs to the task; None: their own. A loss that
    takes no such targets is assumed to save as much as a cross-entropy does.
    """
    mode = fake_mode() if outputs.nbytes > MOST_REAL else nullcontext()
    with quiet(), torch.random.fork_rng([]), mode:
        made = tuple(_made(spec, dtype) for spec in outputs.specs)
        for targets in _targets(task, outputs, dtype):
            given = tuple(t.requires_grad_(t.is_floating_point()) for t in made)
            try:
                with torch.enable_grad(), Saving(leaves_of(targets)) as saving:
                    loss = task.loss(outputs.pack(given), targets)
                found = saving.storages(given, [loss])
            except Exception:  # a user's task may take other targets
                continue
            return LossSizes(found, sum(t.nbytes for t in leaves_of(targets)))
    return assumed_loss(outputs, dtype)


def _made(spec: TensorSpec, dtype: torch.dtype | None) -> Tensor:
    return made_up(replace(spec, dtype=dtype) if dtype and spec.dtype.is_floating_point else spec)


def _targets(task: Task, outputs: ValueSpec, dtype: torch.dtype | None) -> Iterable[Any]:
    """Yield targets that a task may take: labels, or else numbers as the outputs are."""
    shape = outputs.specs[0].shape
    if task.classes_of(outputs) is not None:
        yield torch.zeros((*shape[:1], *shape[2:]), dtype=torch.int64)
        yield torch.zeros(shape[:-1], dtype=torch.int64)
    else:
        yield outputs.pack(tuple(_made(spec, dtype) for spec in outputs.specs))
        yield torch.zeros(shape[:1], dtype=torch.int64)


def known_state(target: str, options: Mapping[str, Any]) -> int | None:
    """Return how many tensors of a parameter's size an optimizer of torch keeps; None for any other one.

    To build one loads torch's compiler, which takes a second.
    """
    module, _, name = target.rpartition(".")
    if module != "torch.optim":
        return None
    if name == "SGD":
        return int(bool(options.get("momentum")))
    if name in ("Adam", "AdamW"):
        return 2 + bool(options.get("amsgrad"))
    return None


def optimizer_state(make: Callable[[Any], Optimizer]) -> Callable[[TensorSpec], int]:
    """Return a function that tells the bytes of an optimizer's state of a parameter.

    It steps a small parameter of each number of dimensions; state of less than one dimension is left out.
    """

    @cache
    def ratio(dimensions: int, dtype: torch.dtype) -> float:
        parameter = nn.Parameter(torch.ones((2,) * dimensions, dtype=dtype))
        try:
            optimizer = make([("", parameter)])
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        except Exception:  # such as an optimizer of matrices for a vector, which is refused elsewhere
            return 0.0
        held = (t for t in _tensors(optimizer.state) if t.dim())
        return sum(t.nbytes for t in held) / parameter.nbytes

    return lambda spec: round(ratio(len(spec.shape), spec.dtype) * spec.nbytes)


def _tensors(tree: Any) -> list[Tensor]:
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tree] if isinstance(tree, Tensor) else list(chain.from_iterable(map(_tensors, values)))
