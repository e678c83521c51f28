"""Models with skips against the reference: a skip goes straight from the stage that makes it to its user."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from pipetrain.model.network import ValueId
from tests.support.cases import Case, compare, make_run
from tests.support.models import STASHED
from tests.support.thread_ranks import Saved, run_in_threads

pytestmark = pytest.mark.slow

SKIPS = ("model._target_=tests.support.models.skipping", "epochs=1")
DROPS = (*SKIPS, "+model.dropout=0.3")


TWO_CUTS, FIVE_CUTS = "partition=[3,9]", "partition=[2,4,6,9,11]"
BF16 = ("precision=bf16", "dtype=float32", "memory_format=contiguous", "optim.lr=0.02", "microbatches=3")


def dropping(schedule: str, ranks: int, *words: str) -> tuple[Case, float]:
    return Case(schedule, ranks, (*DROPS, "microbatches=3", *words)), 1e-12


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        *(dropping(name, 3, TWO_CUTS) for name in ("fbp", "pipedream_2bw", "zb_h1")),
        dropping("v_half", 3, FIVE_CUTS),
        dropping("pipedream", 3, "partition=[6,11]"),
        # With skips between the virtual stages of a rank
        dropping("interleaved_1f1b", 1, "schedule.virtual=4", "partition=[3,6,9]"),
        dropping("interleaved_1f1b", 2, "microbatches=4", "schedule.virtual=2", "partition=[3,8,13]"),
        # A value that two later stages use gets the sum of their gradients
        *(dropping(name, 3, TWO_CUTS, "buffer_size=1", "window=2") for name in ("1f1b", "pipedream")),
        (Case("pipedream", 3, (*SKIPS, "memory_format=channels_last", "microbatches=3", TWO_CUTS)), 1e-10),
        (Case("pipedream", 3, (*SKIPS, TWO_CUTS, *BF16)), 1e-5),
        (Case("pipedream", 3, (*SKIPS, "partition=[4,10]", *BF16)), 1e-5),
    ],
    ids=str,
)
def test_equals_the_reference(case, tolerance):
    """Four updates, with dropout and BatchNorm; the last batch is shorter, its microbatches uneven."""
    compare(case, *run_in_threads(case), tolerance)
    plan = make_run(case).plan
    joined, rank_of = plan.cut, plan.placement
    narrow = {spec.dtype for stage in (1, 2) for spec in joined.entering(stage, plan.settings.full)}
    assert (narrow == {torch.bfloat16}) == (BF16[0] in case.overrides)
    if TWO_CUTS in case.overrides:
        assert [ValueId(STASHED, 0) in part.enters for part in joined.slices] == [False, True, True]
    if case.schedule == "interleaved_1f1b":
        assert any(rank_of[to] == rank_of[source] and to > source + 1 for source, to in joined.edges)


def test_neither_the_cut_nor_recomputing_changes_what_is_dropped_and_learned():
    """Layers that recompute on one rank: threads share the generators that a recomputed forward sets."""
    plain = (*DROPS, "+model.norm=false", "microbatches=4")
    cuts = [("1f1b", 1, "[]"), ("1f1b", 2, "[7]"), ("1f1b", 3, "[3,9]")]
    cut = [run_in_threads(Case(name, ranks, (*plain, f"partition={of}")))[0] for name, ranks, of in cuts]
    words = (*plain, "schedule.virtual=3", "partition=[3,9]")
    recomputed = [
        run_in_threads(Case("interleaved_1f1b", 1, (*words, f"+model.recompute={form}")))[0]
        for form in ("''", "plain", "reentrant")
    ]
    for state in (*cut[1:], recomputed[0]):
        torch.testing.assert_close(state, cut[0], rtol=1e-12, atol=1e-12)
    for state in recomputed[1:]:
        assert all(state[name].equal(tensor) for name, tensor in recomputed[0].items())


def test_compiled_stages_draw_as_others_do(monkeypatch):
    # All of torch.compile but the last step, the generated C++, which takes a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    words = ("schedule.virtual=2", "partition=[6]", "microbatches=2", "compile=true", "data.drop_last=true")
    case = Case("interleaved_1f1b", 1, (*DROPS, *words), 24)
    compare(case, *run_in_threads(case), 1e-10)


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
    module = "tests.support.models" if codec == "Same" else "pipetrain.codec"
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


DROPPED = Case("pipedream", 3, (*DROPS, "partition=[3,9]", "microbatches=3", "window=1"), 48)


def test_a_checkpoint_goes_on_with_what_codecs_owe_and_on_another_cut(tmp_path):
    flushed = replace(DROPPED, schedule="1f1b")
    owing = replace(DROPPED, overrides=(*DROPPED.overrides, *LOSSY))
    other = replace(flushed, ranks=2, overrides=(*DROPPED.overrides, "partition=[6]"))
    for case, again, tolerance in ((owing, owing, 0.0), (flushed, other, 1e-12)):
        folder = tmp_path / case.schedule
        wanted, _ = run_in_threads(case, saved=Saved(folder))
        source = sorted((folder / "checkpoints").glob("update-*"))[1]
        state, _ = run_in_threads(again, source=source)
        torch.testing.assert_close(state, wanted, rtol=tolerance, atol=tolerance)
