"""torch.distributed between threads: process groups of NCCL, see `nccl`, and of gloo.

gloo sends without a copy, when its receive is posted; where a rank's wait has timed out, its connections of
that group are closed, and what others wait for on them fails. What travels over it carries what its sender
knows of the others' rehearsals.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GroupMember
from torch.utils._python_dispatch import _disable_current_modes

from pipetrain.runtime.comm import collectives as ranks
from pipetrain.runtime.comm import process_groups as links
from pipetrain.runtime.comm import transfer_watch as watch
from pipetrain.runtime.comm.transfer_watch import Deadline
from tests.support.pretended_gpu.nccl import Clock, Group, Nccl, Waits, Work
from tests.support.pretended_gpu.streams import here
from tests.support.pretended_gpu.tensors import is_tagged


class GlooGroup:
    """A process group of gloo."""

    def __init__(self, name: str, ranks: Collection[int]) -> None:
        self.name, self.ranks = name, frozenset(ranks)
        self.closed: set[int] = set()  # the ranks whose connections are
        # By source, destination and tag: what was sent, and how many receives were posted.
        self.sends: defaultdict[Any, list[tuple[Tensor, Clock]]] = defaultdict(list)
        self.receives: Counter[Any] = Counter()
        self.sums: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
        self.told: Counter[int] = Counter()

    def __repr__(self) -> str:
        return self.name


class Distributed:
    """torch.distributed for `ranks` threads; `told`: see Waits.running."""

    def __init__(self, ranks: int, exclusive: bool = False) -> None:
        self.waits = Waits()
        self.nccl = Nccl(ranks, self.waits, exclusive)
        self._made: list[tuple[str, Group | GlooGroup]] = []  # in the one order of all ranks
        self._asked: Counter[int] = Counter()  # by rank, how many of them
        self.groups: defaultdict[int, list[Any]] = defaultdict(list)
        """Those that each rank has and has not destroyed, in order; its default one is the first."""
        self.ranks = ranks
        self.awaited: list[str] = []
        """What is said where one of the waits that have a deadline takes too long."""

    def new_group(
        self, ranks: Sequence[int] | None = None, timeout: Any = None, backend: str = "gloo"
    ) -> Any:
        rank, members = here("rank"), [*(range(self.ranks) if ranks is None else ranks)]
        with self.waits.changed:
            number, what = self._asked[rank], f"{backend} {members}"
            self._asked[rank] += 1
            if number == len(self._made):
                name = f"group {number} ({what})"
                nccl = backend == "nccl"
                self._made.append(
                    (what, Group(name, members, self.nccl) if nccl else GlooGroup(name, members))
                )
        expected, group = self._made[number]
        assert what == expected, f"rank {rank} makes {what} where another one makes {expected}"
        if rank not in members:
            return GroupMember.NON_GROUP_MEMBER
        self.groups[rank].append(group)
        return group

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Work:
        if isinstance(group, Group):
            return self.nccl.isend(tensor, dst, group)
        rank = self._begin(tensor, group, dst)
        route, known = (rank, dst, tag), self.nccl.rehearsed[rank].copy()
        with self.waits.changed:
            number = len(group.sends[route])
            group.sends[route].append((tensor, known))
            self.waits.changed.notify_all()
        return _GlooWork(self.waits, group, dst, lambda: group.receives[route] > number)

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Work:
        if isinstance(group, Group):
            return self.nccl.irecv(tensor, src, group)
        rank = self._begin(tensor, group, src)
        route = src, rank, tag
        with self.waits.changed:
            number = group.receives[route]
            group.receives[route] += 1
            self.waits.changed.notify_all()

        def take() -> None:
            values, known = group.sends[route][number]
            tensor.copy_(values)
            self.nccl.rehearsed[rank] |= known

        return _GlooWork(self.waits, group, src, lambda: len(group.sends[route]) > number, take)

    def all_reduce(self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        if isinstance(group, Group):
            work = self.nccl.all_reduce(tensor, group)
        else:
            rank = self._begin(tensor, group)
            told, number = group.sums[group.told[rank]], group.told[rank]
            with self.waits.changed:
                group.told[rank] = number + 1
                told[rank] = tensor.clone()
                self.waits.changed.notify_all()
            work = _GlooWork(
                self.waits,
                group,
                None,
                lambda: told.keys() == group.ranks,
                lambda: tensor.copy_(torch.stack([told[rank] for rank in sorted(told)]).sum(0)),
            )
        return work if async_op else work.wait()

    def _begin(self, tensor: Tensor, group: GlooGroup, peer: int | None = None) -> int:
        if peer is not None and peer not in group.ranks:
            raise ValueError(f"Global rank {peer} is not part of group {group}")
        assert not is_tagged(tensor), f"No backend type associated with {tensor.device}"
        assert tensor.is_contiguous(), "Tensors must be contiguous"
        if group.closed & {here("rank"), peer}:
            raise RuntimeError("Connection closed by peer")
        return here("rank")  # type: ignore[no-any-return]

    # Its ends

    def destroy(self, group: Any = None) -> None:
        mine = self.groups[here("rank")]
        for one in [*mine] if group in (None, mine[0]) else [group]:
            mine.remove(one)
            if isinstance(one, Group):
                self.nccl.destroy(one)
            else:
                self.close(one)

    def abort(self, group: Group) -> None:
        self.nccl.abort(group)
        self.groups[here("rank")].remove(group)

    def close(self, group: GlooGroup) -> None:
        """Close a rank's connections, as to destroy a group does where nothing refers to it."""
        with self.waits.changed:
            group.closed.add(here("rank"))
            self.waits.changed.notify_all()

    def kill(self) -> None:
        """Do what the system does where a rank's process is killed."""
        for group in self.groups.pop(here("rank")):
            if isinstance(group, GlooGroup):
                self.close(group)

    @contextmanager
    def patched(self) -> Iterator[None]:
        def world(*_: Any) -> None:
            assert not self.groups[here("rank")], "trying to initialize the default process group twice!"
            self.new_group()

        def mark(deadline: Deadline, event: Any) -> None:
            self.awaited += [str(failed("")) for failed in deadline._awaited]
            deadline._awaited.clear()

        class Default:
            WORLD = property(lambda _: self.groups[here("rank")][0])

        functions: dict[str, Any] = {
            "new_group": self.new_group,
            "isend": self.isend,
            "irecv": self.irecv,
            "send": lambda *args, **words: self.isend(*args, **words).wait(),
            "recv": lambda *args, **words: self.irecv(*args, **words).wait(),
            "all_reduce": self.all_reduce,
            "destroy_process_group": self.destroy,
            "is_initialized": lambda: bool(self.groups[here("rank")]),
            "group": Default(),
            "get_rank": lambda: here("rank"),
            "get_world_size": lambda: self.ranks,
            "get_process_group_ranks": lambda group: sorted(group.ranks),
        }
        with ExitStack() as stack:
            for name, value in functions.items():
                stack.enter_context(patch.object(dist, name, value))
            stack.enter_context(patch.object(links, "make_group", world))
            stack.enter_context(patch.object(links, "choose_interface", lambda world: None))
            stack.enter_context(patch.object(links, "_abort_process_group", self.abort))
            for name in ("atexit", "signal"):
                stack.enter_context(patch.object(links, name, Mock()))
            stack.enter_context(patch.dict(os.environ))
            for module in (links, ranks, watch):
                stack.enter_context(patch.object(module, "Thread", self.waits.thread()))
            # What hangs is noticed at once, and by no time.
            stack.enter_context(patch.object(Deadline, "mark", mark))
            stack.enter_context(patch.object(Deadline, "_exit_if_blocked", lambda deadline: None))
            yield


class _GlooWork(Work):
    """A transfer of gloo, with a peer or, without one, with all ranks."""

    def __init__(
        self, waits: Waits, group: GlooGroup, peer: int | None, matched: Any, take: Any = lambda: None
    ) -> None:
        super().__init__(lambda: None)
        self._waits, self._group, self._peer = waits, group, peer
        self._matched, self._take = matched, take

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._over:
            return True
        me, group = here("rank"), self._group
        others = group.ranks if self._peer is None else {me, self._peer}
        if timeout is not None and timeout <= timedelta(milliseconds=1) and not self._matched():
            with self._waits.changed:
                group.closed.add(me)
                self._waits.changed.notify_all()
            raise RuntimeError("Timed out waiting 1ms for recv operation to complete")
        what = f"rank {self._peer} over {group}"
        self._waits.wait(lambda: self._matched() or bool(group.closed & others), what)
        if not self._matched():
            closed = "Application timeout caused pair closure" if me in group.closed else None
            raise RuntimeError(closed or "Connection closed by peer")
        with self._waits.changed, _disable_current_modes():
            self._take()
        self._over = True
        return True
