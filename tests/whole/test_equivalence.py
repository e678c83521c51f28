"""More cases against the reference, in one process over the local channel; and what one process must do."""

from __future__ import annotations

from operator import le

import pytest
import torch
from torch.nn import functional

from pipetrain.data import Draw
from tests.support.cases import SCHEDULES, Case, compare, make_run, run_in_threads

pytestmark = pytest.mark.slow

NORM = "model._target_=tests.support.models.with_norm"
PLAIN = "model._target_=tests.support.models.without_norm"
RECOMPUTING = "model._target_=tests.support.models.recomputing"
REENTRANT = "model._target_=tests.support.models.recomputing_reentrant"


def _check(case: Case, tolerance: float = 1e-12) -> None:
    compare(case, *run_in_threads(case), tolerance)


@pytest.mark.parametrize(
    ("schedule", "window"),
    [
        *((schedule, 3) for schedule in SCHEDULES),  # of four batches an epoch
        *((schedule, "null") for schedule in ("1f1b", "pipedream", "pipedream_2bw", "fbp", "v_async")),
    ],
)
def test_windows_of_any_length(schedule, window):
    _check(Case(schedule, 3, (NORM, f"window={window}", "microbatches=3", "epochs=2")))


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("pipedream", 1), ("pipedream", 12), ("gpipe", 6), ("1f1b", 12)],
)
def test_any_number_of_microbatches(schedule, microbatches):
    overrides = (PLAIN, f"microbatches={microbatches}", "epochs=2", "data.drop_last=true")
    _check(Case(schedule, 3, overrides))


def test_microbatches_that_do_not_divide_a_batch():
    _check(Case("pipedream_2bw", 3, (PLAIN, "microbatches=5", "epochs=1")))


@pytest.mark.parametrize("virtual", [1, 5])
def test_virtual_stages(virtual):
    _check(Case("interleaved_1f1b", 2, (NORM, "microbatches=4", f"schedule.virtual={virtual}", "epochs=2")))


@pytest.mark.parametrize(
    ("schedule", "form"),
    [("1f1b", "fused"), ("pipedream", ""), ("pipedream_2bw", "foreach")],
)
def test_sgd_with_momentum_in_each_form(schedule, form):
    optim = ("optim=sgd", f"+optim.{form}=true") if form else ("optim=sgd",)
    _check(Case(schedule, 3, (RECOMPUTING, "microbatches=3", *optim), reference_model="with_norm"))


@pytest.mark.parametrize(("schedule", "form"), [("pipedream", "fused"), ("pipedream_2bw", "foreach")])
def test_adamw_in_each_form(schedule, form):
    overrides = (RECOMPUTING, "microbatches=3", "optim=adamw", f"+optim.{form}=true", "optim.lr=0.003")
    _check(Case(schedule, 3, overrides, reference_model="with_norm"))


def test_a_layer_that_recomputes_itself_finds_the_version_that_a_policy_chose():
    """As do those above with a fixed order."""
    overrides = (RECOMPUTING, "microbatches=4", "partition=even")
    _check(Case("fbp", 2, overrides, reference_model="with_norm"))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_the_reentrant_form_of_recomputing():
    overrides = (REENTRANT, "microbatches=4", "partition=even")
    _check(Case("pipedream_2bw", 2, overrides, reference_model="without_norm"))


def test_label_smoothing_and_one_cycle():
    _check(Case("pipedream", 2, (NORM, "label_smoothing=0.1", "lr_schedule=one_cycle")))


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("1f1b", 1), ("interleaved_1f1b", 3), ("pipedream", 3), ("fbp", 3)],
)
def test_one_process_is_plain_sgd_with_accumulation_bit_for_bit(schedule, microbatches):
    case = Case(
        schedule,
        1,
        (
            NORM,
            f"microbatches={microbatches}",
            "dtype=float32",
            "data.drop_last=true",
            "memory_format=contiguous",
        ),
    )
    state, _ = run_in_threads(case)
    run = make_run(case)
    model = run.take_network().model
    optimizer = run.optimizer(model.named_parameters())
    rate, update = run.settings.rate(run.updates), 0
    for epoch in range(run.settings.epochs):
        for batch in run.sampler.epoch(epoch):
            for ids in batch:
                x = run.data.train.inputs(ids, Draw(run.settings.seed, epoch))
                y = run.data.train.targets(ids, None)
                loss = functional.cross_entropy(model(x), y) / microbatches
                loss.backward()
            optimizer.param_groups[0]["lr"] = run.settings.lr * rate(update)
            optimizer.step()
            optimizer.zero_grad()
            update += 1
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize(("ranks", "in_flight"), [(1, 8), (3, 1)])
def test_fbp_alone_or_with_one_in_flight_is_layer_dist_bit_for_bit(ranks, in_flight):
    words = (NORM, "microbatches=3", "window=null")
    wanted, epochs = run_in_threads(Case("layer_dist", ranks, words))
    state, figures = run_in_threads(Case("fbp", ranks, (*words, f"schedule.in_flight={in_flight}")))
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    assert [(f.trained, f.evaluated) for f in figures] == [(f.trained, f.evaluated) for f in epochs]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_was_held_is_what_was_simulated(schedule):
    case = Case(schedule, 4, (PLAIN, "microbatches=4", "partition=even", "epochs=1"))
    _, figures = run_in_threads(case)
    plan = make_run(case).plan
    for stage, record in figures[-1].stages.items():
        seen = (record.activations, record.versions, record.max_staleness)
        if plan.policy:  # the timing decides, up to its bounds
            assert all(map(le, seen, plan.peaks(stage))), (schedule, stage)
        else:
            assert seen == plan.peaks(stage), (schedule, stage)
