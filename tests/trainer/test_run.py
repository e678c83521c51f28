"""The life of a run: where it starts from, what an evaluation counts, and what it leaves alone."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipetrain.errors import TrainingStopped
from pipetrain.model.specs import Size
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.microbatch_feed import FeedSettings, WindowPart
from pipetrain.trainer import run as run_module
from tests.support.cases import Case, Listener, RankRun, Run, make_run, rank_run, state_of
from tests.support.thread_ranks import LocalLinks, Wire, run_in_threads

NORM = "model._target_=tests.support.models.with_norm"


def epochs_for(run: Run, rank: int = 0, size: int = 1, recorder: Listener | None = None) -> RankRun:
    """The epochs of a rank that is not connected to any other."""
    groups = LocalLinks(World(rank, size), Wire(run.plan.placement), Barrier(1), [None] * size)
    return rank_run(run, groups, recorder)  # type: ignore[arg-type]


def initial(case: Case) -> dict[str, Tensor]:
    """The weights of all ranks before the first update."""
    run = make_run(case)
    states = [state_of(epochs_for(run, rank, case.ranks), run).items() for rank in range(case.ranks)]
    return {name: tensor for state in states for name, tensor in state}


def test_initial_weights_are_the_same_on_any_partition_and_any_world():
    first = initial(Case("1f1b", 1, (NORM,)))
    for case in (
        Case("1f1b", 2, (NORM, "partition=[9]")),
        Case("interleaved_1f1b", 2, (NORM, "schedule.virtual=3")),
        Case("gpipe", 10, (NORM, "batch_size=24", "microbatches=8")),
    ):
        state = initial(case)
        assert state.keys() == first.keys(), case
        assert all(torch.equal(state[name], first[name]) for name in first), case
    seeded = initial(Case("1f1b", 1, (NORM, "seed=1")))
    assert not torch.equal(seeded["1.0.weight"], first["1.0.weight"])


# Evaluation: what it counts is held against the reference by tests/whole/test_equivalence.py


class Spoils(nn.Module):
    """Makes nothing of test samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x * math.nan


def spoils() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), Spoils())


def test_an_evaluation_that_is_not_a_number_stops_the_run_unless_it_may_be():
    case = Case("1f1b", 1, ("microbatches=2", "model._target_=tests.trainer.test_run.spoils", "epochs=1"))
    with pytest.raises(TrainingStopped, match="loss of the evaluation after update 4 is nan: the weights"):
        epochs_for(make_run(case)).run()
    assert epochs_for(make_run(replace(case, overrides=(*case.overrides, "on_nan=skip")))).run()


# An epoch


@pytest.mark.parametrize(("schedule", "late"), [("1f1b", [0, 0]), ("pipedream", [1, 0])])
def test_an_epoch_counts_its_samples_what_its_stages_did_and_the_losses_of_its_updates(schedule, late):
    """44 samples in batches of 12: 12, 12, 12, 8."""
    words = (NORM, "microbatches=2", "epochs=2")
    case = Case(schedule, 2, (*words, "log_every=1"))
    rate = make_run(case).settings.rate(8)  # of the peak
    _, epochs = run_in_threads(case)
    _, coarser = run_in_threads(Case(schedule, 2, (*words, "log_every=3")))
    for number, (epoch, coarse) in enumerate(zip(epochs, coarser, strict=True)):
        updates = [4 * number + n for n in (1, 2, 3, 4)]
        assert (epoch.epoch, epoch.samples, epoch.lr) == (number + 1, 44, 0.05 * rate(updates[-1] - 1))
        for stage, record in epoch.stages.items():
            assert 0 < record.busy_s <= epoch.train_s
            assert (record.updates, sum(record.staleness.values())) == (4, 8)
            assert record.max_staleness == late[stage]
        assert epoch.rates == {update: 0.05 * rate(update - 1) for update in updates}
        assert list(epoch.losses) == updates
        *three, last = epoch.losses.values()
        assert epoch.trained["loss"] == pytest.approx((12 * sum(three) + 8 * last) / 44, rel=1e-12)
        assert list(coarse.losses.values()) == pytest.approx([sum(three) / 3, last], rel=1e-12)


def test_no_rank_s_epoch_has_the_time_in_which_rank_0_records_the_one_before(monkeypatch):
    """The clock stands still but while the recorder writes, when another rank could begin."""
    now = [0.0]

    class Slow(Listener):
        def epoch(self, *record: Any) -> None:
            time.sleep(0.2)
            now[0] += 1.0
            super().epoch(*record)

    monkeypatch.setattr(run_module, "time", SimpleNamespace(perf_counter=lambda: now[0], time=time.time))
    _, epochs = run_in_threads(Case("1f1b", 2, (NORM, "microbatches=2", "epochs=3")), Slow())
    assert [(epoch.train_s, epoch.eval_s) for epoch in epochs] == [(0.0, 0.0)] * 3


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 1), ("pipedream", 1), ("1f1b", 2)])
def test_progress_counts_each_update_once_and_each_microbatch_that_a_rank_evaluates_once(schedule, ranks):
    ticks: list[tuple[str, int]] = []
    did: list[list[list[int]]] = []  # by epoch and rank, of these stages

    class Counting(Listener):
        def tick(self, what: str, total: int) -> None:
            ticks.append((what, total))

        def epoch(self, *record: Any) -> None:
            did.append([[*stages] for stages in record[-1]])

    words = (NORM, "microbatches=2", "epochs=2", "batch_size=10", f"replicas={ranks}")
    run_in_threads(Case(schedule, ranks, words, train_samples=40), Counting())
    first = [("epoch 1", 4)] * 4 + [("evaluation 1", 2 // ranks)] * (2 // ranks)
    assert did == [[[0]] * ranks] * 2
    assert ticks == first + [(what.replace("1", "2"), total) for what, total in first]


def test_the_first_rank_reads_inputs_the_last_targets_and_the_middle_nothing():
    run = make_run(Case("1f1b", 3, (NORM,)))
    runs = [run, replace(run, data=None), run]
    count, size = run.task.weight, Size(run.evaluation_sizes[0])
    first, middle, last = (
        epochs_for(runs[rank], rank, 3)
        .state.data.evaluate()
        .open(WindowPart([size], 1, [0], [2], FeedSettings(rank, count, torch.device("cpu"))))
        for rank in range(3)
    )
    samples = torch.arange(run.evaluation_sizes[0])
    (inputs,), none = first.peek()
    assert torch.equal(inputs, run.data.test.inputs(samples, None))
    assert (none, middle.peek()) == (None, (None, None))
    none, target = last.peek()
    assert none is None
    assert torch.equal(target.value, run.data.test.targets(samples, None))
