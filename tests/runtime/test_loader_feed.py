"""The feed from a loader: rank 0 sends each rank the microbatches that it runs."""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipetrain.data.batch import Form
from pipetrain.model.specs import Size, ValueSpec, specs_of
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.loader_feed import MAX_UNWAITED_SENDS, LoaderBatches
from pipetrain.runtime.microbatch_feed import FeedSettings, WindowFeed, WindowPart
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

    def feed(self, rank: int, labels: Any, microbatches: int, first: Any, last: Any) -> WindowFeed:
        """Return a rank's feed of batches of these labels, from which the inputs follow."""
        sizes, weight = [Size(len(batch)) for batch in labels], Classification().weight
        settings = FeedSettings(rank, weight, torch.device("cpu"))
        part = WindowPart(sizes, microbatches, first, last, settings)
        reader = None if rank else reader_of(labels)
        return LoaderBatches(self.of(rank), reader, FORM, lambda reader: None).open(part)


def reader_of(labels: Any) -> Any:
    batches = iter(labels)

    def take(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
        targets = torch.tensor(next(batches))
        assert len(targets) == size.samples
        return targets.unsqueeze(1) + 100.0, targets

    return SimpleNamespace(take=take)


def given(feed: WindowFeed, mb: int) -> list[float]:
    (inputs,) = feed.input(mb)
    values: list[float] = inputs.flatten().tolist()
    return values


def test_the_tensors_of_a_long_window_are_not_all_kept():
    groups = ProcessGroups()
    feed = groups.feed(0, [[1, 2, 3]] * 1000, 2, [0, 0] * 1000, [1, 1] * 1000)
    assert [len(given(feed, mb)) for mb in range(2000)] == [2, 1] * 1000
    assert len(groups.waited) == 1000 - MAX_UNWAITED_SENDS
    feed.finish(1000)
    assert len(groups.waited) == 1000


@pytest.mark.parametrize("last", [[2, 3, 2], [0, 1, 0], [1, 1, 1]])
def test_each_rank_has_the_microbatches_that_it_runs_and_their_shares_of_the_batch(last):
    """Of each batch one label is ignored."""
    groups, first = ProcessGroups(), [0, 1, 0]
    labels = [[7, -100, 2, 5], [-100, 1, 3, 4]]
    feeds = [groups.feed(rank, labels, 3, first * 2, last * 2) for rank in range(4)]
    feeds[0].send_up_to(5)
    inputs = [[107, 0], [102], [105], [0, 101], [103], [104]]
    pieces = [part for batch in labels for part in (batch[:2], batch[2:3], batch[3:])]
    for mb, (piece, values) in enumerate(zip(pieces, inputs, strict=True)):
        assert given(feeds[(first * 2)[mb]], mb) == values
        target = feeds[(last * 2)[mb]].target(mb)
        assert (target.value.tolist(), target.weight, target.share) == (piece, 1, 1 / 3)
    assert not any(groups.posted.values())


def test_the_receives_of_a_window_s_first_tensors_are_posted_before_the_window_begins():
    groups = ProcessGroups()
    groups.feed(1, [[1] * 4, [1] * 3], 2, [1, 0, 1, 0], [0, 1, 0, 1])
    assert groups.expected == [(2, 1), (2,), (2,)]  # inputs, targets, weights


def test_what_another_rank_sends_is_not_awaited_before_it_is_needed():
    """It may be sent only when this rank has gone on."""
    groups = ProcessGroups()
    feed = groups.feed(1, [[1], [2]], 1, [1, 1], [0, 0])
    groups.posted[1, 0].append(torch.ones(1, 1))
    feed.prefetch()
    assert len(groups.posted[1, 0]) == 1
    feed.input(0)
    assert groups.expected == [(1, 1)]


def test_a_rank_that_reads_to_its_next_microbatch_sends_all_batches_before_it():
    """Of batches of one microbatch each in turn. The last ones are of the other rank; one is left out."""
    groups = ProcessGroups()
    feed = groups.feed(0, [[1], [2], [3], [4], [5]], 1, [0, 1, 0, 1, 1], None)
    assert [given(feed, 0), len(groups.posted[1, 0])] == [[101], 0]
    feed.send_up_to(1)
    assert len(groups.posted[1, 0]) == 1  # which may be needed before this rank's next one
    assert [given(feed, 2), len(groups.posted[1, 0])] == [[103], 1]
    feed.finish(4)
    assert (len(groups.posted[1, 0]), len(groups.waited)) == (2, 2)
