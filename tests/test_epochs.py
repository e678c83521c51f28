"""The life of a run: where it starts from, what an evaluation counts, and what it leaves alone."""

from __future__ import annotations

import math
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain.epochs import Epochs
from pipetrain.errors import TrainingStopped
from pipetrain.runtime.ranks import World
from tests.support.cases import Case, Listener, LocalMesh, make_run, run_in_threads, state_of
from tests.support.local import Wire
from tests.support.runs import Run, epochs_of

NORM = "model._target_=tests.support.models.with_norm"


def epochs_for(run: Run, rank: int = 0, size: int = 1, recorder: Listener | None = None) -> Epochs:
    """The epochs of a rank that is not connected to any other."""
    mesh = LocalMesh(World(rank, size), Wire(run.plan.placement), Barrier(1), [None] * size)
    return epochs_of(run, mesh, recorder)  # type: ignore[arg-type]


def alone(*overrides: str, samples: int = 44) -> Case:
    return Case("1f1b", 1, (NORM, "microbatches=2", *overrides), train_samples=samples)


# Where it starts from


def initial(case: Case) -> dict[str, Tensor]:
    """The weights of all ranks before the first update."""
    run = make_run(case)
    states = [state_of(epochs_for(run, rank, case.ranks), run).items() for rank in range(case.ranks)]
    return {name: tensor for state in states for name, tensor in state}


def test_initial_weights_are_the_same_on_any_partition_and_any_world():
    first = initial(Case("1f1b", 1, (NORM,)))
    others = [
        Case("1f1b", 2, (NORM, "partition=[9]")),
        Case("interleaved_1f1b", 2, (NORM, "schedule.virtual=3")),
        Case("gpipe", 10, (NORM, "batch_size=24", "microbatches=8")),
    ]
    for case in others:
        state = initial(case)
        assert state.keys() == first.keys(), case
        assert all(torch.equal(state[name], first[name]) for name in first), case
    seeded = initial(Case("1f1b", 1, (NORM, "seed=1")))
    assert not torch.equal(seeded["1.0.weight"], first["1.0.weight"])


# Evaluation


def evaluated(epochs: Epochs, last: int) -> tuple[int, float, float]:
    epochs.evaluate(0)
    tally = epochs.session.stages[last].take_evaluated()
    return tally.samples, tally.mean_loss, epochs._about.task.values(tally)["acc"]


def plainly(run: Run, epochs: Epochs) -> tuple[float, float]:
    """Loss and accuracy of the whole model on all test samples at once."""
    split, ids = run.data.test, torch.arange(run.facts.test)
    model = run.take_network().model
    model.load_state_dict(state_of(epochs, run))
    model.eval()
    with torch.no_grad():
        output = model(split.inputs(ids, None))
    labels = split.targets(ids, None)
    accuracy = (output.argmax(1) == labels).double().mean().item()
    return functional.cross_entropy(output, labels).item(), accuracy


@pytest.mark.parametrize("batch_size", [4, 64])
def test_an_evaluation_counts_every_sample_and_equals_a_plain_one(batch_size):
    """11 test samples: no batch size here divides them."""
    run = make_run(alone(f"batch_size={batch_size}", "data.drop_last=true", samples=64))
    epochs = epochs_for(run)
    statistics = epochs.session.stages[0].module.get_buffer("1.1.running_mean")
    statistics.fill_(0.3)  # those that are kept are those that are used
    wanted_loss, accuracy = plainly(run, epochs)
    assert evaluated(epochs, 0) == (11, pytest.approx(wanted_loss, rel=1e-12), accuracy)


def test_an_evaluation_changes_nothing_and_comes_out_the_same_again():
    run = make_run(alone("batch_size=4"))
    epochs = epochs_for(run)
    before = state_of(epochs, run)
    random = torch.get_rng_state()
    first = evaluated(epochs, 0)
    assert evaluated(epochs, 0) == first
    after = state_of(epochs, run)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), random)
    assert epochs.session.stages[0].module.training
    assert epochs.session.stages[0].weights.updates == 0


class Spoils(nn.Module):
    """Makes nothing of test samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x * math.nan


def spoils() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), Spoils())


def test_an_evaluation_that_is_not_a_number_stops_the_run_unless_it_may_be():
    words = ["model._target_=tests.test_epochs.spoils", "epochs=1"]
    case = Case("1f1b", 1, ("microbatches=2", *words))
    with pytest.raises(
        TrainingStopped, match="the loss of the evaluation after update 4 is nan: the weights"
    ):
        epochs_for(make_run(case)).run()
    assert epochs_for(make_run(replace(case, overrides=(*case.overrides, "on_nan=skip")))).run()


# An epoch


def test_every_epoch_counts_its_samples_and_what_its_stages_did():
    case = Case("pipedream", 2, (NORM, "microbatches=1", "epochs=2"))
    _, epochs = run_in_threads(case)
    rate = make_run(case).settings.rate(8)  # of the peak
    found = [(figures.epoch, figures.samples, figures.lr) for figures in epochs]
    assert found == [(1, 44, 0.05 * rate(3)), (2, 44, 0.05 * rate(7))]
    for epoch in epochs:
        for stage in (0, 1):
            assert 0 < epoch.stages[stage].busy_s <= epoch.train_s
            assert epoch.stages[stage].updates == 4
            assert sum(epoch.stages[stage].staleness.values()) == 4
    assert [epoch.stages[stage].max_staleness for stage in (0, 1)] == [1, 0]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_the_losses_of_updates_make_up_that_of_the_epoch(schedule):
    """44 samples in batches of 12: 12, 12, 12, 8."""
    case = Case(schedule, 2, (NORM, "microbatches=2", "epochs=2", "log_every=1"))
    _, epochs = run_in_threads(case)
    for number, figures in enumerate(epochs):
        assert list(figures.losses) == [4 * number + n for n in (1, 2, 3, 4)]
        rate = make_run(case).settings.rate(8)  # of the peak
        assert figures.rates == {update: 0.05 * rate(update - 1) for update in figures.losses}
        sizes = (12, 12, 12, 8)
        loss = sum(n * loss for n, loss in zip(sizes, figures.losses.values(), strict=True)) / 44
        assert loss == pytest.approx(figures.trained["loss"], rel=1e-12)
    _, coarser = run_in_threads(Case(schedule, 2, (NORM, "microbatches=2", "epochs=2", "log_every=3")))
    for fine, coarse in zip(epochs, coarser, strict=True):
        losses = list(fine.losses.values())
        assert list(coarse.losses.values()) == pytest.approx([sum(losses[:3]) / 3, losses[3]], rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_progress_counts_each_update_once_and_each_evaluated_microbatch_once(schedule):
    ticks: list[tuple[str, int]] = []

    class Counting(Listener):
        def tick(self, what: str, total: int) -> None:
            ticks.append((what, total))

    case = Case(schedule, 1, (NORM, "microbatches=2", "epochs=2", "batch_size=10"), train_samples=40)
    epochs_for(make_run(case), recorder=Counting()).run()
    first = [("epoch 1", 4)] * 4 + [("evaluation 1", 2)] * 2
    assert ticks == first + [(what.replace("1", "2"), total) for what, total in first]


def test_the_first_rank_reads_inputs_the_last_targets_and_the_middle_nothing():
    run = make_run(Case("1f1b", 3, (NORM,)))
    sources = [epochs_for(run, rank, 3)._passes.evaluate().open([[3]], 2) for rank in range(3)]
    found = [values is not None for source in sources for values in (source.inputs, source.targets)]
    assert found == [True, *[False] * 4, True]
    targets = run.data.test.targets(torch.arange(run.evaluation_sizes[0]), None)
    assert torch.equal(next(sources[2].targets), targets)
    middle = epochs_for(replace(run, data=None), 1, 3)._passes.evaluate().open([[3]], 2)
    assert (middle.inputs, middle.targets) == (None, None)
