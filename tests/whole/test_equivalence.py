"""A configuration in any way against the reference, one thread a rank; and what one process must do."""

from __future__ import annotations

from operator import le

import pytest
import torch
from torch.nn import functional

from benchmark.schedules import with_costs
from pipetrain.data import Draw
from pipetrain.errors import ConfigError
from pipetrain.schedule.actions import Op, has_norms
from pipetrain.schedule.timeline import Costs
from tests.support.cases import SCHEDULES, Case, compare, make_run
from tests.support.thread_ranks import run_in_threads

pytestmark = pytest.mark.slow

MODELS = "model._target_=tests.support.models."
NORM, PLAIN = f"{MODELS}with_norm", f"{MODELS}without_norm"


@pytest.mark.parametrize(
    ("schedule", "window"),  # of four batches an epoch
    [*((schedule, "3") for schedule in SCHEDULES), ("pipedream", "null"), ("v_async", "null")],
)
def test_a_window_of_any_length_and_what_was_held_in_it_is_what_was_simulated(schedule, window):
    case = Case(schedule, 3, (NORM, f"window={window}", "microbatches=3", "partition=even", "epochs=2"))
    state, figures = run_in_threads(case)
    compare(case, state, figures)
    plan = make_run(case).plan
    for stage, record in figures[-1].stages.items():
        seen = (record.activations, record.versions, record.max_staleness)
        if plan.draft.policy:  # the timing decides, up to its bounds
            assert all(map(le, seen, plan.peaks(stage))), stage
        else:
            assert seen == plan.peaks(stage), stage


def recomputing(schedule: str, *words: str, ranks: int = 3) -> Case:
    """Layers that recompute themselves find the version of weights that they had."""
    model = (f"{MODELS}recomputing", "microbatches=3")
    return Case(schedule, ranks, (*model, *words), reference_model="with_norm")


GROUPS = ("optim=adamw", "optim.lr=0.01", "optim.weight_decay=0.3", "optim.groups.late.params='[89].*'")
GROUPS += ("optim.groups.late.lr=0.02", "optim.groups.norms_and_biases.weight_decay=0")
DECAY = "optim.groups.norms_and_biases.weight_decay=0"
UPDATED = (NORM, "partition=even", "epochs=1", "microbatches=3")
CLIPPED = ("clip_grad_norm=0.25", "epochs=1")
REENTRANT = (f"{MODELS}recomputing_reentrant", "microbatches=4", "partition=even", "epochs=1")
UNEVEN_2, UNEVEN_3 = "partition=[1,4,8]", "partition=[1,2,4,6,9]"
LIKE_V_HALF = ("schedule.like=v_half", "buffer_size=1")


@pytest.mark.parametrize(
    "case",
    [
        Case("pipedream", 3, (PLAIN, "microbatches=1", "epochs=2", "data.drop_last=true")),
        Case("pipedream", 8, (NORM, "partition=even", "batch_size=16", "microbatches=8", "buffer_size=1")),
        Case("pipedream_2bw", 3, (PLAIN, "microbatches=5", "epochs=1")),  # which do not divide a batch
        Case("ssp", 3, (NORM, "microbatches=1", "schedule.buffer=[4,4,4]", "batch_size=5", "epochs=2")),
        Case("ssp", 3, (PLAIN, "microbatches=2", "schedule.buffer=[2,5,1]", "batch_size=5", "epochs=1")),
        Case("interleaved_1f1b", 2, (NORM, "microbatches=4", "schedule.virtual=5", "epochs=1")),
        Case("pipedream", 2, (NORM, "label_smoothing=0.1", "lr_schedule=one_cycle")),
        # Optimizers in each form, and groups and averages of the whole model
        recomputing("1f1b", "optim=sgd", "+optim.fused=true"),
        recomputing("pipedream_2bw", "optim=sgd", "+optim.foreach=true"),
        recomputing("pipedream", "optim=adamw", "+optim.fused=true", "optim.lr=0.003"),
        recomputing("fbp", "partition=even", ranks=2),
        Case("pipedream_2bw", 3, REENTRANT, reference_model="without_norm"),
        Case("pipedream", 2, (*UPDATED, *GROUPS)),
        Case("gpipe", 3, (*UPDATED, "ema=0.75", "optim=adamw", "optim.lr=0.01")),
        Case("pipedream", 2, (*UPDATED, "ema=0.75", "window=2")),
        # Orders made for the costs of uneven stages
        Case("v_async", 2, (PLAIN, "window=3", "optim=adamw", UNEVEN_2, *CLIPPED)),
        Case("v_async", 3, (NORM, "microbatches=1", *LIKE_V_HALF, UNEVEN_3, "epochs=2")),
        Case("zb_auto", 3, (NORM, "microbatches=3", "window=2", "schedule.memory=1.5", UNEVEN_3, *CLIPPED)),
        Case("zb_auto", 2, (PLAIN, "schedule.v=false", "optim=adamw", "buffer_size=1", "epochs=1")),
        # Fewer receives ahead for one direction
        Case("zbv", 2, (PLAIN, "buffer_size=[3,1]", "epochs=1")),
        Case("fbp", 3, (PLAIN, "buffer_size=[1,2]", "epochs=1")),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_equals_the_reference(case):
    compare(case, *run_in_threads(case))


@pytest.mark.parametrize(
    ("schedule", "ranks", "words", "norms"),
    [
        ("1f1b", 2, (DECAY, "window=2"), True),
        ("interleaved_1f1b", 2, ("microbatches=4", "window=3"), True),
        ("1f1b", 3, ("clip_grad_norm_over=stage",), False),
        ("pipedream_2bw", 2, (), False),
        ("pipedream", 3, ("clip_grad_norm_over=model",), True),
    ],
)
def test_a_flush_clips_by_the_norm_of_the_model_and_others_each_stage_unless_told(
    schedule, ranks, words, norms
):
    """With a clip that binds, against torch.nn.utils.clip_grad_norm_."""
    case = Case(schedule, ranks, (*UPDATED, *words, "clip_grad_norm=0.25"))
    assert has_norms(make_run(case).plan.window.program) == norms
    state, figures = run_in_threads(case)
    compare(case, state, figures)
    free = [word for word in case.overrides if not word.startswith("clip")]
    unclipped, _ = run_in_threads(Case(schedule, ranks, tuple(free)))
    assert not all(torch.allclose(unclipped[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("schedule", "ranks", "says"),
    [
        ("fbp", 2, "needs a schedule with a fixed order, and fbp decides its order while it runs"),
        ("v_async", 3, "cannot wait for the norm of the model: set clip_grad_norm_over=stage,"),
    ],
)
def test_updates_that_cannot_wait_for_all_stages_are_refused_a_norm_of_the_model(schedule, ranks, says):
    words = (*UPDATED, "clip_grad_norm=1", "clip_grad_norm_over=model", "microbatches=1")
    with pytest.raises(ConfigError, match=says):
        make_run(Case(schedule, ranks, words))


def test_the_order_is_made_for_the_stages_that_the_plan_has_cut_and_again_for_measured_times():
    even, uneven = (make_run(Case("v_async", 3, (NORM, cut))).plan for cut in ("partition=even", UNEVEN_3))
    assert even.by_costs
    assert even.window.program != uneven.window.program
    slow = Costs({(s, op): 1 + (op is Op.I) for s in range(6) for op in (Op.F, Op.I, Op.W)})
    again = with_costs(uneven, slow)
    assert again.costs == slow
    assert again.window.program != uneven.window.program
    assert again.placement == uneven.placement
    fixed = make_run(Case("zbv", 3, (NORM, "partition=even"))).plan
    assert with_costs(fixed, slow).window is fixed.window


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("1f1b", 1), ("interleaved_1f1b", 3), ("pipedream", 3)],
)
def test_one_process_is_plain_sgd_with_accumulation_bit_for_bit(schedule, microbatches):
    words = ("dtype=float32", "data.drop_last=true", "memory_format=contiguous", "epochs=1")
    case = Case(schedule, 1, (NORM, f"microbatches={microbatches}", *words))
    state, _ = run_in_threads(case)
    run = make_run(case)
    model = run.take_network().model
    optimizer = run.optimizer(model.named_parameters())
    rate = run.settings.rate(run.updates)
    for update, batch in enumerate(run.sampler.epoch(0)):  # of one epoch
        for ids in batch:
            x = run.data.train.inputs(ids, Draw(run.settings.seed, 0))
            loss = functional.cross_entropy(model(x), run.data.train.targets(ids, None)) / microbatches
            loss.backward()
        optimizer.param_groups[0]["lr"] = run.lr * rate(update)
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize(("ranks", "in_flight"), [(1, 8), (3, 1)])
def test_fbp_alone_or_with_one_in_flight_is_layer_dist_bit_for_bit(ranks, in_flight):
    words = (NORM, "microbatches=3", "window=null", "epochs=1")
    wanted, epochs = run_in_threads(Case("layer_dist", ranks, words))
    state, figures = run_in_threads(Case("fbp", ranks, (*words, f"schedule.in_flight={in_flight}")))
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    assert [(f.trained, f.evaluated) for f in figures] == [(f.trained, f.evaluated) for f in epochs]
