"""The random numbers of a forward, such as dropout's: the same on any partition and schedule.

Before a layer that draws, torch's generators are seeded by the run's seed, the number of the update, the
microbatch within its batch and the layer's number in the model. So neither the cut, nor what ran before on
the same process, nor a forward that is run again changes them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

EVALUATION = -1  # in place of the number of an update


@dataclass(frozen=True, slots=True)
class Seeds:
    """What a forward's random numbers depend on, beside its layer."""

    seed: int
    update: int
    microbatch: int

    def of(self, layer: int) -> int:
        """Return the seed of a layer, 0 to 2^63 - 1."""
        return seed_of(self.seed, self.update, self.microbatch, layer)


def seed_of(*parts: object) -> int:
    """Return a seed, 0 to 2^63 - 1, of which any part affects all bits."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


@dataclass(slots=True)
class _Forward:
    """A forward that is running, and the states of torch's generators before its first draw."""

    seeds: Seeds
    before: Tensor | None = None
    before_on_gpu: Tensor | None = None

    def keep_states(self) -> None:
        self.before = torch.get_rng_state()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.before_on_gpu = torch.cuda.get_rng_state()

    def restore_states(self) -> None:
        if self.before is not None:
            torch.set_rng_state(self.before)
        if self.before_on_gpu is not None:
            torch.cuda.set_rng_state(self.before_on_gpu)


_running: ContextVar[_Forward | None] = ContextVar("_running", default=None)  # of each thread


@contextmanager
def drawing(seeds: Seeds | None) -> Iterator[None]:
    """Let the layers that run draw by `seeds`; None: from the generators as they are.

    The generators then go on as if nothing had drawn, so that other code, such as an augmentation, does not
    depend on which layers ran before it.
    """
    forward = None if seeds is None else _Forward(seeds)
    before = _running.set(forward)
    try:
        yield
    finally:
        _running.reset(before)
        if forward is not None:
            forward.restore_states()


class Beginning:
    """The states of all generators as a forward begins, so that another can draw the same numbers.

    `begin` seeds torch's generators for layers that are known to draw; these states are for all others, and
    for what draws from Python's or NumPy's.
    """

    def __init__(self) -> None:
        self._torch: Tensor = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._others: tuple[Any, Any] | None = _python_and_numpy()

    def end(self) -> None:
        """Forget Python's and NumPy's states if nothing has drawn from them since."""
        if self._others is not None and _equal(self._others, _python_and_numpy()):
            self._others = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Go back to these states; afterwards the generators go on as if nothing had drawn again."""
        forward, others = _running.get() or _Forward(Seeds(0, 0, 0)), _python_and_numpy()
        if forward.before is None:
            forward.keep_states()
        _set(self._torch, self._gpu, self._others)
        try:
            yield
        finally:
            forward.restore_states()
            _set(None, None, others if self._others else None)


def _python_and_numpy() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=True)


def _equal(some: tuple[Any, Any], others: tuple[Any, Any]) -> bool:
    (python, (_, keys, *rest)), (other_python, (_, other_keys, *other_rest)) = some, others
    return python == other_python and rest == other_rest and np.array_equal(keys, other_keys)


def _set(torchs: Tensor | None, gpu: Tensor | None, others: tuple[Any, Any] | None) -> None:
    if torchs is not None:
        torch.set_rng_state(torchs)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
    if others is not None:
        random.setstate(others[0])
        np.random.set_state(others[1])


def begin(layer: int) -> None:
    """Seed torch's generators for a layer that is about to draw."""
    _seed(layer)


def _seed(layer: int) -> None:
    if (forward := _running.get()) is None:
        return
    if forward.before is None:
        forward.keep_states()
    seed = forward.seeds.of(layer)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


def leave_to_python() -> None:
    """Keep torch.compile out of `begin`: it would compile it again for each seed."""
    global _seed
    _seed = torch.compiler.disable(_seed)  # type: ignore[no-untyped-call]
