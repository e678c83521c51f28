"""Models with skips against the reference: a skip goes straight from the stage that makes it to its user."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from pipetrain.network.network import Made
from tests.support.cases import Case, Saved, compare, make_run, run_in_threads, stages_of
from tests.support.models import STASHED

pytestmark = pytest.mark.slow

SKIPS = ("model._target_=tests.support.models.skipping", "epochs=1")
DROPS = (*SKIPS, "+model.dropout=0.3")


def check(case: Case, tolerance: float = 1e-12) -> None:
    compare(case, *run_in_threads(case), tolerance)


def words(schedule: str) -> tuple[str, ...]:
    """One stage a rank, where that can be chosen."""
    return ("schedule.virtual=1",) if schedule == "interleaved_1f1b" else ()


ONE_OF_A_KIND = ("fbp", "gpipe", "interleaved_1f1b", "pipedream", "pipedream_2bw", "v_half", "zb_h1")
CUTS = {3: "[3,9]", 6: "[2,4,6,9,11]"}


@pytest.mark.parametrize(
    ("schedule", "cuts"),
    [
        *((schedule, CUTS[3 if words(schedule) else stages_of(schedule, 3)]) for schedule in ONE_OF_A_KIND),
        ("pipedream", "[6,11]"),
    ],
)
def test_every_kind_of_schedule_equals_the_reference(schedule, cuts):
    """Four updates, with dropout and BatchNorm; the last batch is shorter, its microbatches uneven."""
    check(Case(schedule, 3, (*DROPS, "microbatches=3", f"partition={cuts}", *words(schedule))))


@pytest.mark.parametrize(("ranks", "cuts"), [(1, [3, 6, 9]), (2, [3, 8, 13])])
def test_skips_between_the_virtual_stages_of_ranks(ranks, cuts):
    virtual = (f"schedule.virtual={(len(cuts) + 1) // ranks}", f"partition={cuts}".replace(" ", ""))
    case = Case("interleaved_1f1b", ranks, (*DROPS, "microbatches=4", *virtual))
    plan = make_run(case).plan
    assert any(
        plan.placement[to] == plan.placement[source] for source, to in plan.cut.edges if to - source > 1
    )
    check(case)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_value_that_two_later_stages_use_gets_the_sum_of_their_gradients(schedule):
    case = Case(schedule, 3, (*SKIPS, "partition=[3,9]", "microbatches=6", "buffer_size=1", "window=2"))
    joined = make_run(case).plan.cut
    assert [Made(STASHED, 0) in part.enters for part in joined.slices] == [False, True, True]
    check(case)


def test_the_cut_changes_neither_what_is_dropped_nor_what_is_learned():
    ended = []
    for ranks, cuts in ((1, "[]"), (2, "[7]"), (3, "[3,9]")):
        plain = (*DROPS, "+model.norm=false", "microbatches=4", f"partition={cuts}")
        state, _ = run_in_threads(Case("1f1b", ranks, plain))
        ended.append(state)
    for state in ended[1:]:
        for name, tensor in ended[0].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12)


def test_a_layer_that_recomputes_drops_the_same_again():
    """On one rank: threads share the generators that a recomputed forward sets."""
    words = (*DROPS, "microbatches=4", "schedule.virtual=3", "partition=[3,9]")
    states = [
        run_in_threads(Case("interleaved_1f1b", 1, (*words, f"+model.recompute={form}")))[0]
        for form in ("''", "plain", "reentrant")
    ]
    for state in states[1:]:
        assert all(state[name].equal(tensor) for name, tensor in states[0].items())


def test_bf16_equals_one_process_in_bf16():
    for cuts in ("[3,9]", "[4,10]"):
        bf16 = ("precision=bf16", "dtype=float32", "memory_format=contiguous", "optim.lr=0.02")
        case = Case("pipedream", 3, (*SKIPS, f"partition={cuts}", "microbatches=3", *bf16))
        plan = make_run(case).plan
        specs = {spec.dtype for stage in (1, 2) for spec in plan.cut.entering(stage, plan.full)}
        assert specs == {torch.bfloat16}
        check(case, 1e-5)


def test_channels_last():
    layout = ("memory_format=channels_last", "microbatches=3", "partition=[3,9]")
    check(Case("pipedream", 3, (*SKIPS, *layout)), 1e-10)


def test_compiled_stages_draw_as_others_do(monkeypatch):
    # All of torch.compile but the last step, the generated C++, which takes a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    cuts = ("schedule.virtual=2", "partition=[6]", "microbatches=2", "compile=true", "data.drop_last=true")
    check(Case("interleaved_1f1b", 1, (*DROPS, *cuts), 24), 1e-10)


def test_a_skipped_update_leaves_no_trace():
    spoilt = ("model._target_=tests.support.models.skipping_struck", "on_nan=skip", "epochs=2")
    case = Case("1f1b", 3, (*spoilt, "partition=[3,9]", "microbatches=4"))
    state, figures = run_in_threads(case)
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert sum(record.skipped for record in figures[-1].stages.values()) == 0
    assert sum(record.skipped for record in figures[0].stages.values()) == 3
    compare(case, state, figures)


# Over a codec, and from a checkpoint

LOSSY = ("codec.forward=int8", "codec.forward.error_feedback=true", "codec.backward=topk")


@pytest.mark.parametrize(("codec", "more"), [("Same", ""), ("Half", ".dtype=bf16")])
def test_a_codec_is_used_on_every_route(codec, more):
    module = "tests.support.codecs" if codec == "Same" else "pipetrain.codec"
    both = [f"codec.{direction}._target_={module}.{codec}" for direction in ("forward", "backward")]
    case = Case("1f1b", 3, (*SKIPS, "partition=[3,9]", "microbatches=3", *both))
    state, figures = run_in_threads(case)
    if codec == "Same":
        compare(case, state, figures)
    records = dict(sorted(figures[0].stages.items()))
    assert all(record.codec_s > 0 for record in records.values())
    tensor = 44 * 64 * 8  # one of an epoch, [44, 4, 4, 4] in float64
    # What the first stage makes goes to both others; the second hands three tensors on.
    assert [record.raw_bytes // tensor for record in records.values()] == [2, 3 + 1, 3 + 1]
    ratio = 1 if codec == "Same" else 4
    assert all(record.raw_bytes == ratio * record.bytes_sent for record in records.values())


def test_what_codecs_owe_goes_on_from_a_checkpoint(tmp_path):
    case = Case("pipedream", 3, (*DROPS, "partition=[3,9]", "microbatches=3", "window=1", *LOSSY), 48)
    wanted, _ = run_in_threads(case, saved=Saved(tmp_path))
    source = sorted((tmp_path / "checkpoints").glob("update-*"))[1]
    state, _ = run_in_threads(case, source=source)
    assert all(state[name].equal(tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(("ranks", "cuts"), [(2, "[6]"), (3, "[5,11]")])
def test_a_checkpoint_goes_on_on_another_cut(ranks, cuts, tmp_path):
    case = Case("1f1b", 3, (*DROPS, "partition=[3,9]", "microbatches=3", "window=1"), 48)
    wanted, _ = run_in_threads(case, saved=Saved(tmp_path))
    source = sorted((tmp_path / "checkpoints").glob("update-*"))[1]
    other = replace(case, ranks=ranks, overrides=(*case.overrides, f"partition={cuts}"))
    state, _ = run_in_threads(other, source=source)
    for name, tensor in wanted.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12)
