"""The batches of a pass, dealt to the ranks that run their microbatches."""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipetrain.data.reader import Form
from pipetrain.model.specs import Size, ValueSpec, specs_of
from pipetrain.runtime.batches import MAX_UNWAITED_SENDS, OfLoader, turns
from pipetrain.runtime.comm.ranks import World
from pipetrain.tasks import Classification

FORM = Form(ValueSpec.in_batch(torch.zeros(2, 1)), ValueSpec.in_batch(torch.zeros(2, dtype=torch.int64)))


class ProcessGroups:
    """The links of several ranks: what rank 0 posts is taken in order on each stream."""

    def __init__(self) -> None:
        self.posted: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.waited: list[int] = []
        self.expected: list[tuple[int, ...]] = []

    def of(self, rank: int) -> Any:
        def post(what: str, tensor: torch.Tensor, to: int, stream: int = 0) -> Any:
            self.posted[to, stream].append(tensor)
            return lambda: self.waited.append(to)

        def expect(what: str, spec: Any, source: int, stream: int = 0) -> Any:
            self.expected.append(spec.shape)

            def take() -> torch.Tensor:
                tensor = self.posted[rank, stream].popleft()
                assert tuple(specs_of([tensor])) == (spec,)
                return tensor

            return take

        return SimpleNamespace(world=World(rank, 4), post_tensor=post, expect_tensor=expect)


def reader(*labels: list[int]) -> Any:
    batches = iter(labels)

    def take(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
        targets = torch.tensor(next(batches))
        assert len(targets) == size.samples
        return targets.unsqueeze(1) + 100.0, targets

    return SimpleNamespace(take=take)


def test_the_tensors_of_a_long_window_are_not_all_kept():
    groups = ProcessGroups()
    batches = OfLoader(groups.of(0), reader(*[[1, 2, 3]] * 1000), FORM, Classification(), lambda of: None)
    inputs, targets, _, finish, _ = batches.open([Size(3)] * 1000, 2, [0, 0] * 1000, [1, 1] * 1000)
    assert [len(some) for some in inputs] == [2, 1] * 1000
    assert (len(groups.waited), targets) == (1000 - MAX_UNWAITED_SENDS, None)
    finish(1000)
    assert len(groups.waited) == 1000


@pytest.mark.parametrize("last", [[2, 3, 2], [0, 1, 0], [1, 1, 1]])
def test_each_rank_has_the_microbatches_that_it_runs_and_the_weights_of_the_batch(last):
    groups, first = ProcessGroups(), [0, 1, 0]
    labels = [[7, -100, 2, 5], [-100, 1, 3, 4]]
    window = [Size(4)] * 2, 3, first * 2, last * 2
    sources = {
        rank: OfLoader(
            groups.of(rank), None if rank else reader(*labels), FORM, Classification(), lambda of: None
        ).open(*window)
        for rank in range(4)
    }
    inputs = {rank: [some.flatten().tolist() for some in of or ()] for rank, (of, *_) in sources.items()}
    pieces = [[107, 0], [102], [105], [0, 101], [103], [104]]
    assert [len(some) for some in inputs[0]] == [2, 1, 2, 1]
    assert inputs[1] == [pieces[1], pieces[4]]
    assert inputs[2] == inputs[3] == []
    rows = {rank: list(of or ()) for rank, (_, of, *_) in sources.items()}
    weights = [None, None] if len(set(last)) == 1 else [[1, 1, 1], [1, 1, 1]]
    for rank in range(4):
        own = [number for number, of in enumerate(last) if of == rank]
        assert [some.weights for some in rows[rank]] == (weights if own else [])
        expected = [
            [v for number in own for v in [batch[:2], batch[2:3], batch[3:]][number]] for batch in labels
        ]
        assert [some.targets.tolist() for some in rows[rank]] == (expected if own else [])


def test_the_receives_of_a_window_s_first_tensors_are_posted_before_the_window_begins():
    groups = ProcessGroups()
    batches = OfLoader(groups.of(1), None, FORM, Classification(), lambda of: None)
    batches.open([Size(4), Size(3)], 2, [1, 0, 1, 0], [0, 1, 0, 1])
    assert groups.expected == [(2, 1), (2,), (2,)]  # inputs, targets, weights


def test_a_rank_that_reads_to_its_next_microbatch_sends_all_batches_before_it():
    """Of batches of one microbatch each in turn. The last ones are of the other rank; one is left out."""
    groups = ProcessGroups()
    batches = OfLoader(groups.of(0), reader([1], [2], [3], [4], [5]), FORM, Classification(), lambda of: None)
    inputs, _, deal, finish, _ = batches.open([Size(1)] * 5, 1, [0, 1, 0, 1, 1], None)
    assert [next(inputs).item(), len(groups.posted[1, 0])] == [101, 0]
    deal(2)
    assert len(groups.posted[1, 0]) == 1  # which may be needed before this rank's next one
    assert [next(inputs).item(), len(groups.posted[1, 0])] == [103, 1]
    finish(4)
    assert (len(groups.posted[1, 0]), len(groups.waited)) == (2, 2)


def test_microbatches_take_turns_in_each_batch_or_in_each_window():
    assert turns([3, 3], every=1) == [0, 1, 2, 0, 1, 2]
    assert turns([2] * 5, every=2) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert turns([2] * 3, every=2, done=1) == [0, 1, 0, 1, 2, 3]
    assert turns([1] * 4, every=None) == [0, 1, 2, 3]
