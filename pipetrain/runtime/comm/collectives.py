"""The ranks of a run, and their communication other than the stages' messages.

They exchange JSON and tensors: nothing received is unpickled. Every wait has a deadline.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipetrain.errors import ChannelError, Refused, cause_of, of_all
from pipetrain.model.specs import TensorSpec, bytes_of

HEAD_BYTES = 504  # bytes of a text in its first message
ERROR_SEND_S = 2.0  # for a rank to receive which other one is lost
END_TEXT = json.dumps(["close() or the end of its program", None])  # a rank's last text
CLOCK_ROUND_TRIPS = 32  # round trips to compare two clocks
_Sent = tuple[Any, Any]  # a work to wait for, and what must live until then
_TEXT_TAG, _TENSOR_TAG = 2**30, 2**30 + 1  # tags; monitored_barrier of gloo counts small ones
_THREAD_TAG = 2**29  # and more
UNLIMITED_S = 30 * 86400.0  # for a rank whose end would be noticed


@dataclass(frozen=True, slots=True)
class World:
    """The rank of a process among all ranks, as set by torchrun; a single process without it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # ranks on this machine; 0: unknown

    @classmethod
    def current(cls) -> World:
        """Return the world of the process group, if there is one, else torchrun's."""
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1 if size == 1 else 0))
        return cls(rank, size, int(os.environ.get("LOCAL_RANK", rank)), local_size)


class Ranks:
    """All ranks of a run, over gloo. `timeout`: seconds that a wait for other ranks may take.

    The methods raise ChannelError if another rank does not arrive, or is lost. `thread`: see `for_thread`.
    """

    def __init__(self, world: World, timeout: float, group: Any = None, thread: int = 0) -> None:
        self.world = world
        self._timeout = timeout
        self._gloo = group
        self._thread, self._thread_count = thread, 0
        self._tag = _THREAD_TAG + thread if thread else _TEXT_TAG
        self._limit_s = UNLIMITED_S if thread else None  # for a text; None: the group's limit
        self._heads: dict[int, tuple[Any, bytearray]] = {}  # a posted receive for each rank's next text
        self._unwaited_sends: list[_Sent] = []  # still to be waited for

    def for_thread(self) -> Ranks:
        """Return the ranks for another thread, which may wait as long as they live. All ranks call it."""
        self._thread_count += 1
        return Ranks(self.world, self._timeout, self._gloo, self._thread_count)

    def gather(self, purpose: str, item: Any) -> list[Any]:
        """Return each rank's `item` in JSON's types: lists for tuples, keys that are strings.

        All ranks send to rank 0, which sends to all: a collective of gloo takes several times as long.
        """
        text = json.dumps([purpose, item])
        if self.world.size == 1:
            return [json.loads(text)[1]]
        if self.world.rank:
            with self._naming_errors(f"exchange {purpose} with rank 0"):
                sent = self._post_text(text, 0)
                texts = json.loads(self._receive_text(0))
                _wait_for(sent, self._limit_s)
            if isinstance(texts, str):  # rank 0's error about a lost rank
                raise ChannelError(texts)
        else:
            texts = [text, *(self._receive(purpose, rank) for rank in range(1, self.world.size))]
            listening = [rank for rank, text in enumerate(texts) if rank and text != END_TEXT]
            with self._naming_errors(f"send the others {purpose}"):
                _wait_for(self._post_to(listening, json.dumps(texts)), self._limit_s)
        return self._checked_items(purpose, texts, self.world.size)

    def _checked_items(self, purpose: str, texts: Sequence[str], ranks: int) -> list[Any]:
        """Return the items of the first `ranks` at `purpose`. Raises ChannelError if one is elsewhere."""
        received = [json.loads(text) for text in texts]
        for rank, (other, _) in enumerate(received):
            if other != purpose or len(texts) != ranks:
                raise ChannelError(
                    f"rank {self.world.rank} waits for {purpose}, and rank {rank} is at {other}: let all "
                    f"ranks call the same methods in the same order"
                )
        return [item for _, item in received]

    def _receive(self, purpose: str, rank: int) -> str:
        """Return a rank's text; if that rank is lost, send its number to the others."""
        try:
            with self._naming_errors(f"receive {purpose} from rank {rank}"):
                return self._receive_text(rank)
        except ChannelError as error:
            for other in set(range(1, self.world.size)) - {rank}:
                with suppress(RuntimeError):  # it is lost too, or does not answer
                    _wait_for(self._post_text(json.dumps(str(error)), other), ERROR_SEND_S)
            raise

    def send_end(self) -> None:
        """Send to the ranks that wait for this one that it leaves without an error."""
        for rank in [0] if self.world.rank else range(1, self.world.size):
            with suppress(Exception):  # it has ended too
                text = END_TEXT if self.world.rank else json.dumps([END_TEXT])
                _wait_for(self._post_text(text, rank), ERROR_SEND_S)

    def _post_to(self, ranks: Collection[int], text: str) -> list[_Sent]:
        return [work for rank in ranks for work in self._post_text(text, rank)]

    def _post_text(self, text: str, rank: int) -> list[_Sent]:
        content = text.encode()
        head = struct.pack("q", len(content)) + content[:HEAD_BYTES].ljust(HEAD_BYTES)
        parts = [bytearray(part) for part in (head, content[HEAD_BYTES:]) if part]
        tensors = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
        return [(dist.isend(tensor, rank, group=self._gloo, tag=self._tag), tensor) for tensor in tensors]

    def _receive_text(self, rank: int) -> str:
        """Wait for a rank's next text, and post the receive of the one after it, which may come early."""
        posted, head = self._heads.pop(rank) if rank in self._heads else self._post_head(rank)
        _wait_for([(posted, head)], self._limit_s)
        (size,) = struct.unpack_from("q", head)
        rest = bytearray(max(0, size - HEAD_BYTES))
        if rest:
            dist.recv(torch.frombuffer(rest, dtype=torch.uint8), rank, group=self._gloo, tag=self._tag)
        if not self._thread:
            with suppress(RuntimeError):  # it was the last text of a rank that has left
                self._heads[rank] = self._post_head(rank)
        return (head[8:] + rest)[:size].decode()

    def _post_head(self, rank: int) -> tuple[Any, bytearray]:
        head = bytearray(8 + HEAD_BYTES)
        tensor = torch.frombuffer(head, dtype=torch.uint8)
        return dist.irecv(tensor, rank, group=self._gloo, tag=self._tag), head

    def broadcast_nowait(self, purpose: str, item: Any = None, ends: bool = False) -> Any:
        """Return on every rank the `item` of rank 0, which continues without waiting for the others.

        `ends`: rank 0 waits until they have it, as it may leave them afterwards.
        """
        texts = [json.dumps([purpose, item])]
        if self.world.rank:
            with self._naming_errors(f"receive {purpose} from rank 0"):
                texts = json.loads(self._receive_text(0))
        elif self.world.size > 1:
            with self._naming_errors(f"send the others {purpose}"):
                _wait_for(self._unwaited_sends)
                self._unwaited_sends = self._post_to(range(1, self.world.size), json.dumps(texts))
                if ends:
                    _wait_for(self._unwaited_sends)
                    self._unwaited_sends = []
        (item,) = self._checked_items(purpose, texts, 1)
        return item

    def broadcast(self, purpose: str, item: Any = None, source: int = 0) -> Any:
        """Return on every rank the `item` of rank `source`, in JSON's types."""
        return self.gather(purpose, item if self.world.rank == source else None)[source]

    def barrier_or_raise(self, doing: str, refusal: str = "", limit_s: float | None = None) -> None:
        """Wait for all ranks; if one refuses, raise Refused on every rank.

        A rank that refuses may call it in place of the next call of the others. `doing`: what the ranks wait
        to do, such as "get ready". The error names missing ranks.
        """
        limit_s = self._timeout if limit_s is None else limit_s
        if self.world.size > 1:
            with self._naming_errors(f"meet the others to {doing}"):
                try:
                    dist.monitored_barrier(self._gloo, timedelta(seconds=limit_s), wait_all_ranks=True)
                except RuntimeError as error:
                    if missing := re.search(r"[Rr]anks? ([\d, ]+) failed to pass", str(error)):
                        ranks = [int(rank) for rank in missing[1].split(",")]
                        raise came_too_late(self.world.rank, limit_s, ranks, doing) from error
                    raise
        for rank, why in enumerate(self.gather("the start", refusal)):
            if why:
                raise of_all(Refused(f"rank {rank}: {why}" if rank else why), self.world.rank)

    def maximum(self, purpose: str, local: int) -> int:
        highest: int = max(self.gather(purpose, local))
        return highest

    def broadcast_tensor(self, purpose: str, tensor: Tensor) -> None:
        """Overwrite a tensor in host memory with rank 0's."""
        if self.world.size == 1:
            return
        values = tensor.contiguous()
        with self._naming_errors(f"receive {purpose}"):
            dist.broadcast(values.flatten().view(torch.uint8), 0, group=self._gloo)
        tensor.copy_(values)

    def post_tensor(self, purpose: str, tensor: Tensor, rank: int, stream: int = 0) -> Callable[[], Tensor]:
        """Start to send a tensor in host memory to a rank, apart from the messages of the stages.

        The tensors of one `stream` are received in order. Returns a function that waits for the send.
        """
        doing = f"send {purpose} to rank {rank}"
        return self._start_transfer(dist.isend, doing, tensor.contiguous(), rank, stream)

    def expect_tensor(
        self, purpose: str, spec: TensorSpec, rank: int, stream: int = 0
    ) -> Callable[[], Tensor]:
        """Post the receive of a tensor from a rank; returns a function that waits and returns it."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        return self._start_transfer(dist.irecv, f"receive {purpose} from rank {rank}", tensor, rank, stream)

    def _start_transfer(
        self, start: Callable[..., Any], doing: str, tensor: Tensor, rank: int, stream: int
    ) -> Callable[[], Tensor]:
        """Begin a transfer; return a function that waits for its end and returns the tensor."""
        with self._naming_errors(doing):
            work = start(tensor, rank, group=self._gloo, tag=_TENSOR_TAG + stream)

        def wait() -> Tensor:
            with self._naming_errors(doing):
                work.wait()
            return tensor

        return wait

    def collect_on_rank0(self, purpose: str, tensors: Sequence[Tensor], owner: int) -> list[Tensor]:
        """Return on rank 0, in host memory, the tensors of their `owner`; none on the others."""
        local = [tensor.cpu() for tensor in tensors]
        if owner == 0:
            return local
        specs = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in local]
        specs = self.broadcast(f"the forms of {purpose}", specs, owner)
        received: list[Tensor] = []
        for tensor in local:
            self.post_tensor(purpose, bytes_of(tensor.detach()), 0)()
        for shape, dtype in specs if self.world.rank == 0 else ():
            spec = TensorSpec(tuple(shape), getattr(torch, dtype))
            numbers = self.expect_tensor(purpose, TensorSpec((spec.nbytes,), torch.uint8), owner)()
            received.append(numbers.view(spec.dtype).reshape(spec.shape))
        return received

    def clock_offset(self, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
        """Return what to add to this rank's `now()` to get rank 0's, and a bound on the error, in seconds.

        All ranks must call it. As in NTP, rank 0's answer is assumed to be midway between sending and
        receiving; the round with the shortest round trip counts, and half of that is the error.
        """
        rounds = [(0.0, 0.0)] if self.world.rank == 0 else []
        with self._naming_errors("compare its clock with rank 0's"):
            for rank in range(1, self.world.size):
                for _ in range(CLOCK_ROUND_TRIPS):
                    sent, token = clock(), torch.zeros(1, dtype=torch.float64)
                    if self.world.rank == 0:
                        dist.recv(token, rank, group=self._gloo)
                        dist.send(token.fill_(clock()), rank, group=self._gloo)
                    elif self.world.rank == rank:
                        dist.send(token, 0, group=self._gloo)
                        dist.recv(token, 0, group=self._gloo)
                        received = clock()
                        rounds.append(((received - sent) / 2, token.item() - (sent + received) / 2))
        error, offset = min(rounds)
        return offset, error

    def check(self) -> None:
        """Raise the error that has ended all transfers, if any."""

    @contextmanager
    def _naming_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except ChannelError:
            raise
        except RuntimeError as error:
            self.check()
            raise ChannelError(
                f"rank {self.world.rank} could not {doing}: {cause_of(error)}; look at what the other ranks "
                f"say, or give them longer than {self._timeout:g} s with timeout="
            ) from error


class StopListeners:
    """Threads that receive that another rank has stopped, and why, or notice that it is lost.

    All send to rank 0, which sends to the others: so all name the first rank. `ranks`: for these threads
    alone, see `Ranks.for_thread`; `lost`: called with the rank and why.
    """

    def __init__(self, ranks: Ranks, lost: Callable[[int, str], None]) -> None:
        self._ranks, self._lost = ranks, lost
        self._peers = [0] if ranks.world.rank else [*range(1, ranks.world.size)]
        self.announced = False
        """Whether all ranks have received how this run ends."""
        self._threads = [Thread(target=self._listen, args=(peer,), daemon=True) for peer in self._peers]
        for thread in self._threads:
            thread.start()

    def send_stop(self, rank: int, why: str) -> None:
        """Send at once why a rank has stopped; "" means that this rank has finished."""
        self.announced = True
        for peer in set(self._peers) - {rank}:
            with suppress(RuntimeError):  # a lost rank receives nothing
                _wait_for(self._ranks._post_text(json.dumps([rank, why]), peer), ERROR_SEND_S)

    def join(self) -> None:
        """Wait for the threads: one that leaves C++ while Python ends would abort the process."""
        for thread in self._threads:
            thread.join(ERROR_SEND_S)

    def _listen(self, peer: int) -> None:
        try:
            rank, why = json.loads(self._ranks._receive_text(peer))
        except RuntimeError as error:
            rank, why = peer, cause_of(error)
        if why and not self.announced:
            self.announced = True
            if peer:
                self.send_stop(rank, why)
            self._lost(rank, why)


def _wait_for(sent: Sequence[_Sent], limit_s: float | None = None) -> None:
    for work, _ in sent:
        work.wait(*([] if limit_s is None else [timedelta(seconds=limit_s)]))


def came_too_late(rank: int, limit_s: float, whom: Collection[int] | str, doing: str) -> ChannelError:
    """Return the error of a rank that has waited for others."""
    if not isinstance(whom, str):
        whom = f"rank{'s' * (len(whom) > 1)} {', '.join(map(str, sorted(whom)))}"
    return ChannelError(
        f"rank {rank} waited {limit_s:g} s for {whom} to {doing}; look at what the others say, or give them "
        f"longer with timeout="
    )
