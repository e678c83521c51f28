"""The random numbers of a forward, such as dropout's: the same on any partition and schedule.

Before a layer that draws, torch's generators are seeded by the run's seed, the number of the update, the
microbatch within its batch and the layer's number in the model. So the numbers depend neither on the cut, nor
on what ran before in the process, nor on whether the forward is a recompute.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipetrain.model.trial_tensors import strided

EVALUATION = -1  # as the number of an update


class Seeds(NamedTuple):
    """What a forward's random numbers depend on, besides the layer."""

    seed: int
    update: int
    microbatch: int

    def for_layer(self, layer: int) -> int:
        return seed_of(self.seed, self.update, self.microbatch, layer)


def seed_of(*parts: object) -> int:
    """Return a seed, 0 to 2^63 - 1; each part affects all bits."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


class _States:
    """The states of torch's generators."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu)


@dataclass(slots=True)
class _Forward:
    """A running forward. `before`: the states of torch's generators before its first draw."""

    seeds: Seeds
    before: _States | None = None


_running: ContextVar[_Forward | None] = ContextVar("_running", default=None)  # of each thread


class drawing:
    """A context in which layers draw from generators seeded by `seeds`; None: from the current ones.

    Afterwards the generators continue as if nothing had drawn, so other code, such as an augmentation, does
    not depend on which layers ran before it.
    """

    __slots__ = ("_before", "_forward")

    def __init__(self, seeds: Seeds | None) -> None:
        self._forward = None if seeds is None else _Forward(seeds)

    def __enter__(self) -> None:
        self._before = _running.set(self._forward)

    def __exit__(self, *error: object) -> None:
        _running.reset(self._before)
        if self._forward is not None and self._forward.before is not None:
            self._forward.before.restore()


class RngSnapshot:
    """The states of all generators when a forward begins, so that another can draw the same numbers.

    `begin` seeds torch's generators for layers that are known to draw; these states serve all others, and
    draws from Python's or NumPy's generators.
    """

    def __init__(self) -> None:
        self._torch = _States()
        self._python: Any = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=False)

    def drawn(self) -> bool:
        """Return whether Python's or NumPy's generator has been used since."""
        was, now = (state["state"] for state in (self._numpy, np.random.get_state(legacy=False)))
        same = was["pos"] == now["pos"] and np.array_equal(was["key"], now["key"])
        return not same or self._python != random.getstate()

    def end(self) -> None:
        """Drop Python's and NumPy's states if these have not been used since; other threads may use them."""
        if not self.drawn():
            self._python = None

    def _restore(self) -> None:
        self._torch.restore()
        if self._python is not None:
            random.setstate(self._python)
            np.random.set_state(self._numpy)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Restore these states; afterwards the generators continue as if nothing had drawn again."""
        current, running = RngSnapshot(), _running.get()
        current._python = self._python and current._python
        self._restore()
        try:
            with drawing(running.seeds if running else None):
                yield
        finally:
            current._restore()


class SameDraws(TorchDispatchMode):
    """Lets a run of some samples draw the numbers that the first run, of all `samples`, drew for them.

    A permutation of the samples is drawn again, as it does not belong to single samples.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples, self._drawn = samples, list[list[Tensor]]()

    def for_samples(self, start: int, end: int) -> SameDraws:
        """Return the context of a run of samples `start` to `end`."""
        self._start, self._count, self._drawing = start, end - start, iter([*self._drawn])
        self._records = not self._drawn
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws and func.overloadpacket is not torch.ops.aten.randperm:
            aliases = (argument.alias_info for argument in func._schema.arguments)
            changed = [arg for arg, alias in zip(args, aliases, strict=False) if alias and alias.is_write]
            tensors = strided(result, changed)
            if self._records:
                self._drawn.append([t.clone() for t in tensors])
            for tensor, drawn in zip(tensors, next(self._drawing, ()), strict=False):
                for dim, (size, whole) in enumerate(zip(tensor.shape, drawn.shape, strict=False)):
                    if size != whole and size * self._samples == whole * self._count:
                        drawn = drawn.narrow(dim, self._start * whole // self._samples, size)
                if tensor.shape == drawn.shape:
                    tensor.copy_(drawn)
        return result


def begin(layer: int) -> None:
    """Seed torch's generators for a layer that draws next."""
    _seed(layer)


def _seed(layer: int) -> None:
    if (forward := _running.get()) is None:
        return
    if forward.before is None:
        forward.before = _States()
    seed = forward.seeds.for_layer(layer)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


def leave_to_python() -> None:
    """Exclude `begin` from torch.compile, which would compile it again for each seed."""
    global _seed
    _seed = torch.compiler.disable(_seed)  # type: ignore[no-untyped-call]
