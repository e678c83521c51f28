"""Batches in which nothing counts are left out of an epoch, as a plain loop would skip them."""

from __future__ import annotations

import pytest
import torch

from pipetrain.data import Sampler
from pipetrain.errors import TrainingStopped
from tests.support.cases import Case, compare, make_run
from tests.support.thread_ranks import Saved, run_in_threads

_SAMPLER = Sampler(44, 12, 2, seed=0)
IGNORED = tuple(torch.cat([*_SAMPLER.epoch(0)[1], *_SAMPLER.epoch(2)[3]]).tolist())  # the last one is short
WORDS = ("epochs=3", "microbatches=2", "optim.momentum=0.9", "optim.weight_decay=0.1")


def a_case(schedule: str, ranks: int, *words: str) -> Case:
    return Case(schedule, ranks, (*WORDS, *words), ignored=IGNORED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        a_case("1f1b", 2, "microbatches=4"),
        a_case("pipedream", 2, "window=null", "microbatches=1"),
        a_case("pipedream_2bw", 2, "window=2"),
        a_case("fbp", 3, "window=null"),
    ],
    ids=str,
)
def test_an_epoch_is_that_of_the_batches_that_count(case, caplog, tmp_path):
    """With the statistics of a BatchNorm, a rate that changes, and the same state after a stop."""
    saved = Saved(tmp_path)
    state, epochs = run_in_threads(case, saved=saved)
    compare(case, state, epochs)
    assert [max(figures.losses) for figures in epochs] == [3, 7, 10]
    rate = make_run(case).settings.rate(12)
    assert [figures.lr for figures in epochs] == [0.05 * rate(update) for update in (2, 6, 9)]
    assert [record.getMessage() for record in caplog.records if "counts" in record.getMessage()] == [
        f"pipetrain: epoch {epoch}: none of the targets counts in 1 of 4 batches, which are skipped"
        for epoch in (1, 3)
    ]
    if case.schedule == "fbp":  # which decides by what has arrived
        return
    for source in sorted((tmp_path / "checkpoints").glob("update-*"))[1:6:3]:
        again, resumed = run_in_threads(case, source=source)
        assert all(torch.equal(again[name], tensor) for name, tensor in state.items()), source.name
        assert [f.lr for f in resumed] == [f.lr for f in epochs]


def test_an_epoch_in_which_nothing_counts_at_all_is_named():
    case = Case("1f1b", 1, ignored=tuple(range(44)))
    with pytest.raises(TrainingStopped, match="epoch 1: none of the targets counts in 4 of 4 batches"):
        run_in_threads(case)
