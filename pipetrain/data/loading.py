"""The batches of a user's loader, as rank 0 reads them: inputs and targets, in one form."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from pipetrain.errors import ConfigError, TrainingStopped
from pipetrain.network.values import Value, ValueSpec, as_tuple, on_each
from pipetrain.tasks import counted_for

log = logging.getLogger("pipetrain")

Loader = Iterable[Any]
"""Yields (inputs, targets): each a tensor [n, ...], or a tuple, list or dict of them; or see NamedTargets."""

_TORCHS_SAMPLERS = {"torch.utils.data.sampler", "torch.utils.data.distributed"}


class BadBatch(TrainingStopped):
    """A batch that cannot be trained on; the message says which, and why."""


@dataclass(frozen=True, slots=True)
class NamedTargets:
    """The targets among the tensors of a batch that is a dict; several are a tuple.

    The rest are the inputs: a dict, or if there is one alone, that tensor. `kept`: the model takes them all,
    targets too, as it computes its loss.
    """

    names: str | tuple[str, ...]
    kept: bool = False

    @property
    def listed(self) -> tuple[str, ...]:
        return (self.names,) if isinstance(self.names, str) else self.names

    def pair(self, batch: Any, what: str) -> tuple[Any, Any]:
        """Return a batch's inputs and targets. Raises BadBatch."""
        if not isinstance(batch, Mapping):
            says = "that goes to the model, as it computes its loss" if self.kept else "as targets= says"
            raise BadBatch(
                f"{what} must be a dict with {_listed(self.listed)}, {says}; it is a {_kind(batch)}"
            )
        if missing := [name for name in self.listed if name not in batch]:
            raise BadBatch(f"{what} has no {missing[0]}: targets= can name {_listed(batch)}")
        inputs = {name: batch[name] for name in batch if self.kept or name not in self.listed}
        if not inputs:
            raise BadBatch(
                f"{what} has nothing but the targets {_listed(self.listed)}: add the model's inputs"
            )
        targets = tuple(batch[name] for name in self.listed)
        return (
            next(iter(inputs.values())) if len(inputs) == 1 and not self.kept else inputs,
            targets[0] if isinstance(self.names, str) else targets,
        )


def pair(batch: Any, what: str, named: NamedTargets | None = None) -> tuple[Value, Value]:
    """Return a batch's inputs and targets, tensors of one length. Raises BadBatch."""
    if named is not None:
        batch = named.pair(batch, what)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise BadBatch(f"{what} must be a pair (inputs, targets); it is a {_kind(batch)}{_way_out(batch)}")
    inputs, targets = (
        _value(part, f"{name} of {what}") for part, name in zip(batch, ("inputs", "targets"), strict=True)
    )
    for name, part in (("inputs", inputs), ("targets", targets)):
        for tensor in as_tuple(part):
            if len(tensor) != _samples(inputs):
                raise BadBatch(
                    f"{what} has {_samples(inputs)} inputs and {len(tensor)} {name}: each sample needs one"
                )
    if not _samples(inputs):
        raise BadBatch(f"{what} has no sample")
    return inputs, targets


def unlabelled(batch: Any, what: str, form: Form, named: NamedTargets | None) -> tuple[Value, Value]:
    """Return a batch's inputs, with a 0 for each sample in the place of targets. Raises BadBatch.

    Targets beside the inputs are left out. A model that computes its loss gets zeros where they are missing.
    """
    tried = [batch]
    if named is not None and isinstance(batch, Mapping):
        inputs = {name: batch[name] for name in batch if named.kept or name not in named.listed}
        tried = [next(iter(inputs.values())) if len(inputs) == 1 and not named.kept else inputs]
        names, specs = form.inputs.names or (), form.inputs.specs
        if named.kept and inputs:
            n = len(next(iter(inputs.values())))
            blank = {
                name: torch.zeros((n, *spec.shape), dtype=spec.dtype)
                for name, spec in zip(names, specs, strict=True)
                if name in named.listed
            }
            tried = [{name: inputs.get(name, blank.get(name)) for name in names if name in {*inputs, *blank}}]
    elif isinstance(batch, tuple | list) and batch:
        tried = [batch, batch[0]]
    for one in tried:
        try:
            value = _value(one, f"inputs of {what}")
        except BadBatch:
            continue
        if ValueSpec.in_batch(value) == form.inputs:
            return value, torch.zeros(_samples(value))
    value = _value(tried[-1], f"inputs of {what}")
    form.refuse_other(value, torch.zeros(_samples(value)), what)
    return value, torch.zeros(_samples(value))


def _kind(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__} of {_listed(batch)}"
    return f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__


def _way_out(batch: Any) -> str:
    """Return what can be done about a batch that is no pair."""
    if isinstance(batch, Mapping):
        return ": say which are the targets, as in Pipeline(..., targets='label')"
    if isinstance(batch, tuple | list):
        return ": let the loader give ((FIRST, SECOND), TARGETS), or a dict, and Pipeline(..., targets=NAME)"
    return ""


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names))


def _value(part: Any, what: str) -> Value:
    if isinstance(part, list):
        part = tuple(part)
    if isinstance(part, Tensor) and part.dim():
        return part.cpu()
    if isinstance(part, tuple) and part and all(isinstance(t, Tensor) and t.dim() for t in part):
        return tuple(t.cpu() for t in part)
    if isinstance(part, Mapping) and part:
        return {str(name): _named(t, name, what) for name, t in part.items()}
    raise BadBatch(f"the {what} must be a tensor [n, ...], or a tuple or a dict of them; got {_type(part)}")


def _type(part: Any) -> str:
    return "a number" if isinstance(part, Tensor) else type(part).__name__


def _named(tensor: Any, name: Any, what: str) -> Tensor:
    if isinstance(tensor, Tensor) and tensor.dim():
        return tensor.cpu()
    raise BadBatch(
        f"{name} of the {what} must be a tensor [n, ...]; got {_type(tensor)}: leave it out, or make it "
        f"one (data of Hugging Face's by set_format('torch'))"
    )


def known_sizes(loader: Loader) -> list[int] | None:
    """Return the samples of each batch if they are known without reading it, else None.

    Only torch's own samplers and its default_collate tell: others may give other numbers of samples.
    """
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.batch_sampler.sampler
    if loader.collate_fn is not default_collate or type(sampler).__module__ not in _TORCHS_SAMPLERS:
        return None
    try:
        samples = len(sampler)  # type: ignore[arg-type]
    except TypeError:
        return None
    size = loader.batch_sampler.batch_size
    sizes = [size] * (samples // size)
    return sizes if samples % size == 0 or loader.batch_sampler.drop_last else [*sizes, samples % size]


@dataclass(frozen=True, slots=True)
class Form:
    """What a sample's inputs and targets look like."""

    inputs: ValueSpec
    targets: ValueSpec

    def to_json(self) -> list[Any]:
        return [self.inputs.to_json(), self.targets.to_json()]

    @classmethod
    def from_json(cls, data: list[Any]) -> Form:
        return cls(*map(ValueSpec.from_json, data))

    def refuse_other(self, inputs: Value, targets: Value, what: str) -> None:
        """Refuse samples of another form. Raises BadBatch."""
        for name, mine, value in (("inputs", self.inputs, inputs), ("targets", self.targets, targets)):
            if (theirs := ValueSpec.in_batch(value)) != mine:
                raise BadBatch(
                    f"{what} has {name} {theirs} a sample, and those of the first batch were {mine}: "
                    f"let all batches have one shape and dtype, such as texts padded to one length"
                )


class Reader:
    """Rank 0's pass over a loader: the sizes of the next window, then its batches.

    `form`: what every sample looks like; None: as those of the first batch. `named`: the targets where
    batches are dicts. `weight`: what targets count for; batches of which nothing does are left out, of the
    windows that are read before they begin. `labelled`: whether targets are read.
    """

    def __init__(
        self,
        loader: Loader,
        what: str,
        form: Form | None = None,
        named: NamedTargets | None = None,
        weight: Callable[[Value], Tensor | float] | None = None,
        labelled: bool = True,
    ) -> None:
        self.form = form
        self._labelled = labelled
        self._named = named
        self._weight = weight
        self._loader = loader
        self._what = what
        self._batches: Iterator[Any] | None = None
        self._held: deque[tuple[Value, Value]] = deque()  # batches read and not yet taken
        self._read = 0  # the number of batches read
        self._announced = 0
        self._all_counts: bool | None = None  # as far as is known at the start

    def first(self) -> tuple[Value, Value] | None:
        """Return the first batch without taking it; None if there is none. Raises BadBatch, ConfigError."""
        self._refuse_other()
        return self._held[0] if self._held or self._read_one() else None

    def window(self, batches: int | None) -> list[int] | None:
        """Return the samples of each of the next `batches` (None: of all that are left).

        At the end that is empty; for a loader that never had a batch it is None.
        A window of one batch is read at once, so that an error of the loader comes before the window begins.
        So are batches whose sizes are unknown, and those of which nothing may count. Raises BadBatch, and
        ConfigError for a loader without length.
        """
        self._refuse_other()
        known = self._known(batches)
        if known is not None:
            sizes = known[self._announced :][:batches]
        else:
            if batches is None and not has_length(self._loader):
                raise ConfigError(
                    "this schedule trains a whole pass as one window, and a loader without length does not "
                    "say how long that is: give train(loader, window=...)"
                )
            self._leave_out()
            while (batches is None or len(self._held) < batches) and self._read_one():
                self._leave_out()
            sizes = [_samples(inputs) for inputs, _ in self._held]
        self._announced += len(sizes)
        return sizes if self._announced or self._read else None

    def skip(self, batches: int, window: int | None) -> int:
        """Read so many batches for nothing; return how many there were. The loader's random numbers go on.

        `window`: batches of the windows that had them, which decides whether some were left out.
        """
        self._refuse_other()
        streamed = self._known(window) is not None
        skipped = 0
        while skipped < batches and (self._held or self._read_one()):
            if not streamed:
                self._leave_out()
            if self._held:
                self._held.popleft()
                skipped += 1
        self._announced += skipped
        return skipped

    def _refuse_other(self) -> None:
        loader: Any = self._loader
        is_class = isinstance(loader, type)
        if is_class or (not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__")):
            raise ConfigError(
                f"the loader must be an iterable of batches, such as a DataLoader or a list; it is "
                f"{f'the class {loader.__name__}' if is_class else _kind(loader)}"
            )
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise ConfigError(
                f"the loader is a Dataset, {type(loader).__name__}, which gives samples: let a DataLoader "
                f"make batches of them, DataLoader(dataset, batch_size=...), or None if it gives batches"
            )

    def _known(self, window: int | None) -> list[int] | None:
        """Return the samples of each batch if windows are streamed; None if they are read before."""
        return None if window == 1 or not self._counts() else known_sizes(self._loader)

    def _counts(self) -> bool:
        """Return whether all targets of the first batch count, or of all samples where tensors hold them."""
        if self._weight is None:
            return True
        if self._all_counts is None:
            targets: Value | None = _targets_in_memory(self._loader)
            if targets is None and (first := self.first()):
                targets = first[1]
            self._all_counts = targets is None or _all_count(self._weight, targets)
        return self._all_counts

    def _leave_out(self) -> None:
        """Leave out the batch that was just read if nothing in it counts."""
        if self._held and self._weight is not None and not counted_for(self._weight, self._held[-1][1]):
            self._held.pop()
            log.warning("%s %d is skipped: none of its targets counts", self._what, self._read - 1)

    def take(self, size: int) -> tuple[Value, Value]:
        """Return the next batch, of `size` samples. Raises BadBatch for another one."""
        if not self._held and not self._read_one():
            raise BadBatch(
                f"the loader ended after {self._read} batches, and its sampler said {self._announced}"
            )
        inputs, targets = self._held.popleft()
        if _samples(inputs) != size:
            raise BadBatch(
                f"{self._what} {self._read - 1} has {_samples(inputs)} samples, and its sampler said {size}"
            )
        return inputs, targets

    def _read_one(self) -> bool:
        """Read one more batch; return False at the end. The loader may fill the buffer of the last one."""
        if self._batches is None:
            self._batches = iter(self._loader)
        if self._held:
            inputs, targets = self._held.pop()
            self._held.append((on_each(inputs, _copy), on_each(targets, _copy)))
        batch = next(self._batches, _END)
        if batch is _END:
            return False
        what = f"{self._what} {self._read}"
        if self._labelled or self.form is None:
            inputs, targets = pair(batch, what, self._named)
        else:
            inputs, targets = unlabelled(batch, what, self.form, self._named)
        if self.form is None:
            self.form = Form(ValueSpec.in_batch(inputs), ValueSpec.in_batch(targets))
        self.form.refuse_other(inputs, targets, what)
        self._held.append((inputs, targets))
        self._read += 1
        return True


_END = object()


def _targets_in_memory(loader: Any) -> Tensor | None:
    """Return the targets of all samples of a loader of tensors (inputs, targets); None for another."""
    dataset = getattr(loader, "dataset", None)
    return dataset.tensors[1] if type(dataset) is TensorDataset and len(dataset.tensors) == 2 else None


def _all_count(weight: Callable[[Value], Tensor | float], targets: Value) -> bool:
    first = as_tuple(targets)[0]
    return counted_for(weight, targets) in (len(first), first.numel())


def has_length(loader: Any) -> bool:
    """Return whether a loader says how many batches it has."""
    try:
        return len(loader) >= 0
    except TypeError:  # a DataLoader has none for an IterableDataset without one
        return False


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, pin_memory=tensor.is_pinned()).copy_(tensor)


def _samples(value: Value) -> int:
    return len(as_tuple(value)[0])
