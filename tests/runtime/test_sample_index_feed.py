"""The feed of samples by number: each rank reads what it runs, window after window of one pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from pipetrain.data.sampling import Sampled, Sampler
from pipetrain.data.splits import Tensors
from pipetrain.model.specs import Size
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.microbatch_feed import FeedSettings, WindowPart
from pipetrain.runtime.sample_index_feed import SampleIndexBatches, turns
from pipetrain.tasks import Classification


def test_replicas_read_their_microbatches_of_each_window_and_share_the_batch():
    """Of batches of 4, 4 and 2 samples; even samples do not count."""
    ids = torch.arange(10)
    split = Tensors(ids * 1.0, torch.where(ids % 2 == 1, ids, -100))
    sampler, task = Sampler(10, 4, 2, seed=0), Classification()
    plan: Any = SimpleNamespace(
        settings=SimpleNamespace(window=1),
        draft=SimpleNamespace(reads_late=False),
        placement=[(0, 1), (1, 0)],
        firsts=[0, 1],
    )
    batches = sampler.epoch(0)
    counted = [sum(split.targets(mb, None).ge(0).sum().item() for mb in batch) for batch in batches]
    assert all(counted)
    passes = []
    for rank in range(2):
        groups: Any = SimpleNamespace(world=World(rank, 2), broadcast=lambda what, item, source: [0, 1, 2])
        samples = Sampled(split, sampler.batch_sizes, sampler, 0, 0, 60.0)
        passes.append(SampleIndexBatches(samples, task, groups, plan))
    assert passes[0].next(None) == [Size(4), Size(4), Size(2)]
    for window in ([0, 1], [2]):
        sizes, first = [Size(sum(map(len, batches[n]))) for n in window], [0, 1] * len(window)
        last = [1, 0] * len(window)
        feeds = [
            of.open(WindowPart(sizes, 2, first, last, FeedSettings(rank, task.weight, torch.device("cpu"))))
            for rank, of in enumerate(passes)
        ]
        for mb, (number, part) in enumerate((n, ids) for n in window for ids in batches[n]):
            assert torch.equal(feeds[first[mb]].input(mb)[0], part * 1.0)
            target = feeds[last[mb]].target(mb)
            assert torch.equal(target.value, split.targets(part, None))
            assert target.weight == (part % 2).sum()
            assert target.share == target.weight / counted[number]


def test_microbatches_take_turns_in_each_batch_or_in_each_window():
    assert turns([3, 3], period=1) == [0, 1, 2, 0, 1, 2]
    assert turns([2] * 5, period=2) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert turns([2] * 3, period=2, done=1) == [0, 1, 0, 1, 2, 3]
    assert turns([1] * 4, period=None) == [0, 1, 2, 3]
