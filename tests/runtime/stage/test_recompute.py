"""Forwards that are run again: the same weights, statistics and figures to the last bit, and less memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipetrain.errors import ActionFailed, TrainingStopped
from pipetrain.model.tracing.trace import trace
from pipetrain.runtime.stage.recompute import Recompute
from pipetrain.runtime.stage.stage import Stage
from pipetrain.schedule.actions import Op
from tests.support.cases import Case, compare, make_run
from tests.support.edge_case_models import Attending
from tests.support.thread_ranks import run_in_threads
from tests.support.traced_comparison import example, gradients, whole

MODES = ("always", "except_first_microbatch", "selective")
BF16 = ("precision=bf16", "dtype=float32", "optim.lr=0.02")
ONE = ("schedule.virtual=2", "microbatches=3", "partition=[3]")  # two stages on one rank


def model(name: str) -> str:
    return f"model._target_=tests.support.{name if '.' in name else f'edge_case_models.{name}'}"


SKIPS = (model("models.skipping"), "+model.dropout=0.3", "window=null", "microbatches=3")
EVERYTHING = (model("everything"), "partition=even", "microbatches=3")


def recomputed(case: Case) -> list[str]:
    """The stages that recompute something."""
    program = make_run(case).plan.window.program
    return sorted({str(a.stage) for actions in program for a in actions if a.op is Op.R})


def _spares_the_first(case: Case) -> bool:
    """Whether the first microbatch of each batch alone is not run again, where others of the stage are."""
    plan = make_run(case).plan
    m, programs = plan.settings.microbatches, [window.program for window in plan.windows.values()]
    numbers = {a.mb % m for program in programs for actions in program for a in actions if a.op is Op.R}
    return numbers == {*range(1, m)}


def equal(schedule: str, ranks: int, *words: str, modes: tuple[str, ...] = MODES) -> None:
    """Train with and without recomputing."""
    wanted, figures = run_in_threads(Case(schedule, ranks, ("epochs=1", *words)))
    for mode in modes:
        case = Case(schedule, ranks, ("epochs=1", *words, f"recompute={mode}"))
        assert recomputed(case)
        assert mode != MODES[1] or _spares_the_first(case)
        state, found = run_in_threads(case)
        assert state.keys() == wanted.keys()
        assert [name for name, tensor in wanted.items() if not torch.equal(state[name], tensor)] == [], mode
        assert [(one.trained, one.evaluated) for one in found] == [
            (one.trained, one.evaluated) for one in figures
        ]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("schedule", "ranks", "words"),
    [
        # Dropout inside of skips, and BatchNorm; asynchronous ones over the version of the forward.
        ("interleaved_1f1b", 2, SKIPS),
        ("v_async", 3, SKIPS),
        ("zbv", 2, SKIPS),
        ("v_half", 2, (*EVERYTHING, "window=null")),
        ("pipedream", 3, (*EVERYTHING, *BF16, "memory_format=channels_last")),
        ("pipedream", 3, (*EVERYTHING, "+model.struck=true", "on_nan=skip")),
        ("interleaved_1f1b", 1, (model("scaled"), *ONE)),  # by numbers drawn from Python and NumPy
    ],
    ids=str,
)
def test_every_kind_of_schedule_layer_and_number_to_the_last_bit(schedule, ranks, words):
    equal(schedule, ranks, *words, modes=MODES[:2] if words is SKIPS else MODES)


def test_a_compiled_stage(monkeypatch):
    # All of torch.compile but the last step, the generated C++, which takes a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    words = (model("models.dropping"), *ONE, "compile=true", "data.drop_last=true")
    equal("interleaved_1f1b", 1, *words, modes=("always",))


@pytest.mark.parametrize("kept", [True, False])
def test_results_that_are_overwritten_by_way_of_another_view_are_made_again(kept):
    """torch makes a product over three dimensions in two, and returns a view with a version of its own."""
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
    x = torch.randn(2, 3, 4)

    def forward() -> Tensor:
        y = first(x)
        made: Tensor = second(y + x if kept else y.add_(x))
        return made

    wanted = torch.autograd.grad(forward().sum(), [first.weight, second.weight])
    recompute = Recompute([], keep=True)
    with recompute.forward():
        recompute.end([forward()])
    assert len(recompute.tensors) == 1 + kept
    with recompute.recomputing():
        found = torch.autograd.grad(forward().sum(), [first.weight, second.weight])
    assert all(map(torch.equal, found, wanted))


def test_a_traced_model_keeps_dear_results_and_draws_the_same():
    model = Attending()
    part, x = whole(trace(model, example((3, 32, 32)))), torch.rand(2, 3, 32, 32)

    def forward() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [*part(x)]

    torch.manual_seed(1)
    wanted = gradients(model, forward())
    torch.manual_seed(1)
    recompute = Recompute([], keep=True)
    with recompute.forward():
        recompute.end(forward())
    assert len(recompute.tensors) == 4  # products
    with recompute.recomputing():
        found = gradients(model, forward())
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


def test_a_policy_recomputes_what_it_has_decided_and_a_forward_that_its_backward_follows_saves_all():
    case = Case("fbp", 3, (model("models.with_norm"), "microbatches=3", "epochs=1", "recompute=always"))
    state, figures = run_in_threads(case)
    compare(case, state, figures)
    again = [a.stage for program in figures.ran for actions in program for a in actions if a.op is Op.R]
    assert sorted(again) == [stage for stage in (0, 1) for _ in range(4 * 3)]
    spared = replace(case, overrides=(*case.overrides[:-1], "recompute=except_first_microbatch"))
    state, figures = run_in_threads(spared)
    compare(spared, state, figures)
    numbers = [a.mb % 3 for program in figures.ran for actions in program for a in actions if a.op is Op.R]
    assert sorted(numbers) == [1] * 8 + [2] * 8
    stages = {name: Case(name, 3, ("microbatches=3", "recompute=always")) for name in ("layer_dist", "1f1b")}
    assert {name: recomputed(case) for name, case in stages.items()} == {"layer_dist": [], "1f1b": ["0", "1"]}


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages"),
    [("gpipe", 2, 2), ("zbv", 2, 4), ("interleaved_1f1b", 2, 4), ("pipedream", 2, 2), ("fbp", 2, 2)],
)
def test_the_first_microbatch_of_each_batch_is_run_once(monkeypatch, schedule, ranks, stages):
    """Counted where a stage runs its layers. Others run twice, but not where B follows F at once."""
    ran: Counter[tuple[int, int]] = Counter()  # stage, number of a microbatch in its batch
    first, again = Stage.forward, Stage.recompute

    def forward(stage, mb, *arguments, **options):
        ran[stage.index, mb % 3] += stage.module.training
        return first(stage, mb, *arguments, **options)

    def recompute(stage, mb, read):
        ran[stage.index, mb % 3] += 1
        again(stage, mb, read)

    monkeypatch.setattr(Stage, "forward", forward)
    monkeypatch.setattr(Stage, "recompute", recompute)
    words = (model("models.with_norm"), "microbatches=3", "epochs=1", "partition=even")
    run_in_threads(Case(schedule, ranks, (*words, "recompute=except_first_microbatch")))
    batches = 4
    assert [ran[stage, 0] for stage in range(stages)] == [batches] * stages
    assert {ran[stage, number] for stage in range(stages - 1) for number in (1, 2)} == {2 * batches}


@pytest.mark.parametrize(
    ("layer", "error", "says"),
    [
        ("counting", TrainingStopped, "stage 0 made other outputs when it ran the forward of microbatch 0"),
        ("differentiating", ActionFailed, "a layer differentiates its own forward, "),
    ],
)
def test_a_layer_that_cannot_be_run_again_is_refused(layer, error, says):
    """One depends on something else than what is the same again."""
    case = Case("interleaved_1f1b", 1, (model(layer), *ONE, "recompute=selective"))
    with pytest.raises(error, match=f"{says}.*recompute=never"):
        run_in_threads(case)
