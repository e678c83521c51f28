"""One use of everything that a window needs, before a message is waited for.

Over NCCL a posted receive is a kernel that runs until its message is there, and what a GPU loads at its first
use (a library, a kernel, a handle) waits for that kernel to end. A forward that is the first of its kind then
waits for a message that waits for that forward. So before a window with microbatches of a new size, every
rank plays a few batches of it with made-up messages, and puts back all that it changed; no receive is posted
until every rank is through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from pipetrain.network.draws import Beginning
from pipetrain.network.places import standing_in
from pipetrain.network.values import Value, as_tuple, on_each
from pipetrain.runtime.feed import Feed, Target
from pipetrain.runtime.mailbox import Mailbox
from pipetrain.runtime.order import Order
from pipetrain.runtime.stage import Stage


def rehearses(device: torch.device) -> bool:
    """Return whether there is a rehearsal: a CPU has nothing to load."""
    return device.type == "cuda"


class Player(Protocol):
    """An engine."""

    stages: Mapping[int, Stage]

    def play(self, order: Order, feed: Feed, microbatches: int, training: bool, mail: Mailbox) -> bool:
        """Run a window; return whether stages told norms in it."""


@dataclass(slots=True)
class Rehearsal:
    """What an engine needs to rehearse, and what it has rehearsed.

    `loopback`: makes the mailbox of training (True) or of evaluation. `meet` returns when all ranks have
    called it, alike: with True where stages tell norms, which then connects the ranks. `after_first`: called
    after the first rehearsal of training, as for CUDA graphs of its passes.
    """

    loopback: Callable[[bool], Mailbox]
    meet: Callable[[bool], None]
    after_first: Callable[[], None] = lambda: None
    done: set[tuple[bool, int]] = field(default_factory=set)
    """(training or evaluation, samples of a microbatch)"""

    def before(self, engine: Player, order: Order, feed: Feed, microbatches: int, training: bool) -> None:
        """Play a few batches with made-up messages for each new size of microbatches, and put all back."""
        sizes = {(training, feed.size(mb)) for mb in range(order.batches * microbatches)}
        new = sorted(size for _, size in sizes - self.done)
        if not new:
            return
        inputs, target = feed.first()
        norms = False
        with put_back(engine.stages.values(), training):
            for size in new:
                for _ in range(2):  # in the second one the optimizer has its state
                    alike, mail = Repeated(size, inputs, target), self.loopback(training)
                    norms |= engine.play(order.short(), alike, microbatches, training, mail)
        if training and not any(trained for trained, _ in self.done):
            with attributes_put_back(engine.stages.values()):
                self.after_first()
        self.meet(norms)
        self.done |= sizes


def like(value: Value, size: int) -> Value:
    """Return tensors with `size` rows, which are those of tensors [n, ...], again and again."""
    return on_each(value, lambda t: t[torch.arange(size, device=t.device) % len(t)])


class Repeated:
    """A feed whose microbatches are all alike."""

    def __init__(self, size: int, inputs: tuple[Tensor, ...] | None, target: Target | None) -> None:
        self._size = size
        self._inputs = inputs and as_tuple(like(inputs, size))
        self._target = target and replace(target, value=like(target.value, size))

    def size(self, mb: int) -> int:
        return self._size

    def input(self, mb: int) -> tuple[Tensor, ...]:
        assert self._inputs is not None
        return tuple(t.clone() for t in self._inputs)

    def target(self, mb: int) -> Target:
        assert self._target is not None
        return self._target

    def first(self) -> tuple[tuple[Tensor, ...] | None, Target | None]:
        return self._inputs, self._target

    def prepare(self) -> None:
        """There is nothing to make."""


@contextmanager
def put_back(stages: Iterable[Stage], training: bool) -> Iterator[None]:
    """Put back, to the last bit, what running the stages changes: all that they hold, and random numbers."""
    with attributes_put_back(stages), ExitStack() as ending:
        for stage in stages:
            ending.enter_context(stage.rehearsing(training))
        yield


@contextmanager
def attributes_put_back(stages: Iterable[Stage]) -> Iterator[None]:
    """Put back random numbers, and the attributes of layers."""
    with ExitStack() as ending:
        ending.enter_context(Beginning().again())
        for stage in stages:
            ending.enter_context(standing_in(stage.module, {}))
        yield
