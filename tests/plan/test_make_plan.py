"""How a plan is made: what it says, and that what cannot run is refused on paper."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipetrain.config.build import make_schedule
from pipetrain.config.settings import Mode, Settings
from pipetrain.data import Sampler
from pipetrain.errors import ConfigError
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.plan import verification as programs
from pipetrain.plan.make_plan import estimate_model, make_plan
from pipetrain.plan.plan import Plan, Samples, check_targets
from pipetrain.plan.verification import Draft
from pipetrain.schedule.actions import Action, Op, Program, Schedule, has_norms, parse_program
from pipetrain.schedule.automatic import ZeroBubbleAuto
from pipetrain.schedule.memory import GIB, peaks
from pipetrain.schedule.programs import gpipe, one_f_one_b, pipedream
from pipetrain.schedule.simulate import SHOWN
from pipetrain.schedule.timeline import Timeline
from pipetrain.schedule.transforms import with_recompute
from pipetrain.tasks import Regression, Task
from tests.support.cases import options_of
from tests.support.edge_case_models import Lambda
from tests.support.models import shared_statistics, tied, with_norm
from tests.support.plans import profile_of
from tests.support.refusals import refusal

IMAGE = ValueSpec((TensorSpec((3, 32, 32), torch.float32),))
UPDATES, ONE_BATCH = Samples.of([12, 12, 12], [11]), Samples.of([12], [11])


def settings_of(*overrides: str, ranks: int = 2) -> Settings:
    cfg = options_of(["data=digits", "batch_size=12", "microbatches=4", *overrides])
    return Settings.composed(cfg, "1f1b", ranks)


def schedule_of(name: str) -> Schedule:
    return make_schedule(options_of(["data=digits", f"schedule={name}"]))


def plan(
    *overrides: str,
    ranks: int = 2,
    schedule: Schedule = one_f_one_b,
    model: nn.Sequential | None = None,
    samples: Samples = UPDATES,
    **others: Any,
) -> Plan:
    chosen = settings_of("partition=even", *overrides, ranks=ranks)
    estimated = estimate_model(chosen, model or with_norm(), IMAGE, samples)
    return make_plan(Draft.from_settings(chosen, schedule), estimated, **others)


# Windows, and what a plan says


@pytest.mark.parametrize("words", [("partition=profile", "memory_limit=1"), ("partition=[2]",)])
def test_each_length_is_proven_once(monkeypatch, words):
    """Also where stages may recompute, where weights are shared, and where the order is for costs."""
    proven: list[int] = []
    monkeypatch.setattr(programs, "check", lambda program, batches, *more: proven.append(batches))
    given = "partition=[2]" in words
    model = tied() if given else with_norm()
    for schedule in (one_f_one_b, ZeroBubbleAuto(v=False)):
        measured = None if given else profile_of(with_norm(), IMAGE.of(Size(3)), [1.0] * 10)
        made = plan("window=2", *words, schedule=schedule, model=model, profile=measured)
        assert set(made.windows) == {2, 1}
        assert sum(action.op is Op.STEP for action in made.windows[1].program[0]) == 1
    assert proven == [2, 1] * 2


@pytest.mark.parametrize(("schedule", "over"), [(gpipe, "model"), (pipedream, "stage")])
def test_windows_of_all_lengths_are_clipped_alike_also_one_batch_that_reads_nothing_late(schedule, over):
    """On paper as in a run, which may be asked for longer windows later."""
    made = plan("window=1", "clip_grad_norm=1", schedule=schedule)
    assert made.settings.clip_grad_norm_over == over
    assert [has_norms(made.training(n).program) for n in (1, 2, 3)] == [over == "model"] * 3


def test_peaks_and_recomputation_are_those_of_any_window():
    """A window of one batch has nothing to recompute, as each backward follows its forward."""
    words = ("microbatches=1", "recompute=selective")
    made = plan("window=1", *words, ranks=3, schedule=pipedream, samples=Samples.of([12] * 5, [11]))
    assert made.recompute == ["never"] * 3
    made.training(4)
    assert made.recompute == ["selective", "selective", "never"]
    assert [made.peaks(stage) for stage in range(3)] == [(3, 3, 2), (2, 2, 1), (1, 1, 0)]


def test_a_plan_of_the_first_batch_alone_shows_a_window_until_the_first_is_asked_for(monkeypatch):
    """Its layers are estimated for two sizes of a microbatch, from which any other follows."""
    proven: list[int] = []
    monkeypatch.setattr(programs, "check", lambda program, batches, *more: proven.append(batches))
    made = plan("window=null", schedule=pipedream, samples=None)
    assert (made.samples, made.window is made.windows[SHOWN]) == (None, True)
    for batches, windows in ((3, {3}), (2, {3, 2}), (3, {3, 2})):
        assert made.training(batches) is made.windows[batches]
        assert set(made.windows) == windows
    assert proven == [SHOWN, 3, 2]
    assert [made.cut.entering(1, Size(n))[0].shape[0] for n in (3, 4, 7)] == [3, 4, 7]


def test_an_evaluation_is_proven_once_for_each_length(monkeypatch):
    """The first with the plan; each batch is one microbatch, whatever a batch of training is cut into."""
    simulated: list[int] = []
    simulate = programs.simulate

    def counting(program: Program, microbatches: int, **how: Any) -> Timeline:
        simulated.append(microbatches)
        return simulate(program, microbatches, **how)

    monkeypatch.setattr(programs, "simulate", counting)
    made = plan("window=1", samples=Samples.of([12], [11, 11, 5]))
    for batches in (3, 2, 3, 2):
        evaluated = made.evaluation(batches)
        assert [str(action) for action in evaluated.program[1] if action.op is Op.F] == [
            f"1F{mb}@0" for mb in range(batches)
        ]
    assert simulated == [1, 4, 1]
    assert made.timeline() is made.timeline()


def test_slices_cover_the_model_in_order():
    made = plan("partition=[3,5,9]", ranks=4)
    assert [(of.start, of.end) for of in made.cut.slices] == [(0, 3), (3, 5), (5, 9), (9, 10)]
    assert (made.cuts, made.placement) == ([3, 5, 9], [(0,), (1,), (2,), (3,)])
    assert list(made.cut.bounds) == [edge for a, b in pairwise(range(4)) for edge in ((a, b), (b, a))]
    around = plan(schedule=schedule_of("interleaved_1f1b"))  # virtual stages
    assert (around.placement, around.layers_on(1)[-2:]) == ([(0,), (1,), (0,), (1,)], [8, 9])


def test_boundaries_of_every_size_that_will_be_seen_in_training_and_evaluation():
    """43 samples in batches of 12 cut into 4: three of 3 each, then 7 as 2 2 2 1; 11 are evaluated."""
    samples = Samples.of(Sampler(43, 12, 4, seed=0).batch_sizes, [6, 5])
    made = plan("partition=[4,8]", "dtype=float64", ranks=3, model=with_norm().double(), samples=samples)
    seen = [{size.samples for size in cut.specs} for cut in (made.cut, made.evaluation_cut)]
    assert seen == [{3, 2, 1}, {6, 5}]
    for cut in (made.cut, made.evaluation_cut):
        for size in cut.specs:
            entry, fork, flat = (cut.entering(stage, size) for stage in range(3))
            assert entry == (TensorSpec((size.samples, 3, 32, 32), torch.float64),)
            assert fork == flat * 2 == (TensorSpec((size.samples, 4, 4, 4), torch.float64),) * 2
    assert [slice.form.single for slice in made.cut.slices] == [True, False, True]


# By measured times


def by_times(seconds: list[float], *overrides: str, latency_s: float = 1, **arguments: Any) -> Plan:
    """Plan by a profile of layers whose forwards take so long, with messages of a second each."""
    model = arguments.pop("model", with_norm)
    measured = profile_of(model(), IMAGE.of(Size(3)), seconds, latency_s=latency_s)
    return plan("partition=profile", *overrides, model=model(), profile=measured, **arguments)


def test_a_profile_s_cuts_and_costs():
    made = by_times([1, 1, 1, 1, 1, 1, 1, 1, 1, 7])
    assert made.cuts == [8]  # 8 | 1 + 7
    choices = {name: (of.cuts, of.slowest_s) for name, of in made.choices.items()}
    assert (choices["profile"], choices["even"]) == (([8], 4 * (8 + 16 + 2)), ([5], 4 * (11 + 22 + 2)))
    assert made.timeline().busy == [4 * 24, 4 * 24]
    assert (plan().costs, plan().choices) == (None, {})
    assert by_times([9, 1, 1, 1], model=shared_statistics, latency_s=0).cuts == [3]  # not [1]


def test_a_memory_limit_chooses_the_least_recomputation_that_fits():
    """Stages of gpipe, which hold all microbatches: stage by stage, and the plan says why."""

    def cut(limit: int | None, *more: str, schedule: Schedule = gpipe) -> tuple[Plan, list[int]]:
        limits = () if limit is None else (f"memory_limit={limit / GIB!r}",)
        words = ("microbatches=8", "batch_size=24", *limits, *more)
        made = by_times([1.0] * 10, *words, schedule=schedule, samples=Samples.of([24] * 2, [3]))
        return made, [stage.held_bytes for stage in made.choices["profile"].stages]

    (free, most), (selective, less) = cut(None), cut(None, "recompute=selective")
    always, least = cut(None, "recompute=always")
    again = Action(0, Op.R)
    assert always.costs(again) == always.costs(Action(0, Op.F)) == 4 * selective.costs(again)
    assert max(least) < max(less) < max(most)
    spared, between = cut(None, "recompute=except_first_microbatch")
    assert [*spared.recompute] == ["except_first_microbatch"] * 2
    assert sum(a.op is Op.R for actions in spared.window.program for a in actions) == 2 * (8 - 1)
    assert max(least) == max(between) < max(most)
    seconds = [made.choices["profile"].slowest_s for made in (free, spared, always)]
    assert seconds[2] - seconds[0] == 8 / 7 * (seconds[1] - seconds[0]) > 0
    assert [*free.recompute] == [*cut(max(most))[0].recompute] == ["never"] * 2
    assert set(cut(max(most) - 1)[0].recompute) & {"selective", "always"} == {"selective"}
    fitting, _ = cut(max(least))
    assert "always" in fitting.recompute
    assert {a.stage for actions in fitting.window.program for a in actions if a.op is Op.R} == {
        stage for stage, mode in enumerate(fitting.recompute) if mode is not Mode.NEVER
    }
    with pytest.raises(ConfigError, match=r"is too small: .* choose that, recompute=auto, more stages"):
        cut(1)
    # PipeDream's first stage holds two microbatches and two versions, its last one of each.
    one = ("microbatches=1", "batch_size=3", "recompute=never")
    asynchronous, (first, last) = cut(None, *one, schedule=pipedream)
    assert (asynchronous.cuts, first > last) == ([5], True)
    assert [cut(limit, *one, schedule=pipedream)[0].cuts for limit in (first, first - 1)] == [[5], [4]]


def test_a_schedule_of_ones_own_is_given_the_costs_and_may_place_each_r_itself():
    seen = []

    def own(ranks: int, batches: int, microbatches: int, *, costs=None, recompute=()) -> Program:
        seen.append((costs and costs(Action(0, Op.F)), recompute))
        return with_recompute(gpipe(ranks, batches, microbatches), recompute)

    made = by_times([1.0] * 10, "recompute=always", schedule=own)
    assert (seen[0], seen[-1], made.by_costs) == ((None, ()), (5.0, [0, 1]), True)
    assert sum(a.op is Op.R for actions in made.window.program for a in actions) == 8
    made = by_times([1.0] * 10, "recompute=[except_first_microbatch,always]", schedule=own)
    assert [sum(a.op is Op.R for a in actions) for actions in made.window.program] == [3, 4]


# What is refused


FLAT = nn.Sequential(nn.AvgPool2d(8), nn.Flatten())


def tied_by_way_of_another() -> nn.Sequential:
    """Stage 2 would not hear that stage 0 leaves an update out, but stage 1 would."""
    model = nn.Sequential(FLAT, *(nn.Linear(48, 48) for _ in range(4)))
    model[2].weight, model[4].weight = model[1].weight, model[3].weight
    return model


def frozen_in_a_list() -> nn.Sequential:
    """Its second stage would have no numbers for the weight, and no gradient tells."""
    first, other = nn.Linear(48, 48).requires_grad_(False), nn.Linear(48, 48)
    others = [first.weight]
    adding = Lambda(lambda x: other(x) + x @ others[0])
    adding.other, adding.others = other, others
    return nn.Sequential(FLAT, first, adding, nn.Linear(48, 4))


def given_program(*ranks: str) -> Schedule:
    """A schedule of one batch of four microbatches that is written by hand."""
    return lambda ranks_, batches, microbatches: parse_program("\n".join(ranks))


def deadlocking(ranks: int, batches: int, microbatches: int) -> Program:
    """The first rank sends all it has before it takes anything back; the second gives back one by one."""
    (first,), (second,) = gpipe(1, batches, microbatches), one_f_one_b(1, batches, microbatches)
    return [first, [replace(action, stage=1) for action in second]]


ONE_RANK = "0F0@0 0B0@0 0F1@0 0B1@0 0F2@0 0B2@0 0F3@0 0B3@0 0STEP@1"
SECOND_RANK = ONE_RANK.replace("0F", "1F").replace("0B", "1B").replace("0STEP", "1STEP")
INCOMPLETE = given_program(ONE_RANK.replace("0B3@0 ", ""), SECOND_RANK)
TWO_RANKS = given_program(ONE_RANK, ONE_RANK)
TIED = "1.weight is a weight of stages 0 and 1, which step it alike, and "
BY_FBP = {"model": tied(), "schedule": schedule_of("fbp")}
BY_STAGE = "partition=[2] clip_grad_norm=1 clip_grad_norm_over=stage"
CHAINED = {"ranks": 3, "model": tied_by_way_of_another()}
BLOCKED = {"schedule": deadlocking, "samples": Samples.of([48], [11])}


@pytest.mark.parametrize(
    ("words", "arguments", "says"),
    [
        ("partition=[2]", {"model": shared_statistics()}, "of stage 1 shares its 0.3.running_mean with"),
        ("partition=[2]", {"model": frozen_in_a_list()}, "of stage 1 shares its 1.weight with stage 0"),
        (BY_STAGE, {"model": tied()}, f"{TIED}clip_grad_norm_over=stage"),
        ("partition=[2]", BY_FBP, f"{TIED}1f1b decides its order"),
        ("partition=[2,4] on_nan=skip", CHAINED, f"{TIED}some of these share others too"),
        ("", {"schedule": lambda ranks: []}, "schedule 1f1b cannot be made: TypeError: "),
        ("", {"schedule": lambda *sizes: [["0F0"]]}, "schedule 1f1b cannot be made: TypeError: a program is"),
        ("", {"schedule": lambda *sizes: []}, "; let it be a function of (ranks, batches, microb"),
        ("recompute=[always]", {}, "recompute=[always] has modes of 1 stages, and there are 2:"),
        # A backward is missing; a stage is on two ranks; a rank sends all before it takes anything back.
        ("window=1", {"schedule": INCOMPLETE, "samples": ONE_BATCH}, "rank 0 has 0STEP@1"),
        ("window=1", {"schedule": TWO_RANKS, "samples": ONE_BATCH}, "and the next is of microbatch 2"),
        ("batch_size=48 microbatches=12 buffer_size=1", BLOCKED, "deadlock with buffer_size=1: rank 0 at"),
    ],
)
def test_what_cannot_be_planned_is_refused(words, arguments, says):
    assert says in refusal(lambda: plan(*words.split(), **arguments))


def test_what_is_shared_within_a_stage_or_not_trained_or_clipped_by_one_norm_may_be():
    assert plan("partition=[3]", model=shared_statistics()).stages == 2
    assert plan("partition=[3]", model=frozen_in_a_list()).stages == 2
    assert not plan("partition=[2]", model=tied().requires_grad_(False)).cut.ties
    assert len(plan("partition=[2,4]", "on_nan=skip", "clip_grad_norm=1", **CHAINED).cut.ties) == 2
    assert plan("buffer_size=4", schedule=deadlocking, samples=ONE_BATCH).stages == 2  # as many as it sends


def test_fewer_gradients_than_activations_may_be_under_way():
    """A rank holds less by the gradients, or activations, that it posts ahead."""
    plans = {size: plan(f"buffer_size={size}", "microbatches=4") for size in ("2", "[2,1]", "[1,2]", "1")}
    bounds = {size: (made.cut.bounds[0, 1], made.cut.bounds[1, 0]) for size, made in plans.items()}
    assert bounds == {"2": (2, 2), "[2,1]": (2, 1), "[1,2]": (1, 2), "1": (1, 1)}
    held = {size: [stage["total"] for stage in peaks(made.memory())] for size, made in plans.items()}
    assert held["[2,1]"][0] == held["1"][0] < held["2"][0] == held["[1,2]"][0]
    assert "buffer_size [2, 1]" in str(plans["[2,1]"])


def test_an_evaluation_may_hand_on_fewer_tensors_than_training():
    twice = Lambda(lambda x: (x, x) if twice.training else x)
    first = Lambda(lambda x: x if isinstance(x, Tensor) else x[0])
    made = plan("partition=[3]", model=nn.Sequential(FLAT, nn.Linear(48, 10), twice, first))
    assert [len(cut.routes[0].values) for cut in (made.cut, made.evaluation_cut)] == [2, 1]


def test_inputs_and_targets_that_the_run_s_dtype_would_round_are_refused():
    wide = ValueSpec((TensorSpec((3, 32, 32), torch.float64), TensorSpec((4,), torch.int64)), single=False)
    said = refusal(lambda: estimate_model(settings_of("partition=even"), with_norm(), wide, UPDATES))
    assert said.startswith("the inputs are float64[3, 32, 32] + int64[4] a sample, and with dtype=float32")
    made = plan(model=nn.Sequential(FLAT, nn.Linear(48, 4), nn.Linear(4, 2)))
    with pytest.raises(ConfigError, match=r"the targets are float64\[2\] a sample, .* would be rounded"):
        check_targets(made, Regression(), torch.zeros(4, 2, dtype=torch.float64))
    bf16 = plan("precision=bf16", model=nn.Sequential(FLAT, nn.Linear(48, 2), nn.Sigmoid()))
    check_targets(bf16, Task(nn.BCELoss()), torch.zeros(4, 2))  # which takes outputs and targets of one dtype
