"""Rehearsals: a few batches with made-up messages, before a window with microbatches of a new size.

Over NCCL a posted receive is a kernel that runs until its message arrives. What a GPU loads at its first use
(a library, a kernel, a handle) waits for the end of that kernel. The first forward of a kind would so wait
for a message that waits for that forward. The rehearsal uses everything once. Then each rank puts back all
that it changed, and no receive is posted until every rank is ready. What updates run does not depend on the
size of microbatches, so the first rehearsal alone updates weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipetrain.model.random_numbers import RngSnapshot
from pipetrain.model.specs import Size, as_tuple, repeated_to
from pipetrain.model.tensor_places import refill, standing_in
from pipetrain.runtime.comm.channel import Channel
from pipetrain.runtime.comm.message import Message
from pipetrain.runtime.mailbox import Mailbox
from pipetrain.runtime.microbatch_feed import Feed, RepeatedFeed
from pipetrain.runtime.stage.stage import Stage

RunWindow = Callable[[Feed, Mailbox], bool]
"""Runs a few batches of a window; returns whether norms were summed in it."""


def rehearses(device: torch.device) -> bool:
    """Return whether there is a rehearsal: a CPU has nothing to load."""
    return device.type == "cuda"


@dataclass(slots=True)
class Rehearsal:
    """What an engine needs to rehearse, and what it has rehearsed.

    `loopback`: makes the mailbox of training (True) or of evaluation. `meet`: returns when all ranks have
    called it; with True, where norms are summed, it also connects the ranks of that sum. `capture`: captures
    the CUDA graphs that are due.
    """

    loopback: Callable[[bool], Mailbox]
    meet: Callable[[bool], None]
    capture: Callable[[], None] = lambda: None
    rehearsed: set[tuple[bool, Size]] = field(default_factory=set)
    """(training or evaluation, size of a microbatch)"""

    def before(
        self, stages: Iterable[Stage], run_window: RunWindow, feed: Feed, microbatches: int, training: bool
    ) -> None:
        """Run with made-up messages for each new size of the window's microbatches, and put all back."""
        sizes = {(training, feed.size(mb)) for mb in range(microbatches)}
        new = sorted(size for _, size in sizes - self.rehearsed)
        if new:
            # At the second time of a size the optimizer has its state.
            examples = [resized_feed(feed, size) for size in new for _ in range(2)]
            first = training and not any(trained for trained, _ in self.rehearsed)
            with state_restored(stages, training, first):
                norms = [run_window(example, self.loopback(training)) for example in examples]
        if training and any(stage.capture_due for stage in stages):
            with attributes_restored(stages):
                self.capture()
        if new:
            self.meet(any(norms))
            self.rehearsed |= sizes


class LoopbackChannel(Channel):
    """A channel to nobody: it drops what is sent, and makes up what is received.

    A gradient arrives when it is waited for. So a policy goes on with forwards, as if other ranks were late,
    and updates keep the versions of open microbatches.
    """

    _awaited: Sequence[Message] = ()  # gradients that were waited for last

    def arrived(self, message: Message) -> bool:
        return message.src < message.dst or message in self._awaited

    def wait(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        self._awaited = receives

    def _start_one(self, message: Message, tensor: Tensor, sending: bool) -> dist.Work:
        if not sending and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.normal_()
        elif not sending:  # what is valid everywhere: 0 for an index, True in a mask
            tensor.fill_(tensor.dtype is torch.bool)
        return _Finished()

    def _start_sum(self, numbers: Tensor, group: Any) -> dist.Work:
        return _Finished()

    def _complete(self, *works_and_errors: Any) -> None:
        """Nothing is waited for."""


class _Finished(dist.Work):
    """A transfer that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True


def resized_feed(feed: Feed, size: Size) -> RepeatedFeed:
    """Return a feed of microbatches of a size whose rows are those of another feed's first one."""
    (inputs, target), forms = feed.peek(), feed.forms
    return RepeatedFeed(
        size,
        [] if inputs is None else [as_tuple(repeated_to(size, inputs, forms and forms[0]))],
        []
        if target is None
        else [replace(target, value=repeated_to(size, target.value, forms and forms[1]))],
        clones=True,
    )


@contextmanager
def state_restored(stages: Iterable[Stage], training: bool, updates: bool) -> Iterator[None]:
    """Put back, to the last bit, what running the stages changes: their tensors, attributes, random state.

    Without `updates` they update no weights; of these and their optimizer's state copies are in host memory.
    """
    with attributes_restored(stages):
        tensors: list[Tensor] = []
        buffers: list[Tensor] = []
        containers: list[Any] = []
        for stage in stages:
            for collected, changing in zip(
                (tensors, buffers, containers), stage.changing(training), strict=True
            ):
                collected += changing
        before = {id(t): (t, t.data, t.detach().clone()) for t in buffers}
        before |= {id(t): (t, t.data, t.detach().to("cpu", copy=True) if updates else t) for t in tensors}
        contents = [(container, container.copy()) for container in containers]
        changed = [(stage.attributes, stage.attributes.changed()) for stage in stages if training]
        copies = [
            (attributes, {path: [[t.clone() for t in tree]] for path, tree in trees.items()})
            for attributes, trees in changed
        ]
        try:
            for stage in stages:
                stage.begin_rehearsal(updates)
            yield
            for stage in stages:
                stage.check()
        finally:
            for tensor, data, values in before.values():
                if values.data_ptr() != data.data_ptr():  # weights that have moved have kept their values
                    data.copy_(values.data)
                tensor.data, tensor.grad = data, None
            for container, content in contents:
                refill(container, content)
            for attributes, trees in copies:
                attributes.restore(trees)


@contextmanager
def attributes_restored(stages: Iterable[Stage]) -> Iterator[None]:
    """Put back random numbers, and the attributes of layers."""
    with ExitStack() as ending:
        ending.enter_context(RngSnapshot().replayed())
        for stage in stages:
            ending.enter_context(standing_in(stage.module, {}))
        yield
