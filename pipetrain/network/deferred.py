"""A record of how a model's tensors were made, from which some of them are made when they are wanted.

What a model's factory does to tensors is recorded (see factory.py), and a rank repeats of the record what
its own stages need. So a factory may initialise its weights as it likes, and constant buffers have their
values, but no rank ever holds the whole model. Each operation that draws is seeded by the run's seed and its
number in the record, so that the weights depend on nothing else.

Source of the idea: deferred initialisation of torchdistx (github.com/pytorch/torchdistx).
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from pipetrain.errors import ConfigError
from pipetrain.network import draws
from pipetrain.network.values import bytes_of

_EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_INITIAL = -2  # in place of the number of an update
WAY_OUT = "or let every rank hold the whole model (Pipeline(model), or build=whole)"


@dataclass(frozen=True, slots=True)
class Ref:
    """A strided tensor of a numbered storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor with data that the factory has used, at that time."""

    tensor: Tensor
    version: int

    def __repr__(self) -> str:
        some = self.tensor.detach().flatten()[:: max(1, self.tensor.numel() // 4096)]
        return f"{self.tensor.dtype}{list(self.tensor.shape)}{zlib.crc32(bytes_of(some).numpy().data)}"


@dataclass(frozen=True, slots=True)
class _Step:
    """An operation that has made or changed storages. `drawn`: its number among those that draw."""

    function: Any
    args: Any
    kwargs: Any
    dtype: torch.dtype  # the default at that time
    made: Mapping[int, Ref]  # by position among the tensors that it returns
    drawn: int | None
    reads: frozenset[int]


class Deferred:
    """The record of a factory: the Values of its model."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers: dict[int, int] = {}  # of storages, by address
        self._held: list[torch.UntypedStorage] = []  # so that no address is used twice
        self._steps: list[_Step] = []
        self._writers: dict[int, list[int]] = defaultdict(list)  # the steps that make or change a storage
        self._outside: set[int] = set()  # storages of tensors that the factory has not made
        self._drawn = 0
        self._named: dict[str, Ref] = {}

    # Recording

    def described(self, value: Any) -> Any:
        """Return a tensor of an operation's arguments as the record keeps it; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        if value.layout is not torch.strided:
            raise ConfigError(
                f"the model's factory makes a tensor of layout {value.layout}, which is not recorded: make "
                f"it dense, {WAY_OUT}"
            )
        if not isinstance(value, FakeTensor):
            return Constant(value, value._version)
        storage = value.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._numbers))
        if number == len(self._held):
            self._held.append(storage)
        return Ref(
            number,
            value.dtype,
            tuple(value.shape),
            value.stride(),
            int(value.storage_offset()),
            value.is_conj(),
            value.is_neg(),
        )

    def add(self, function: Any, given: tuple[Any, Any], result: Any) -> None:
        """Record an operation, if it makes or changes numbers."""
        known = self._writers.keys()
        outputs = [self.described(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        made = {
            position: output
            for position, output in enumerate(outputs)
            if isinstance(output, Ref) and output.storage not in known
        }
        changed = _written(function, *given)
        outside = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Constant)]
        if outside and function._schema.name != "aten::lift_fresh" and _is_view(function):
            self._outside.update(ref.storage for ref in made.values())
        if any(isinstance(one, Constant) or one.storage in self._outside for one in changed):
            raise ConfigError(
                f"the model's factory changes a tensor that was made outside of it ({function}): make the "
                f"tensor within, {WAY_OUT}"
            )
        writes = {ref.storage for ref in (*made.values(), *changed)}
        if not writes or function._schema.name == "aten::set_":  # a view has no numbers of its own
            return
        drawn = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            drawn, self._drawn = self._drawn, self._drawn + 1
        reads = frozenset(leaf.storage for leaf in tree_leaves(given) if isinstance(leaf, Ref))
        for storage in writes:
            self._writers[storage].append(len(self._steps))
        self._steps.append(_Step(function, *given, torch.get_default_dtype(), made, drawn, reads))

    def name(self, names: Mapping[str, Tensor]) -> None:
        """Note which tensors have names in the model."""
        self._named = {name: self.described(tensor) for name, tensor in names.items()}

    @property
    def digest(self) -> int:
        """A checksum of the record, equal on ranks whose factories did the same."""
        steps = ((str(s.function), s.args, s.kwargs, s.dtype, s.made) for s in self._steps)
        return zlib.crc32(repr([*steps, self._named]).encode())

    # Repeating

    def prove(self, names: Collection[str]) -> None:
        """Refuse tensors to which the factory has given no numbers. Raises ConfigError."""
        for name in names:
            ref = self._named.get(name)
            if ref is None or 0 in ref.shape:
                continue
            writers = [self._steps[index].function for index in self._writers.get(ref.storage, ())]
            if all(function._schema.name.removeprefix("aten::") in _EMPTY for function in writers):
                raise ConfigError(
                    f"{name} of the model has no values when the factory has made it: initialise it there, "
                    f"or give weights=, a file that has it"
                )

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        wanted = {name: self._named[name] for name in names if name in self._named}
        return dict(zip(wanted, self.repeated(list(wanted.values())), strict=True))

    @torch.no_grad()
    def repeated(self, refs: Sequence[Ref]) -> list[Tensor]:
        """Return tensors with their numbers; those that shared memory still do."""
        chosen = self._needed({ref.storage for ref in refs})
        last = {number: index for index in chosen for number in self._touched(index)}
        last |= dict.fromkeys((ref.storage for ref in refs), len(self._steps))
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng([]):
            for index in chosen:
                self._repeat(self._steps[index], storages)
                for number in self._touched(index):
                    if last[number] == index:
                        storages.pop(number, None)
            return [_tensor(ref, storages) for ref in refs]

    def _needed(self, wanted: Collection[int]) -> list[int]:
        """Return the steps that decide the numbers of some storages, ascending."""
        chosen: set[int] = set()
        todo = [(number, len(self._steps)) for number in wanted]
        while todo:
            number, end = todo.pop()
            if number not in self._writers:
                raise ConfigError(
                    f"the model's factory uses a tensor whose numbers are not recorded, such as one that "
                    f"torch.load has read: give weights= in place of loading them there, {WAY_OUT}"
                )
            for index in self._writers[number]:
                if index < end and index not in chosen:
                    chosen.add(index)
                    todo += [(read, index) for read in self._steps[index].reads]
        return sorted(chosen)

    def _touched(self, index: int) -> set[int]:
        step = self._steps[index]
        return {*step.reads, *(ref.storage for ref in step.made.values())}

    def _repeat(self, step: _Step, storages: dict[int, torch.UntypedStorage]) -> None:
        constants: set[int] = set()

        def real(value: Any) -> Any:
            if isinstance(value, Constant):
                if value.tensor._version != value.version:
                    raise ConfigError(
                        f"a tensor {value} that the model's factory has used was changed since: leave it as "
                        f"it is, {WAY_OUT}"
                    )
                constants.add(value.tensor.untyped_storage()._cdata)
                return value.tensor
            return _tensor(value, storages) if isinstance(value, Ref) else value

        args, kwargs = tree_map(real, (step.args, step.kwargs))
        if step.drawn is not None:
            torch.default_generator.manual_seed(draws.Seeds(self._seed, _INITIAL, 0).of(step.drawn))
        with _default_dtype(step.dtype):
            result = step.function(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for position, ref in step.made.items():
            output = outputs[position]
            if output.untyped_storage()._cdata in constants:
                output = output.clone()
            if (output.stride(), output.storage_offset()) != (ref.stride, ref.offset) and ref.shape:
                output = torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype).copy_(output)
            storages[ref.storage] = output.untyped_storage()


def _tensor(ref: Ref, storages: Mapping[int, torch.UntypedStorage]) -> Tensor:
    tensor = torch.empty(0, dtype=ref.dtype, device="cpu")
    tensor.set_(storages[ref.storage], ref.offset, ref.shape, ref.stride)
    tensor = tensor.conj() if ref.conjugate else tensor
    return torch._neg_view(tensor) if ref.negative else tensor


def _written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors among an operation's arguments that it changes."""
    written = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Ref | Constant)]
    return written


def _is_view(function: Any) -> bool:
    return any(output.alias_info is not None for output in function._schema.returns)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
