"""A user's loader, as rank 0 reads it: the sizes of the next window, then its batches.

A batch is inputs and targets, each in the form that the first batch had.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pipetrain.data.loader_facts import has_length, known_sizes, share_in
from pipetrain.errors import ConfigError, TrainingStopped
from pipetrain.model.network import Limits
from pipetrain.model.specs import Size, TensorSpec, Value, ValueSpec, as_tuple, on_each
from pipetrain.tasks import counted_for

log = logging.getLogger("pipetrain")

Loader = Iterable[Any]
"""Yields (inputs, targets): each a tensor [n, ...], or a tuple, list or dict of them; or see NamedTargets."""

Pair = tuple[Value, Value]
"""A batch's inputs and targets."""
_END = object()
HALVES = ("inputs", "targets")


class BadBatch(TrainingStopped):
    """A batch that cannot be trained on; the message says which, and why."""


@dataclass(frozen=True, slots=True)
class NamedTargets:
    """The targets among the tensors of a batch that is a dict; several are a tuple.

    The rest is the input: a dict, or a single tensor. `as_inputs`: a model that computes its
    loss takes them all.
    """

    names: str | tuple[str, ...]
    as_inputs: bool = False

    @property
    def listed(self) -> tuple[str, ...]:
        return (self.names,) if isinstance(self.names, str) else self.names

    def inputs(self, batch: Mapping[str, Any]) -> Any:
        inputs = {name: batch[name] for name in batch if self.as_inputs or name not in self.listed}
        return next(iter(inputs.values())) if len(inputs) == 1 and not self.as_inputs else inputs

    def pair(self, batch: Any, what: str) -> tuple[Any, Any]:
        """Return a batch's inputs and targets. Raises BadBatch."""
        if not isinstance(batch, Mapping):
            raise BadBatch(
                f"{what} must be a dict with the targets {_listed(self.listed)}; it is a {kind(batch)}"
            )
        if missing := [name for name in self.listed if name not in batch]:
            raise BadBatch(f"{what} has no {missing[0]}: targets= can name {_listed(batch)}")
        inputs, targets = self.inputs(batch), tuple(batch[name] for name in self.listed)
        return inputs, targets[0] if isinstance(self.names, str) else targets

    def completed(self, batch: Mapping[str, Any], form: Form) -> dict[str, Any]:
        """Return a batch in the order of the model's inputs, with zeros for targets that it lacks."""
        whole, n = dict(batch), len(next(iter(batch.values())))
        specs = dict(zip(form.inputs.names or (), form.inputs.specs, strict=True))
        for name in self.listed:
            whole.setdefault(name, torch.zeros((n, *specs[name].shape), dtype=specs[name].dtype))
        return {name: whole[name] for name in specs if name in whole}


@dataclass(frozen=True, slots=True)
class Form:
    """What a sample's inputs and targets look like."""

    inputs: ValueSpec
    targets: ValueSpec

    @classmethod
    def of(cls, first: Pair, second: Pair | None = None, some: bool = False) -> Form:
        """Return the form of batches: a dimension that differs between the two is a length.

        Equal dimensions share one. `some`: where none differs, the first one of the inputs does.
        """
        halves = [ValueSpec.in_batch(half) for half in first]
        others = [ValueSpec.in_batch(half) for half in second] if second else halves
        if not all(map(_alike, halves, others)):
            others = halves  # the second batch is refused when it comes
        both = [[*zip(a.specs, b.specs, strict=True)] for a, b in zip(halves, others, strict=True)]
        pairs = [pair for of in both for a, b in of for pair in zip(a.shape, b.shape, strict=True)]
        differ = dict.fromkeys(pair for pair in pairs if pair[0] != pair[1])
        if some and not differ and halves[0].specs[0].shape:
            differ = {pairs[0]: None}
        number = {pair: -1 - n for n, pair in enumerate(differ)}

        def marked(a: TensorSpec, b: TensorSpec) -> TensorSpec:
            return replace(
                a, shape=tuple(number.get(pair, pair[0]) for pair in zip(a.shape, b.shape, strict=True))
            )

        return cls(
            *(
                replace(half, specs=tuple(marked(a, b) for a, b in of))
                for half, of in zip(halves, both, strict=True)
            )
        )

    @property
    def lengths(self) -> int:
        """How many lengths a batch has."""
        every = (n for half in (self.inputs, self.targets) for spec in half.specs for n in spec.shape)
        return -min(0, *every, 0)

    def to_json(self) -> list[Any]:
        return [self.inputs.to_json(), self.targets.to_json()]

    @classmethod
    def from_json(cls, data: list[Any]) -> Form:
        return cls(*map(ValueSpec.from_json, data))

    def size(self, inputs: Value, targets: Value) -> Size:
        """Return the size of a batch, whose form this is."""
        lengths = [0] * self.lengths
        for half, value in ((self.inputs, inputs), (self.targets, targets)):
            for spec, tensor in zip(half.specs, as_tuple(value), strict=False):
                for n, actual in zip(spec.shape, tensor.shape[1:], strict=False):
                    if n < 0:
                        lengths[-n - 1] = actual
        return replace(Size.of(inputs), lengths=tuple(lengths))

    def refuse_other(self, inputs: Value, targets: Value, what: str) -> None:
        lengths = self.size(inputs, targets).lengths
        for name, spec, value in (("inputs", self.inputs, inputs), ("targets", self.targets, targets)):
            if (other_spec := ValueSpec.in_batch(value)) != spec.at(lengths):
                raise BadBatch(
                    f"{what} has {name} {other_spec} a sample, and those of the first batch were {spec}: "
                    f"let all batches have one shape and dtype, or give max_length=, the longest that comes"
                )


def _alike(one: ValueSpec, other: ValueSpec) -> bool:
    """Return whether values differ in the sizes of dimensions at most."""
    kinds = ([(spec.dtype, len(spec.shape)) for spec in of.specs] for of in (one, other))
    return next(kinds) == next(kinds) and (one.single, one.names) == (other.single, other.names)


def pair(batch: Any, what: str, named: NamedTargets | None = None) -> tuple[Value, Value]:
    """Return a batch's inputs, and its targets in host memory: tensors of one length. Raises BadBatch."""
    if named is not None:
        batch = named.pair(batch, what)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise BadBatch(
            f"{what} must be a pair (inputs, targets); it is a {kind(batch)}: let the loader give ((FIRST, "
            f"SECOND), TARGETS), or a dict, and say which are the targets: Pipeline(..., targets='label')"
        )
    inputs, targets = (_value(part, f"{half} of {what}") for part, half in zip(batch, HALVES, strict=True))
    samples = Size.of(inputs).samples
    for half, part in zip(HALVES, (inputs, targets), strict=True):
        for tensor in as_tuple(part):
            if len(tensor) != samples:
                raise BadBatch(f"{what} has {samples} inputs and {len(tensor)} {half}: each sample needs one")
    if not samples:
        raise BadBatch(f"{what} has no sample")
    return inputs, on_each(targets, Tensor.cpu)


def unlabelled(batch: Any, what: str, form: Form, named: NamedTargets | None) -> tuple[Value, Value]:
    """Return a batch's inputs, with a 0 for each sample in the place of targets. Raises BadBatch.

    Targets beside the inputs are left out. A model that computes its loss gets zeros where they are missing.
    """
    inputs = batch
    if named is not None and isinstance(batch, Mapping) and batch:
        inputs = named.inputs(named.completed(batch, form) if named.as_inputs else batch)
    elif isinstance(batch, tuple | list) and batch:
        is_inputs_alone = not form.inputs.single and len(batch) == len(form.inputs.specs)
        inputs = batch if is_inputs_alone and all(isinstance(t, Tensor) for t in batch) else batch[0]
    value = form.inputs.ordered(_value(inputs, f"inputs of {what}"))
    targets = torch.zeros(Size.of(value).samples, dtype=torch.float32)
    form.refuse_other(value, targets, what)
    return value, targets


def kind(batch: Any) -> str:
    """Return what something is that should be a batch, or several of them."""
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__} of {_listed(batch)}"
    return f"{type(batch).__name__} of {len(batch)}" if has_length(batch) else type(batch).__name__


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names))


def _value(part: Any, what: str) -> Value:
    """Return tensors [n, ...]. Raises BadBatch."""
    if isinstance(part, Mapping) and part:
        hint = ": leave it out, or make it one (data of Hugging Face's by set_format('torch'))"
        return {str(name): _tensor(t, f"{name} of the {what}", "", hint) for name, t in part.items()}
    if isinstance(part, list | tuple) and part and all(isinstance(t, Tensor) for t in part):
        return tuple(_tensor(t, f"the {what}") for t in part)
    return _tensor(part, f"the {what}", ", or a tuple or a dict of them")


def _tensor(part: Any, what: str, also: str = "", hint: str = "") -> Tensor:
    got = type(part).__name__
    if isinstance(part, Tensor):
        kinds = {
            "a number": not part.dim(),
            "one on the device meta, without numbers": part.is_meta,
            "a nested one: pad it": part.is_nested,
            "a quantized one: dequantize it": part.is_quantized,
            "a sparse one: make it dense": part.layout is not torch.strided,
        }
        if not (got := next((kind for kind, holds in kinds.items() if holds), "")):
            return part
    raise BadBatch(f"{what} must be a tensor [n, ...]{also}; got {got}{hint}")


@dataclass(slots=True)
class Reader:
    """Rank 0's pass over a loader: the sizes of the next window, then its batches.

    `form`: what every sample looks like; None: as those of the first batch. `named`: the targets where
    batches are dicts. `weight`: what targets count for; batches of which nothing does are left out, of the
    windows that are read before they begin. `labelled`: whether targets are read. `ranks`: for which it is
    read; `microbatches`: into which batches are to be cut. `longest`: the largest lengths, one for all or one
    of each; empty: any. `limits`: of each length, that the model takes.
    """

    loader: Loader
    what: str
    form: Form | None = None
    named: NamedTargets | None = None
    weight: Callable[[Value], Tensor | float] | None = None
    labelled: bool = True
    ranks: int = 1
    microbatches: int = 1
    longest: Sequence[int] = ()
    limits: Sequence[Limits] = ()
    _batches: Iterator[Any] | None = None
    largest: tuple[int, ...] = ()
    """The largest lengths: those given, or else those of the batches from which the form is."""
    _begun: deque[Any] = field(default_factory=deque)  # what the loader gave and nobody has read
    _given: int = 0  # by the loader
    _read_ahead: deque[tuple[Value, Value]] = field(default_factory=deque)  # batches read and not yet taken
    _read: int = 0  # the number of batches read
    _ended: bool = False  # the loader; after that some would begin another pass
    _announced: int = 0
    _taken: int = 0
    _all_counts: bool | None = None  # as far as is known at the start

    def first(self) -> tuple[Value, Value] | None:
        """Return the first batch in host memory without taking it, or None. Raises BadBatch, ConfigError."""
        if not self._read_ahead and not self._read_one():
            return None
        inputs, targets = self._read_ahead[0]
        return on_each(inputs, Tensor.cpu), targets

    def window(self, batches: int | None) -> list[Size] | None:
        """Return the size of each of the next `batches` (None: of all that are left).

        At the end that is empty; for a loader that never had a batch it is None.
        A window of one batch is read at once, so that an error of the loader comes before the window begins.
        So are batches whose sizes are unknown, and those of which nothing may count. Raises BadBatch, and
        ConfigError for a loader without length.
        """
        self._begin()
        all_sizes = self._known(batches)
        if all_sizes is not None:
            sizes = all_sizes[self._announced :][:batches]
            if not sizes and self._taken == self._announced:
                self._next()  # as a loop would: a sampler may draw at its end
        else:
            if batches is None and not has_length(self.loader):
                raise ConfigError(
                    "this schedule trains a whole pass as one window, and a loader without length does not "
                    "say how long that is: give train(loader, window=...)"
                )
            self._leave_out()
            before = self._announced - self._taken  # of windows that have not begun
            while (batches is None or len(self._read_ahead) < before + batches) and self._read_one():
                self._leave_out()
            sizes = [self._form.size(*batch) for batch in self._read_ahead][before:]
        self._announced += len(sizes)
        return sizes if self._announced or self._read else None

    def skip(self, batches: int, window: int | None) -> int:
        """Read so many batches for nothing; return how many there were. The loader's random numbers go on.

        `window`: batches of the windows that had them, which decides whether some were left out.
        """
        streamed = self._known(window) is not None
        skipped = 0
        while skipped < batches and (self._read_ahead or self._read_one()):
            if not streamed:
                self._leave_out()
            if self._read_ahead:
                self._read_ahead.popleft()
                skipped += 1
        self._announced += skipped
        self._taken += skipped
        return skipped

    def _known(self, window: int | None) -> list[Size] | None:
        """Return the size of each batch if windows are streamed; None if they are read before."""
        has_lengths = self.form is not None and self.form.lengths
        return None if has_lengths or window == 1 or not self._counts() else known_sizes(self.loader)

    def _counts(self) -> bool:
        """Return whether all targets of the first batch count, or of all samples where tensors hold them."""
        if self.weight is None:
            return True
        if self._all_counts is None:
            data = getattr(self.loader, "dataset", None)
            targets: Value | None = None
            if type(data) is TensorDataset and len(data.tensors) == 2:
                targets = data.tensors[1]
            elif first := self.first():
                targets = first[1]
            self._all_counts = targets is None or _all_count(self.weight, targets)
        return self._all_counts

    def _leave_out(self) -> None:
        if self.weight is None or not self._read_ahead:
            return
        if not counted_for(self.weight, self._read_ahead[-1][1]):
            self._read_ahead.pop()
            log.warning("%s %d is skipped: none of its targets counts", self.what, self._read - 1)

    def take(self, size: Size) -> tuple[Value, Value]:
        """Return the next batch, of this size. Raises BadBatch for another one."""
        if not self._read_ahead and not self._read_one():
            raise BadBatch(
                f"the loader ended after {self._read} batches, and its sampler said {self._announced}"
            )
        inputs, targets = self._read_ahead.popleft()
        self._taken += 1
        if (actual := self._form.size(inputs, targets)) != size:
            raise BadBatch(f"{self.what} {self._read - 1} has {actual}, and its sampler said {size}")
        return inputs, targets

    def _read_one(self) -> bool:
        """Read one more batch; return False at the end. The loader may fill the buffer of the last one."""
        self._begin()
        if self._read_ahead:
            inputs, targets = self._read_ahead.pop()
            self._read_ahead.append((on_each(inputs, _copy), on_each(targets, _copy)))
        batch = self._next()
        if batch is _END:
            return False
        what = f"{self.what} {self._read}"
        if self.labelled or self.form is None:
            inputs, targets = pair(batch, what, self.named)
        else:
            inputs, targets = unlabelled(batch, what, self.form, self.named)
        if self.form is None:
            inputs, targets = (on_each(half, _copy) for half in (inputs, targets))
            self.form = self._begin_form((inputs, targets))
        inputs, targets = self.form.inputs.ordered(inputs), self.form.targets.ordered(targets)
        self.form.refuse_other(inputs, targets, what)
        self._refuse_long(self.form.size(inputs, targets), what)
        self._read_ahead.append((inputs, targets))
        self._read += 1
        return True

    @property
    def _form(self) -> Form:
        assert self.form is not None, "a batch has been read"
        return self.form

    def _begin_form(self, first: Pair) -> Form:
        """Return the form of batches, by the first one, and by the second of a loader that may be read ahead.

        Another loader may wait for what the first one trains.
        """
        second = None
        if isinstance(self.loader, DataLoader | Sequence) and known_sizes(self.loader) is None:
            try:
                self._begun.append(self._fetch())
                second = None if self._begun[0] is _END else pair(self._begun[0], "", self.named)
            except BadBatch:  # which is raised when it comes
                pass
            except Exception as error:  # the loader's, after the first batch is trained
                self._begun.append(error)
        form = Form.of(first, second, bool(self.longest))
        lengths = [form.size(*batch).lengths for batch in (first, second or first)]
        self.largest = tuple(map(max, *lengths))
        if self.longest:
            self.largest = tuple(islice(cycle(self.longest), form.lengths))
        return form

    def _refuse_long(self, size: Size, what: str) -> None:
        """Refuse lengths of 0, and above the largest. Raises BadBatch."""
        if 0 in size.lengths and self.labelled:
            raise BadBatch(f"{what} has {size}: leave it out, or pad it to 1 at least")
        for actual, most in zip(size.lengths, cycle(self.longest), strict=False):
            if actual > most:
                raise BadBatch(
                    f"{what} has {size}, and max_length={most}: cut what is longer, or give a larger one"
                )
        for actual, (low, high) in zip(size.lengths, self.limits, strict=False):
            if not low <= actual <= high:
                raise BadBatch(f"{what} has {size}, and the model takes {low:g} to {high:g}: cut or pad it")

    def _begin(self) -> None:
        if self._batches is None:
            refuse_loader(self.loader, self.ranks, self.microbatches)
            self._batches = iter(self.loader)

    def _next(self) -> Any:
        """Return what the loader gives next, or _END."""
        given = self._begun.popleft() if self._begun else self._fetch()
        if isinstance(given, Exception):
            raise given
        return given

    def _fetch(self) -> Any:
        """Return what the loader gives next, or _END; log a line where it has not given what it said."""
        assert self._batches is not None
        batch = _END if self._ended else next(self._batches, _END)
        self._given += batch is not _END
        if batch is _END and not self._ended:
            self._ended = True
            if has_length(self.loader) and (said := len(self.loader)) != self._given:  # type: ignore[arg-type]
                log.warning(
                    "pipetrain: the loader gave %d batches in this pass, and its len() is %d: look for an "
                    "error that it swallows, or for a wrong len()",
                    *(self._given, said),
                )
        return batch


def _all_count(weight: Callable[[Value], Tensor | float], targets: Value) -> bool:
    first = as_tuple(targets)[0]
    return counted_for(weight, targets) in (len(first), first.numel())


def refuse_loader(loader: Any, ranks: int, microbatches: int = 1) -> None:
    """Refuse single samples, one rank's share of them, and a batch too small to cut. Raises ConfigError."""
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise ConfigError(
            f"the loader is a Dataset, {kind(loader)}, which gives samples: let a DataLoader make batches of "
            f"them, DataLoader(dataset, batch_size=...), or None if it gives batches"
        )
    if ranks > 1 and (share := share_in(loader)):
        raise ConfigError(
            f"the loader's {share} gives each rank a share of the samples, and rank 0 alone reads the "
            f"loader, for all {ranks} ranks: give one of all samples, as DataLoader(dataset, shuffle=True); "
            f"with replicas pipetrain deals out its batches"
        )
    if why := too_small(known_sizes(loader) or (), microbatches):
        raise ConfigError(why)


def too_small(sizes: Sequence[Size], microbatches: int) -> str:
    """Say why a batch cannot be cut into its microbatches; "" if all can."""
    if not sizes or min(sizes).can_be_cut(microbatches):
        return ""
    return (
        f"a batch of {min(sizes)} cannot be cut into microbatches={microbatches}: leave it out, as "
        f"DataLoader(drop_last=True) does, or choose another batch size"
    )


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, pin_memory=tensor.is_pinned()).copy_(tensor)
