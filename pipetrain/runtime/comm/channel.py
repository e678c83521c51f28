"""Messages between stages: bounded, ordered, asynchronous.

An edge is an ordered pair of stages; activations go up, gradients down. A link is an edge between two ranks;
with replicas an edge has several. On each link the receiver posts at most `buffer_size` receives ahead and
the sender leaves at most `buffer_size` sends unfinished: with this bound `simulate` showed that the program
does not deadlock. The program fixes the order and the plan the sizes, so there are no headers. Every wait has
a deadline; its error names the message.

Over gloo the host waits. Over NCCL the device's stream waits and the host goes on: the bounds hold in the
order of the stream, and the run's `Deadline` applies. A posted NCCL receive is a kernel that runs until its
message arrives. Loading a kernel waits for its end, and large kernels seem to wait too: VGG16 with
microbatches of 128 hung although everything was loaded. So over NCCL a receive is posted where its send is
made (schedule/posting_order.py), and the sender leaves twice as many unfinished. If the order is not known in
advance, messages go through host memory.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipetrain.errors import ChannelError, cause_of
from pipetrain.model.specs import TensorSpec
from pipetrain.runtime.comm.message import ErrorOf, Message, message_error, sum_error
from pipetrain.runtime.comm.transfer_watch import Deadline, TransferWatch
from pipetrain.schedule.actions import Edge, Tie
from pipetrain.schedule.lower import Link

# Sent as bytes; complex ones never come.
NOT_IN_NCCL = {torch.int16, torch.uint16, torch.uint32, torch.uint64}


@dataclass(slots=True)
class _Transfer:
    """A message in flight. Its tensors and works are held, unchanged, until it is finished."""

    message: Message
    sending: bool
    tensors: list[Tensor]
    works: list[dist.Work]
    watched: Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Whether waiting for it would return at once, with or without an error."""
        return self.watched is not None and self.watched.done()


@dataclass(slots=True)
class _End:
    """One rank's end of a link."""

    group: Any
    bound: int  # of posted receives, and of unfinished sends
    to_post: deque[Message] = field(default_factory=deque)  # announced receives
    posted: deque[_Transfer] = field(default_factory=deque)
    sent: deque[_Transfer] = field(default_factory=deque)  # unfinished


class Channel:
    """One rank's end of all its links, over torch.distributed. Not for use from two threads.

    `groups`: a process group for each link; `sums`: one for the ranks of each tie. Tensors are on `device`.
    `staged`: messages go through pinned host memory, because gloo cannot send CUDA tensors. `channels_last`:
    four-dimensional tensors are sent with their channels innermost, without a copy if they are so already.
    `buffer_size`: of all edges, or of each edge.
    """

    def __init__(
        self,
        groups: Mapping[Link, Any],
        buffer_size: int | Mapping[Edge, int],
        timeout: float,
        device: torch.device,
        staged: bool = False,
        channels_last: bool = False,
        sums: Mapping[Tie, Any] | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        bounds = buffer_size if isinstance(buffer_size, Mapping) else {e: buffer_size for e, _ in groups}
        self._ends = {link: _End(group, bounds.get(link[0], 0)) for link, group in groups.items()}
        self._sums = sums or {}
        self._timeout = timeout
        self._device = device
        self._staged = staged
        self._channels_last = channels_last
        self._wire_device = torch.device("cpu") if staged else device  # of messages
        self.ordered = device.type == "cuda" and not staged
        """Whether the device's stream waits for messages, not the host."""
        self.waited = 0.0
        """Seconds blocked so far, waiting for other ranks."""
        self.transferred_bytes = 0
        """Bytes sent and received so far, as on the wire."""
        self.deadline = deadline or Deadline(timeout)
        """For what the stream waits for."""
        self._watch: TransferWatch | None = None
        # Sums that are not yet returned, each with its work once begun, and whether it is early.
        self._pending: defaultdict[Tie, deque[tuple[Tensor, list[dist.Work], bool]]] = defaultdict(deque)
        self._early_started: set[Tie] = set()  # their early sums begin at once

    def expect(self, messages: Sequence[Message], watched: bool = False) -> None:
        """Announce the receives until the next drain, in order; `watched` if `arrived` or `wait` is used."""
        if watched:
            assert not self.ordered, "a stream's messages do not say whether they have arrived"
            self._watch = TransferWatch(self._ends)
        for message in messages:
            self._ends[message.link].to_post.append(message)
        for end in self._ends.values():
            self._post(end)

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Start a send; wait only while the edge has as many unfinished sends as it may have."""
        # The bound with which `simulate` proved that nothing deadlocks; over NCCL twice that, see above.
        end = self._ends[message.link]
        while len(end.sent) >= end.bound * (2 if self.ordered else 1):
            self._wait(end.sent.popleft())
        end.sent.append(self._start(message, True, [self._to_wire(t) for t in tensors]))
        self.transferred_bytes += message.nbytes

    def post(self, message: Message) -> None:
        """Post the receive of this message, the next of its edge, unless it is posted ahead anyway."""
        end = self._ends[message.link]
        if self.ordered:
            self._post(end, len(end.posted) + 1)

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        """Wait for the next message of its edge, which must be this one."""
        end = self._ends[message.link]
        self._post(end, 1)  # usually it is posted already
        transfer = self._next_receive(message)
        end.posted.popleft()
        self._wait(transfer)
        self.transferred_bytes += message.nbytes
        self._post(end)  # a later one, for which there is room now
        return tuple(self._from_wire(t) for t in transfer.tensors)

    def truncate(self, mb: int) -> None:
        """Cancel the receives of microbatches from `mb` on; none of these may be posted."""
        for end in self._ends.values():
            end.to_post = deque(message for message in end.to_post if message.mb < mb)
            assert all(transfer.message.mb < mb for transfer in end.posted), f"posted beyond {mb}"

    def drain(self) -> None:
        """Wait for all sends, and assert that every announced message has been received."""
        for end in self._ends.values():
            while end.sent:
                self._wait(end.sent.popleft())
            unreceived = [transfer.message for transfer in end.posted] + [*end.to_post]
            assert not unreceived, f"never received: {[message.name for message in unreceived]}"
        if self._watch:
            self._watch.close()
            self._watch = None

    # What has arrived

    def arrived(self, message: Message) -> bool:
        """Return whether `recv` of this message, the next of its edge, would not wait."""
        return self._next_receive(message).finished

    def room(self, message: Message) -> bool:
        end = self._ends[message.link]
        while end.sent and end.sent[0].finished:
            self._wait(end.sent.popleft())  # returns at once, or raises its error
        return len(end.sent) < end.bound

    def wait(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Wait until one of `receives` has arrived, or there is room for one of `sends`."""
        if not any(map(self.room, sends)):
            transfers = [self._next_receive(message) for message in receives]
            transfers += [self._ends[message.link].sent[0] for message in sends]  # they finish in order
            self._timed(partial(message_error, receives, sends, self._timeout), self._await_any, transfers)

    # Sums over ranks

    def all_reduce(self, tie: Tie, numbers: Tensor, early: bool = False) -> None:
        """Add numbers to be summed over the ranks of a tie; `reduced` returns its sums in this order.

        `early`: they are the first of several parts, see `begin`.
        """
        if not early:
            self._early_started.discard(tie)
        self._pending[tie].append((numbers.to(self._wire_device, non_blocking=self.ordered), [], early))
        if not self.ordered or tie in self._early_started:
            self.begin(tie)

    def begin(self, tie: Tie, early: bool = False) -> None:
        """Start the sums of a tie that have not begun: early ones, and the first one after them.

        `early`: start only early ones, and later early ones at once.
        """
        if early:
            self._early_started.add(tie)
        for numbers, works, first in self._pending[tie]:
            if not works:
                works.append(self._start_sum(numbers, self._sums[tie]))
                if not first:
                    return

    def reduced(self, tie: Tie) -> Tensor:
        """Wait for the first sum of a tie that has not been returned, and return it."""
        if not self._pending[tie][0][1]:
            self.begin(tie)
        numbers, works, _ = self._pending[tie].popleft()
        error = partial(sum_error, tie, self._sums[tie], self._timeout)
        self._timed(error, self._complete, works, error)
        return numbers.to(self._device, non_blocking=True)

    def buffers(self) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield the tensors of messages and sums, with the stages between which they are sent."""
        for (edge, _), end in self._ends.items():
            for transfer in (*end.posted, *end.sent):
                yield from ((edge, tensor) for tensor in transfer.tensors)
        for tie, pending in self._pending.items():
            yield from ((tie, numbers) for numbers, *_ in pending if tie)

    def close(self) -> None:
        self._ends, self._sums = {}, {}
        self._pending.clear()

    # Transfers

    def _post(self, end: _End, least: int = 0) -> None:
        """Post receives up to the edge's bound or, if the stream waits, up to `least`."""
        ahead = least if self.ordered else end.bound
        while end.to_post and len(end.posted) < ahead:
            message = end.to_post.popleft()
            end.posted.append(self._start(message, False, [self._empty(spec) for spec in message.specs]))

    def _start(self, message: Message, sending: bool, tensors: list[Tensor]) -> _Transfer:
        works = self._timed(self._error_of(message, sending), self._start_all, message, tensors, sending)
        watched = self._watch.add(message.link, works) if self._watch else None
        return _Transfer(message, sending, tensors, works, watched)

    def _start_all(self, message: Message, tensors: list[Tensor], sending: bool) -> list[dist.Work]:
        return [self._start_one(message, tensor, sending) for tensor in tensors]

    def _start_one(self, message: Message, tensor: Tensor, sending: bool) -> dist.Work:
        post, peer = (dist.isend, message.ranks[1]) if sending else (dist.irecv, message.ranks[0])
        if self.ordered and tensor.dtype in NOT_IN_NCCL:
            tensor = tensor.view(-1).view(torch.uint8)
        work = post(tensor, peer, group=self._ends[message.link].group)
        assert work is not None
        return work

    def _start_sum(self, numbers: Tensor, group: dist.ProcessGroup) -> dist.Work:
        work: dist.Work | None = dist.all_reduce(numbers, group=group, async_op=True)
        assert work is not None
        return work

    def _next_receive(self, message: Message) -> _Transfer:
        """Return the next posted receive of a message's edge, which must be this message's."""
        posted = self._ends[message.link].posted
        assert posted and posted[0].message.mb == message.mb, f"{message.name} is not what was expected next"
        return posted[0]

    # Waits

    def _error_of(self, message: Message, sending: bool) -> ErrorOf:
        receives, sends = ([], [message]) if sending else ([message], [])
        return partial(message_error, receives, sends, self._timeout)

    def _wait(self, transfer: _Transfer) -> None:
        error = self._error_of(transfer.message, transfer.sending)
        self._timed(error, self._finish, transfer, error)

    def _finish(self, transfer: _Transfer, error_of: ErrorOf) -> None:
        if transfer.watched:
            self._await_any([transfer])
            transfer.watched.result()
        else:
            self._complete(transfer.works, error_of)

    def _timed(self, error_of: ErrorOf, run: Callable[..., Any], *arguments: Any) -> Any:
        """Run something that may wait, add its time to `waited`, and raise the error that names it."""
        start = time.monotonic()
        try:
            return run(*arguments)
        except ChannelError:
            raise
        except (RuntimeError, TimeoutError) as error:
            self.deadline.check()
            expired = time.monotonic() - start >= self._timeout
            raise error_of("" if expired else cause_of(error)) from error
        finally:
            self.waited += time.monotonic() - start

    def _await_any(self, transfers: Sequence[_Transfer]) -> None:
        """Let the host wait until one of these is finished. Raises TimeoutError."""
        watched = [transfer.watched for transfer in transfers if transfer.watched]
        if not wait(watched, self._timeout, FIRST_COMPLETED).done:
            raise TimeoutError

    def _complete(self, works: Sequence[dist.Work], error_of: ErrorOf) -> None:
        """Let the host wait or, over NCCL, the stream."""
        limit, end = _at_least(self._timeout), time.monotonic() + self._timeout
        self.deadline.check()
        for work in works:
            work.wait() if self.ordered else work.wait(limit)
            if len(works) > 1:
                limit = _at_least(end - time.monotonic())
        if self.ordered:
            self.deadline.add(error_of)

    # Both backends need contiguous tensors: a channels-last tensor is sent as its contiguous NHWC view.

    def _to_wire(self, tensor: Tensor) -> Tensor:
        if self._channels_last and tensor.dim() == 4:
            tensor = tensor.permute(0, 2, 3, 1)
        if not self._staged:
            return tensor.contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor)  # synchronous, because gloo reads it at once

    def _empty(self, spec: TensorSpec) -> Tensor:
        shape = spec.shape
        if self._channels_last and len(shape) == 4:
            shape = (shape[0], *shape[2:], shape[1])
        if self._staged:
            return torch.empty(shape, dtype=spec.dtype, pin_memory=True)
        return torch.empty(shape, dtype=spec.dtype, device=self._wire_device)

    def _from_wire(self, tensor: Tensor) -> Tensor:
        if self._staged:
            tensor = tensor.to(self._device, non_blocking=True)
        return tensor.permute(0, 3, 1, 2) if self._channels_last and tensor.dim() == 4 else tensor


@lru_cache(maxsize=1)  # mostly called with the same time
def _at_least(seconds: float) -> timedelta:
    """Return this time or up to 1 ms more: gloo counts whole milliseconds, and would end too early."""
    return timedelta(milliseconds=max(0, math.floor(1000 * seconds)) + 1)
