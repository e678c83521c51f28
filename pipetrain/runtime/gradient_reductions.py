"""The sums over ranks before an update: of replicas' gradients, those of shared weights, and norms.

Each replica of a stage has the gradient of its own microbatches. REDUCE adds them up to that of the batch, as
each microbatch's loss is a share of the batch's already. The batch's last backward on a rank starts the sums
of what it has finished, in buckets, and REDUCE those of the rest. Then the first replica is the leader.

Each stage has its own copy of a weight that layers in several stages share. Before an update the stages add
up their gradients of it. So every copy makes the same step, with the same optimizer state, and the copies
stay equal to the last bit. A rank contributes one sum for all its stages, and goes on until an update needs
the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from pipetrain.runtime.mailbox import Mailbox
from pipetrain.runtime.stage.stage import Stage
from pipetrain.schedule.actions import ALL, Action, Op, Placement, Tie

WAITING = frozenset({Op.TIE, Op.NORM, Op.STEP})  # for sums over ranks
_Key = tuple[Tie, int]  # with the version that an update makes


class Sums:
    """The sums over stages in one window."""

    def __init__(self, stages: Mapping[int, Stage], mail: Mailbox) -> None:
        self._stages, self._channel = stages, mail.channel
        self._placement, self._rank = mail.placement, mail.rank
        self._names: dict[Tie, list[str]] = {tie: [] for tie in mail.cut.ties}  # in one order on all ranks
        for name, tie in sorted(mail.cut.shared.items()):
            self._names[tie].append(name)
        self._buckets = {  # by stage with replicas
            index: stage.store.buckets() for index, stage in stages.items() if len(self._placement[index]) > 1
        }
        self._overlapped: set[int] = set()  # the stages whose buckets have been started
        self._shares: dict[_Key, dict[int, Tensor]] = {}  # by stage
        self._sums: dict[_Key, Tensor] = {}  # of a tie whose stages are all here
        self._started: dict[_Key, None] = {}  # in order
        self.norms: dict[int, Tensor] = {}
        """By version the norm of the whole gradient, where norms are summed."""

    def overlapping(self, action: Action) -> AbstractContextManager[None]:
        """Return a context in which a batch's last backward on this rank starts the sums of full buckets."""
        stage, full = self._stages[action.stage], self._buckets.get(action.stage, [])[:-1]
        if not full or stage.weights.weighs:  # a correction changes the whole gradient first
            return nullcontext()
        self._overlapped.add(action.stage)
        start = partial(self._channel.all_reduce, (action.stage,), early=True)
        return stage.store.reduce_when_finished(action.read, full, start)

    def reduce(self, action: Action) -> None:
        """End a stage's batch; start the sum of the rest of its gradient over its replicas."""
        stage, tie = self._stages[action.stage], (action.stage,)
        store = stage.store
        stage.reduce()
        if action.stage not in self._buckets:
            return
        *full, rest = self._buckets[action.stage]
        for bucket in () if action.stage in self._overlapped else full:  # no backward has sent it
            self._channel.all_reduce(tie, torch.cat(store.flat_gradients(bucket)), early=True)
        self._overlapped.discard(action.stage)
        ranks = self._placement[action.stage]
        observed = stage.partial_sums(ranks.index(self._rank), len(ranks))
        if sent := [*store.flat_gradients(rest), *store.counts(store.names, stage.skipped_update), *observed]:
            self._started[tie, action.version] = None
            self._channel.all_reduce(tie, torch.cat(sent))

    def _wait_for_replicas(self, index: int) -> None:
        """Wait for the sums of a stage's gradient, which become the gradient."""
        stage, parts = self._stages[index], dict[str, Tensor]()
        store = stage.store
        counts = len(store.names) or int(stage.skipped_update is not None)
        for bucket in self._buckets[index]:
            numbers = self._channel.reduced((index,))
            part, rest = store.parts(bucket, numbers)
            parts |= part
            stage.on_sums(numbers[: len(numbers) - len(rest[counts:])])
        store.set_gradients(store.names, parts, rest[:counts], copies=False)
        stage.on_reduced(rest[counts:])

    def reduce_tied(self, action: Action) -> None:
        stage = self._stages[action.stage]
        for tie in self._ties_of(action):
            names, store = self._names[tie], stage.store
            gradient = torch.cat([*store.flat_gradients(names), *store.counts(names, stage.skipped_update)])
            leads = self._is_leader(action.stage)  # the other replicas have the same gradient
            self._start(tie, action, gradient if leads else torch.zeros_like(gradient))

    def reduce_norm(self, action: Action) -> None:
        """Start the sum of norms, each at its own place: it is the same on every rank, to the last bit."""
        square = self._stages[action.stage].gradient_norm().double() ** 2
        numbers = square.new_zeros(len(self._placement))
        if self._is_leader(action.stage):
            numbers[action.stage] = square
        self._start(ALL, action, numbers)

    def _is_leader(self, stage: int) -> bool:
        return self._placement[stage][0] == self._rank

    def _start(self, tie: Tie, action: Action, numbers: Tensor) -> None:
        """Start the sum over the ranks of a tie, with the last stage of it on this rank."""
        key = tie, action.version
        shares = self._shares.setdefault(key, {})
        shares[action.stage] = numbers
        self._started[key] = None
        local_stages = self._local_stages(tie)
        if len(shares) < len(local_stages):
            return
        del self._shares[key]
        total = sum((shares[stage] for stage in local_stages[1:]), shares[local_stages[0]])
        if all(ranks == (self._rank,) for ranks in self._ranks(tie)):
            self._sums[key] = total
        else:
            self._channel.all_reduce(tie, total)

    def wait(self, action: Action, before_wait: Callable[[], None]) -> None:
        """Wait for what an action needs of other stages, once; `before_wait` is called before."""
        ties: list[Tie] = [(action.stage,)]
        if action.op is not Op.TIE:
            ties += self._ties_of(action)
        if action.op is Op.STEP:
            ties.append(ALL)
        pending = [(tie, action.version) for tie in ties if (tie, action.version) in self._started]
        for key in pending:
            before_wait()
            del self._started[key]
            if key[0] == (action.stage,):
                self._wait_for_replicas(action.stage)
                continue
            sums = self._sums.pop(key) if key in self._sums else self._channel.reduced(key[0])
            if key[0] == ALL:
                self.norms[action.version] = sums.sum().sqrt()
                continue
            for stage in map(self._stages.__getitem__, self._local_stages(key[0])):
                names = self._names[key[0]]
                stage.store.set_gradients(names, *stage.store.parts(names, sums))
                stage.on_sums(sums)

    def tensors(self) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield the tensors that wait for others, with the stages of their sum."""
        for (tie, _), shares in self._shares.items():
            yield from (((stage,), numbers) for stage, numbers in shares.items() if tie)
        yield from ((tie, sums) for (tie, _), sums in self._sums.items() if tie)

    def _ties_of(self, action: Action) -> list[Tie]:
        return [tie for tie in self._names if action.stage in tie]

    def _local_stages(self, tie: Tie) -> list[int]:
        return [stage for stage in tie or range(len(self._placement)) if stage in self._stages]

    def _ranks(self, tie: Tie) -> Placement:
        return [self._placement[stage] for stage in tie] if tie else self._placement
