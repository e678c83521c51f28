"""Messages between stages: bounded, ordered, asynchronous.

An edge is an ordered pair of stages on different ranks; activations go up, gradients down. On each edge the
receiver posts at most `buffer_size` receives ahead and the sender leaves at most `buffer_size` sends
unfinished, the bound for which `simulate` proved the program free of deadlock. The program fixes the order
and the plan the sizes, so there are no headers. Every wait has a deadline; its error names the message.

Over gloo the host waits. Over NCCL the device's stream does, while the host goes on: the bounds then hold in
the order of the stream, and a thread keeps the deadline. A posted NCCL receive is a kernel that runs until
its message is there, and what is loaded waits for its end, as large kernels seem to for the multiprocessors
that it holds: VGG16 with microbatches of 128 hung although all was loaded. So there a receive is posted only
where the stream waits for it, and the sender leaves as many sends more unfinished: the messages under way are
as many as before.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipetrain.errors import ChannelError as ChannelError
from pipetrain.network.values import TensorSpec
from pipetrain.runtime.watch import Deadline, Watch
from pipetrain.schedule.actions import Edge, Tie

ALL: Tie = ()
"""Stands for the stages of all ranks, whose gradient has one norm."""
_Late = Callable[[], ChannelError]  # makes the error of a wait that ends at its deadline
_Lost = Callable[[str], ChannelError]  # that of a connection that failed, and why


@dataclass(frozen=True, slots=True)
class Message:
    """The tensors of one microbatch on one edge.

    `specs`: as they travel; `ranks`: source and destination rank; `plain`: the specs before encoding.
    """

    src: int
    dst: int
    mb: int
    specs: tuple[TensorSpec, ...]
    ranks: tuple[int, int]
    plain: tuple[TensorSpec, ...] = ()

    @property
    def edge(self) -> Edge:
        return (self.src, self.dst)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @property
    def what(self) -> str:
        """What it is, without source and destination."""
        return f"the {'activation' if self.src < self.dst else 'gradient'} of microbatch {self.mb}"

    @property
    def name(self) -> str:
        """What it is, with the stages of a skip, which are not neighbours."""
        neighbours = abs(self.src - self.dst) == 1
        return self.what if neighbours else f"{self.what} (stage {self.src} to {self.dst})"


def bounds_of(buffer_size: int | Mapping[Edge, int]) -> Callable[[Edge], int]:
    """Return the bound of an edge as a function."""
    return buffer_size.__getitem__ if isinstance(buffer_size, Mapping) else lambda edge: buffer_size


def expired(receives: Sequence[Message], sends: Sequence[Message], timeout: float) -> ChannelError:
    """Return the error for a wait for any of these messages that took `timeout` seconds."""
    rank = receives[0].ranks[1] if receives else sends[0].ranks[0]
    awaited = [f"{message.name} from rank {message.ranks[0]}" for message in receives]
    awaited += [f"rank {message.ranks[1]} to take {message.name}" for message in sends]
    return ChannelError(f"rank {rank} waited {timeout:g} s for {' or for '.join(awaited)}")


def cause_of(error: RuntimeError) -> str:
    """Return what torch.distributed says of a failure, without gloo's source line and its advice."""
    said = str(error).strip().splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] |\. This is typically caused by .*", "", said)


@dataclass(slots=True)
class _Transfer:
    """Tensors in transfer; they and the works must be kept unchanged until the transfer is finished."""

    message: Message
    tensors: list[Tensor]
    works: list[dist.Work]
    watched: Future[None] | None = None


class Channel:
    """One rank's end of all its edges, over torch.distributed. Not for use from two threads.

    `groups`: a process group for each edge; `sums`: one for the ranks of each tie. Tensors come from and go
    to `device`. `staged`: they go through pinned host memory, because gloo cannot send CUDA tensors.
    `channels_last`: four-dimensional tensors are sent and received with their channels innermost, without a
    copy if they already are. `buffer_size`: of all edges, or of each.
    """

    def __init__(
        self,
        groups: dict[Edge, Any],
        buffer_size: int | Mapping[Edge, int],
        timeout: float,
        device: torch.device,
        staged: bool = False,
        channels_last: bool = False,
        sums: Mapping[Tie, Any] | None = None,
    ) -> None:
        self._groups = groups
        self._sums = sums or {}
        self._bounds = bounds_of(buffer_size)
        self._timeout = timeout
        self._device = device
        self._staged = staged
        self._channels_last = channels_last
        self._place = torch.device("cpu") if staged else device  # of what is sent
        self.ordered = device.type == "cuda" and not staged
        """Whether the device's stream waits for messages, not the host."""
        self.waited = 0.0
        """Seconds blocked so far, waiting for other ranks."""
        self.carried = 0
        """Bytes sent and received so far, as on the wire."""
        self._polls = False
        self._stream: Any = None
        self._deadline = Deadline(timeout, self._abort, self._broken) if self.ordered else None
        self._watch: Watch | None = None
        self._to_post: dict[Edge, deque[Message]] = {edge: deque() for edge in groups}
        self._posted: dict[Edge, deque[_Transfer]] = {edge: deque() for edge in groups}
        self._sent: dict[Edge, deque[_Transfer]] = {edge: deque() for edge in groups}
        self._told: defaultdict[Tie, deque[tuple[Tensor, dist.Work]]] = defaultdict(deque)

    def expect(self, messages: Sequence[Message], watched: bool = False) -> None:
        """Announce the receives until the next drain, in order; `watched` if `arrived` or `wait` is used."""
        if watched and not self.ordered:
            self._watch = Watch(self._groups)
        self._polls = watched and self.ordered
        self._stream = torch.cuda.current_stream() if self.ordered else None  # looked up once: it takes long
        for message in messages:
            self._to_post[message.edge].append(message)
        for edge, waiting in self._to_post.items():
            if waiting:  # there may be edges of other plans, without a bound
                self._post(edge, self._ahead(edge))

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Start a send; waits only while the sends of the edge are as many as may be unfinished."""
        unfinished = self._sent[message.edge]
        while len(unfinished) >= self._room(message.edge):
            self._wait(unfinished.popleft(), sending=True)
        wire = [self._to_wire(t) for t in tensors]
        unfinished.append(self._start(message, wire, sending=True))
        self.carried += message.nbytes

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        """Wait for the next message of its edge, which must be this one."""
        self._post(message.edge, 1)
        transfer = self._next(message)
        self._posted[message.edge].popleft()
        self._wait(transfer, sending=False)
        self.carried += message.nbytes
        self._post(message.edge, self._ahead(message.edge))
        return tuple(self._from_wire(t) for t in transfer.tensors)

    def forget(self, mb: int) -> None:
        """Cancel the receives of microbatches from `mb` on, none of which may have been posted."""
        for edge, waiting in self._to_post.items():
            self._to_post[edge] = deque(message for message in waiting if message.mb < mb)
            assert all(transfer.message.mb < mb for transfer in self._posted[edge]), f"posted beyond {mb}"

    def drain(self) -> None:
        """Wait for all sends, and assert that every announced message has been received."""
        for unfinished in self._sent.values():
            while unfinished:
                self._wait(unfinished.popleft(), sending=True)
        left = [m.name for queue in self._to_post.values() for m in queue]
        left += [transfer.message.name for queue in self._posted.values() for transfer in queue]
        assert not left, f"never received: {left}"
        if self._watch:
            self._watch.close()
            self._watch = None

    def arrived(self, message: Message) -> bool:
        """Return whether `recv` of this message, the next one of its edge, would not wait."""
        return self._finished(self._next(message))

    def room(self, message: Message) -> bool:
        unfinished = self._sent[message.edge]
        while unfinished and self._finished(unfinished[0]):
            self._wait(unfinished.popleft(), sending=True)
        return len(unfinished) < self._room(message.edge)

    def wait(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Wait until one of `receives` has arrived, or there is room for one of `sends`."""
        full = [self._sent[message.edge] for message in sends if not self.room(message)]
        if len(full) < len(sends):
            return
        awaited = [self._next(message) for message in receives]
        awaited += [unfinished[0] for unfinished in full]  # they finish in order
        with self._waiting(late := partial(expired, receives, sends, self._timeout), ChannelError):
            if not self._until_any(awaited):
                raise late()

    def tell(self, tie: Tie, numbers: Tensor) -> None:
        """Start to add up numbers over the ranks of a tie; those of one tie come in their order."""
        numbers = numbers.to(self._place, non_blocking=self.ordered)
        self._told[tie].append((numbers, self._add_up(numbers, self._sums[tie])))

    def hear(self, tie: Tie) -> Tensor:
        """Wait for the first sum of a tie that was told and not heard."""
        numbers, work = self._told[tie].popleft()
        what = "the gradients of shared weights" if tie else "the gradient norms"
        me = f"rank {dist.get_rank() if dist.is_initialized() else 0}"
        late = partial(ChannelError, f"{me} waited {self._timeout:g} s for {what} of the other ranks")
        lost: _Lost = lambda why: ChannelError(f"{me} lost another rank at {what}: {why}")  # noqa: E731
        with self._waiting(late, lost):
            self._complete([work], late, lost)
        return numbers.to(self._device, non_blocking=True)

    def buffers(self) -> list[tuple[Sequence[int], Tensor]]:
        """Return the tensors that it holds, with the stages between which they travel."""
        transfers = (t for queues in (self._posted, self._sent) for queue in queues.values() for t in queue)
        held = [(one.message.edge, tensor) for one in transfers for tensor in one.tensors]
        sums = [(tie, numbers) for tie, queue in self._told.items() if tie for numbers, _ in queue]
        return [*held, *sums]

    def check(self) -> None:
        """Raise ChannelError if a message, for which the stream waits, did not come in time."""
        if self._deadline:
            self._deadline.check()

    @property
    def adds_up(self) -> bool:
        return any(self._told.values())

    def let_go(self) -> None:
        """Refer to no process group any longer, nor to messages, which hold the connections open."""
        self._groups, self._sums = {}, {}
        self._to_post, self._posted, self._sent = {}, {}, {}
        self._told.clear()

    # Transfers

    def _ahead(self, edge: Edge) -> int:
        """Return how many receives are posted before they are waited for."""
        return 0 if self.ordered and not self._polls else self._bounds(edge)

    def _room(self, edge: Edge) -> int:
        """Return how many sends may be unfinished."""
        return 2 * self._bounds(edge) - self._ahead(edge)

    def _post(self, edge: Edge, ahead: int) -> None:
        waiting, posted = self._to_post[edge], self._posted[edge]
        while waiting and len(posted) < ahead:
            message = waiting.popleft()
            posted.append(self._start(message, [self._empty(spec) for spec in message.specs], sending=False))

    def _start(self, message: Message, tensors: list[Tensor], sending: bool) -> _Transfer:
        works = [self._begin(message, tensor, sending) for tensor in tensors]
        watched = self._watch.add(message.edge, works) if self._watch else None
        return _Transfer(message, tensors, works, watched)

    def _begin(self, message: Message, tensor: Tensor, sending: bool) -> dist.Work:
        post, peer = (dist.isend, message.ranks[1]) if sending else (dist.irecv, message.ranks[0])
        try:
            work = post(tensor, peer, group=self._groups[message.edge])
        except RuntimeError as error:
            self.check()
            raise _lost(message, sending, cause_of(error)) from error
        assert work is not None
        return work

    def _add_up(self, numbers: Tensor, group: dist.ProcessGroup) -> dist.Work:
        work: dist.Work | None = dist.all_reduce(numbers, group=group, async_op=True)
        assert work is not None
        return work

    def _next(self, message: Message) -> _Transfer:
        """Return the next posted receive of a message's edge, which must be for it."""
        posted = self._posted[message.edge]
        assert posted and posted[0].message == message, f"{message.name} is not what was expected next"
        return posted[0]

    def _finished(self, transfer: _Transfer) -> bool:
        """Return whether waiting for it would return at once, with or without an error."""
        if transfer.watched is not None:
            return transfer.watched.done()
        return all(work.is_completed() for work in transfer.works)

    def _until_any(self, transfers: Sequence[_Transfer]) -> bool:
        """Wait on the host until one of these is finished; return False at the deadline."""
        if self._watch:
            watched = [transfer.watched for transfer in transfers if transfer.watched]
            return bool(wait(watched, self._timeout, FIRST_COMPLETED).done)
        deadline = time.monotonic() + self._timeout
        while not any(map(self._finished, transfers)):
            self.check()
            if time.monotonic() > deadline:
                return False
            time.sleep(0)
        return True

    def _wait(self, transfer: _Transfer, sending: bool) -> None:
        message = transfer.message
        late = partial(expired, *(([], [message]) if sending else ([message], [])), self._timeout)
        lost = partial(_lost, message, sending)
        with self._waiting(late, lost):
            looks = self._watch or (self._polls and not sending)
            if looks and not self._until_any([transfer]):
                raise late()
            if transfer.watched:
                transfer.watched.result()
            else:
                self._complete(transfer.works, late, lost)

    @contextmanager
    def _waiting(self, late: _Late, lost: _Lost) -> Iterator[None]:
        """Count the time of a wait; raise `late()` for one that ends at the deadline, or `lost(why)`."""
        start = time.monotonic()
        try:
            yield
        except ChannelError:
            raise
        except RuntimeError as error:
            over = time.monotonic() - start >= self._timeout
            raise (late() if over else lost(cause_of(error))) from error
        finally:
            self.waited += time.monotonic() - start

    def _complete(self, works: Sequence[dist.Work], late: _Late, lost: _Lost) -> None:
        """Let the host wait or, where it does not, the stream, whose deadline is kept aside."""
        end = time.monotonic() + self._timeout
        self.check()
        for work in works:
            work.wait() if self.ordered else work.wait(_at_least(end - time.monotonic()))
        if self._deadline:
            passed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            passed.record(self._stream)
            self._deadline.add(passed.query, lambda why: lost(why) if why else late())

    def _backends(self) -> list[Any]:
        return [group._get_backend(self._device) for group in (*self._groups.values(), *self._sums.values())]

    def _broken(self) -> bool:
        return any(backend.get_error().name != "SUCCESS" for backend in self._backends())

    def _abort(self) -> None:
        """End all transfers, so that what waits for them goes on, to fail."""
        for backend in self._backends():
            backend.abort()

    # Both backends need contiguous tensors: a channels-last tensor is sent as its contiguous NHWC view.

    def _to_wire(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if self._channels_last and tensor.dim() == 4:
            tensor = tensor.permute(0, 2, 3, 1)
        if not self._staged:
            return tensor.contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor)  # synchronous, because gloo reads it at once

    def _empty(self, spec: TensorSpec) -> Tensor:
        """Return memory for a tensor as on the wire."""
        shape = spec.shape
        if self._channels_last and len(shape) == 4:
            shape = (shape[0], *shape[2:], shape[1])
        return torch.empty(shape, dtype=spec.dtype, device=self._place, pin_memory=self._staged)

    def _from_wire(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self._device, non_blocking=True)
        return tensor.permute(0, 3, 1, 2) if self._channels_last and tensor.dim() == 4 else tensor


def _at_least(seconds: float) -> timedelta:
    """Return so much time or up to 1 ms more: gloo waits for whole milliseconds, and would end too early."""
    return timedelta(milliseconds=max(0, math.floor(1000 * seconds)) + 1)


def _lost(message: Message, sending: bool, why: str) -> ChannelError:
    me, peer = message.ranks if sending else message.ranks[::-1]
    return ChannelError(f"rank {me} lost rank {peer} at {message.name}: {why}")
