"""The batches of a pass, dealt to the ranks that run their microbatches.

The ranks of a program each have a loader, and a shuffling one gives each rank other batches. So rank 0 alone
reads it: it tells the others how many samples the batches of a window have, and sends each rank of the first
stage the inputs of its microbatches, and each of the last one their targets. Samples by number have the same
order on every rank: each reads its own, and nothing travels.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from pipetrain.data.reader import Form, Reader
from pipetrain.data.sampling import Sampled, loaded
from pipetrain.errors import TrainingStopped
from pipetrain.model.specs import Size, TensorSpec, Value, ValueSpec, as_tuple
from pipetrain.plan.plan import Plan
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.feed import Sources, TargetRows, cut
from pipetrain.tasks import Task, counted_for

log = logging.getLogger("pipetrain")

EVALUATED_AT_ONCE = 16  # batches of a loader in a window of an evaluation
MAX_UNWAITED_SENDS = 256  # tensors on their way; before rank 0 sends more it waits until the first is taken
INPUTS, TARGETS = 0, 1  # streams of tensors from rank 0
_T = TypeVar("_T")


def counting(
    samples: Sampled, epoch: int, task: Task, groups: ProcessGroups, last: int
) -> list[list[Tensor]]:
    """Return the batches of an epoch in which something counts, alike on all ranks: see Sampled.epoch.

    `last`: the rank of the last stage, which reads samples of a batch until one counts. Raises
    TrainingStopped if nothing does.
    """
    batches, split, draw = samples.epoch(epoch), samples.split, samples.draw(epoch)
    if task.counts_samples or draw is None:
        return batches
    left: list[int] = []
    if groups.world.rank == last:
        assert split is not None, "the rank of the last stage needs the samples"
        for number, batch in enumerate(batches):
            targets = (split.targets(one, draw) for one in torch.split(torch.cat(batch), 1))
            if any(counted_for(task.weight, some) for some in targets):
                left.append(number)
    left = groups.broadcast("the batches in which something counts", left, last)
    skipped = len(batches) - len(left)
    what = f"epoch {epoch + 1}: none of the targets counts in {skipped} of {len(batches)} batches"
    if not left:
        raise TrainingStopped(f"{what}: there is nothing to learn")
    if skipped and groups.world.rank == 0:
        log.warning("pipetrain: %s, which are skipped", what)
    return [batches[number] for number in left]


class Batches(Protocol):
    """The batches of one pass: of a loader, or of samples by number."""

    evaluated_at_once: int | None
    """The batches of a window of an evaluation; None: all."""

    def next(self, window: int | None) -> list[Size] | None:
        """Return the size of each of the next `window` batches (None: of all that are left), on rank 0.

        At the end that is empty; for a loader that never had a batch it is None.
        """

    def open(
        self, sizes: Sequence[Size], microbatches: int, first: Sequence[int], last: Sequence[int] | None
    ) -> Sources:
        """Return the samples of the next window, of batches of these sizes, each cut into so many.

        `first`, `last`: the rank that runs the first and the last stage of each of its microbatches; without
        `last` no targets are read.
        """


def turns(batches: Sequence[int], every: int | None, done: int = 0) -> list[int]:
    """Return the number of each microbatch of a pass by which replicas take turns, after `done` batches.

    `batches`: the microbatches of each. The numbers begin anew with every so many batches; None: never.
    """
    numbers: list[int] = []
    begun = 0
    for batch, microbatches in enumerate(batches, start=done):
        if every and batch % every == 0:
            begun = len(numbers)
        numbers += range(len(numbers) - begun, len(numbers) - begun + microbatches)
    return numbers


class OfNumbers:
    """The batches of an epoch in which something counts, see `counting`, after the first `done`.

    Each rank reads the samples of its own microbatches, by number. All ranks make it.
    """

    evaluated_at_once: int | None = None

    def __init__(
        self,
        samples: Sampled,
        task: Task,
        groups: ProcessGroups,
        plan: Plan,
        epoch: int = 0,
        done: int = 0,
    ) -> None:
        batches = counting(samples, epoch, task, groups, plan.firsts[-1])[done:]
        self._sizes = [Size(sum(map(len, batch))) for batch in batches]
        self._announced = 0
        self._task, self._rank, draw = task, groups.world.rank, samples.draw(epoch)
        window = plan.settings.window if plan.draft.reads_late else 1
        numbers = turns([*map(len, batches)], window if samples.sampler else None, done)

        def own(ranks: Sequence[int]) -> list[bool]:
            return [ranks[number % len(ranks)] == self._rank for number in numbers]

        first, last = own(plan.placement[0]), own(plan.placement[-1])
        self._inputs: Iterator[Value] | None = None
        self._targets: Iterator[TargetRows] | None = None
        if any(first):
            assert samples.split is not None, "this rank needs the samples"
            ids = [of for of, mine in zip(chain.from_iterable(batches), first, strict=True) if mine]
            read = partial(samples.split.inputs, draw=draw)
            self._inputs = loaded(read, ids, samples.workers, samples.timeout)
        if any(last):
            assert samples.split is not None, "this rank needs the samples"
            self._targets = self._rows(batches, iter(last), partial(samples.split.targets, draw=draw))

    def next(self, window: int | None) -> list[Size]:
        sizes = self._sizes[self._announced :][:window]
        self._announced += len(sizes)
        return sizes

    def open(
        self, sizes: Sequence[Size], microbatches: int, first: Sequence[int], last: Sequence[int] | None
    ) -> Sources:
        inputs, targets = self._inputs, None if last is None else self._targets
        batches = [(last or first)[at : at + microbatches] for at in range(0, len(first), microbatches)]
        return Sources(
            inputs and islice(inputs, first.count(self._rank)),
            targets and islice(targets, sum(self._rank in ranks for ranks in batches)),
        )

    def _rows(
        self, batches: Sequence[Sequence[Tensor]], last: Iterator[bool], read: Callable[[Tensor], Value]
    ) -> Iterator[TargetRows]:
        for batch in batches:
            own = [ids for ids in batch if next(last)]
            if own:
                weights = None if len(own) == len(batch) else _weights(self._task, batch, read)
                yield TargetRows(read(torch.cat(own)), weights)


def _weights(task: Task, batch: Sequence[Tensor], read: Callable[[Tensor], Value]) -> list[float]:
    """Return what the microbatches of a batch count for."""
    if task.counts_samples:
        return [float(len(ids)) for ids in batch]
    return [counted_for(task.weight, read(ids)) for ids in batch]


class OfLoader:
    """The batches of a loader; `reader`: on rank 0, which `begin` prepares when it is first asked."""

    evaluated_at_once: int | None = EVALUATED_AT_ONCE

    def __init__(
        self,
        groups: ProcessGroups,
        reader: Reader | None,
        form: Form,
        task: Task,
        begin: Callable[[Reader], object],
    ) -> None:
        self._groups = groups
        self._reader = reader
        self._form = form
        self._task = task
        self._begin: Callable[[Reader], object] | None = begin

    def next(self, window: int | None) -> list[Size] | None:
        assert self._reader is not None, "rank 0 reads the loader"
        begin, self._begin = self._begin, None
        if begin is not None:
            begin(self._reader)
        return self._reader.window(window)

    def open(
        self, sizes: Sequence[Size], microbatches: int, first: Sequence[int], last: Sequence[int] | None
    ) -> Sources:
        rank, pieces = self._groups.world.rank, [size.pieces(microbatches) for size in sizes]
        if self._reader is None:
            inputs = self._inputs_of(pieces, first) if rank in first else None
            rows = self._rows_of(pieces, last) if last and rank in last else None
            return Sources(inputs, rows, ahead=False)
        dealer = _Dealer(self._groups, self._reader, self._task, pieces, first, last)
        targets = dealer.targets() if last and rank in last else None
        return Sources(dealer.inputs(), targets, dealer.deal, dealer.finish)

    # On ranks to which rank 0 sends. The receive of the first tensors is posted, so that they come early.

    def _inputs_of(self, sizes: Sequence[Sequence[Size]], first: Sequence[int]) -> Iterator[Value]:
        mine = (
            size
            for size, rank in zip(chain.from_iterable(sizes), first, strict=True)
            if rank == self._groups.world.rank
        )
        return _awaited(self._expect("inputs", self._form.inputs.of(size), INPUTS) for size in mine)

    def _rows_of(self, sizes: Sequence[Sequence[Size]], last: Sequence[int]) -> Iterator[TargetRows]:
        ranks, own = iter(last), self._groups.world.rank
        dealt = ([(size, next(ranks)) for size in batch] for batch in sizes)
        return _awaited(self._expect_rows(batch) for batch in dealt if own in {rank for _, rank in batch})

    def _expect_rows(self, batch: Sequence[tuple[Size, int]]) -> Callable[[], TargetRows]:
        """Post the receives of a batch's targets and, if they are a part, what its microbatches count for.

        `batch`: the size of each microbatch, and its rank.
        """
        rows = Size(sum(size.samples for size, rank in batch if rank == self._groups.world.rank))
        targets = self._expect("targets", self._form.targets.of(rows), TARGETS)
        if len({rank for _, rank in batch}) == 1:
            return lambda: TargetRows(targets())
        spec = TensorSpec((len(batch),), torch.float64)
        weights = self._groups.expect_tensor("the weights of a batch", spec, 0, TARGETS)
        return lambda: TargetRows(targets(), weights().tolist())

    def _expect(self, what: str, form: ValueSpec, stream: int) -> Callable[[], Value]:
        waits = [self._groups.expect_tensor(f"the {what} of a batch", spec, 0, stream) for spec in form.specs]
        return lambda: form.pack(tuple(wait() for wait in waits))


def _awaited(waits: Iterator[Callable[[], _T]]) -> Iterator[_T]:
    """Yield what each wait returns. The first wait is begun at once, the others when they are asked for."""
    first = next(waits, None)
    return (wait() for wait in ([] if first is None else chain([first], waits)))


class _Dealer:
    """Reads the batches of a window on rank 0, keeps its own microbatches, and sends others to their ranks.

    Whoever needs a microbatch waits until rank 0 reads its batch, and rank 0 may wait for who needs it. So
    its order says where it is to be read, see make_posts.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        reader: Reader,
        task: Task,
        sizes: Sequence[Sequence[Size]],
        first: Sequence[int],
        last: Sequence[int] | None,
    ) -> None:
        self._groups, self._reader, self._task = groups, reader, task
        self._sent: deque[Callable[[], Tensor]] = deque()  # each waits until a tensor is taken
        self._begun = 0  # batches
        self._sizes, self._first = iter(sizes), iter(first)
        self._last = None if last is None else iter(last)
        self._inputs: deque[Value] = deque()  # read, and not yet given
        self._targets: deque[TargetRows] = deque()

    def inputs(self) -> Iterator[Value]:
        return self._own(self._inputs)

    def targets(self) -> Iterator[TargetRows]:
        return self._own(self._targets)

    def _own(self, read: deque[_T]) -> Iterator[_T]:
        """Yield what is read for this rank; read on while there is nothing."""
        while read or self._read():
            if read:
                yield read.popleft()

    def deal(self, batches: int) -> None:
        while self._begun < batches:
            self._read()

    def finish(self, batches: int) -> None:
        self.deal(batches)
        for wait in self._sent:
            wait()

    def _read(self) -> bool:
        """Read a batch; return False at the end of the window."""
        sizes = next(self._sizes, None)
        if sizes is None:
            return False
        self._begun += 1
        inputs, targets = self._reader.take(Size(sum(size.samples for size in sizes)))
        for value in cut(inputs, sizes):
            if (rank := next(self._first)) == self._groups.world.rank:
                self._inputs.append(value)
            else:
                self._send("inputs", as_tuple(value), rank, INPUTS)
        if self._last is not None:
            self._deal(targets, sizes, [next(self._last) for _ in sizes])
        return True

    def _deal(self, targets: Value, sizes: Sequence[Size], ranks: Sequence[int]) -> None:
        """Give each rank of the last stage the targets of its microbatches, and the weights of all."""
        weights: list[float] | None = None
        parts: dict[int, Value] = {ranks[0]: targets}
        if len(set(ranks)) > 1:
            values, form = cut(targets, sizes), ValueSpec.in_batch(targets)
            weights = [counted_for(self._task.weight, value) for value in values]
            for rank in set(ranks):
                own = [as_tuple(value) for value, of in zip(values, ranks, strict=True) if of == rank]
                parts[rank] = form.pack(tuple(map(torch.cat, zip(*own, strict=True))))
        for rank, part in parts.items():
            if rank == self._groups.world.rank:
                self._targets.append(TargetRows(part, weights))
                continue
            more = [] if weights is None else [torch.tensor(weights, dtype=torch.float64)]
            self._send("targets", [*as_tuple(part), *more], rank, TARGETS)

    def _send(self, what: str, tensors: Sequence[Tensor], rank: int, stream: int) -> None:
        for tensor in tensors:
            self._sent.append(
                self._groups.post_tensor(what, tensor.cpu(), rank, stream)
            )  # it may be on a GPU
        while len(self._sent) > MAX_UNWAITED_SENDS:  # of a whole pass they would be all
            self._sent.popleft()()
