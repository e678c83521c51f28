"""Models with skips against the reference: a skip goes straight from the stage that makes it to its user."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipetrain.network.network import Made
from tests.support.cases import Case, Saved, compare, make_run, run_in_threads
from tests.support.models import STASHED

pytestmark = pytest.mark.slow

SKIPS = ("model._target_=tests.support.models.skipping", "epochs=1")
DROPS = (*SKIPS, "+model.dropout=0.3")


ONE = "schedule.virtual=1"  # stage a rank
TWO_CUTS, FIVE_CUTS = "partition=[3,9]", "partition=[2,4,6,9,11]"
BF16 = ("precision=bf16", "dtype=float32", "memory_format=contiguous", "optim.lr=0.02", "microbatches=3")


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        *(
            (
                Case(name, 3, (*DROPS, "microbatches=3", TWO_CUTS, *[ONE] * (name == "interleaved_1f1b"))),
                1e-12,
            )
            for name in ("fbp", "interleaved_1f1b", "pipedream_2bw", "zb_h1")
        ),
        (Case("v_half", 3, (*DROPS, "microbatches=3", FIVE_CUTS)), 1e-12),
        (Case("pipedream", 3, (*DROPS, "microbatches=3", "partition=[6,11]")), 1e-12),
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
    narrow = {spec.dtype for stage in (1, 2) for spec in plan.cut.entering(stage, plan.settings.full)} == {
        torch.bfloat16
    }
    assert narrow == (BF16[0] in case.overrides)


@pytest.mark.parametrize(("ranks", "cuts"), [(1, [3, 6, 9]), (2, [3, 8, 13])])
def test_skips_between_the_virtual_stages_of_ranks(ranks, cuts):
    virtual = (f"schedule.virtual={(len(cuts) + 1) // ranks}", f"partition={cuts}".replace(" ", ""))
    case = Case("interleaved_1f1b", ranks, (*DROPS, "microbatches=4", *virtual))
    plan = make_run(case).plan
    within = [
        to
        for source, to in plan.cut.edges
        if plan.placement[to] == plan.placement[source] and to > source + 1
    ]
    assert within
    compare(case, *run_in_threads(case))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_value_that_two_later_stages_use_gets_the_sum_of_their_gradients(schedule):
    case = Case(schedule, 3, (*SKIPS, TWO_CUTS, "microbatches=6", "buffer_size=1", "window=2"))
    joined = make_run(case).plan.cut
    assert [Made(STASHED, 0) in part.enters for part in joined.slices] == [False, True, True]
    compare(case, *run_in_threads(case))


def test_the_cut_changes_neither_what_is_dropped_nor_what_is_learned():
    ended = []
    for ranks, cuts in ((1, "[]"), (2, "[7]"), (3, "[3,9]")):
        plain = (*DROPS, "+model.norm=false", "microbatches=4", f"partition={cuts}")
        state, _ = run_in_threads(Case("1f1b", ranks, plain))
        ended.append(state)
    for state in ended[1:]:
        torch.testing.assert_close(state, ended[0], rtol=1e-12, atol=1e-12)


def test_a_layer_that_recomputes_drops_the_same_again():
    """On one rank: threads share the generators that a recomputed forward sets."""
    words = (*DROPS, "microbatches=4", "schedule.virtual=3", "partition=[3,9]")
    states = [
        run_in_threads(Case("interleaved_1f1b", 1, (*words, f"+model.recompute={form}")))[0]
        for form in ("''", "plain", "reentrant")
    ]
    for state in states[1:]:
        assert all(state[name].equal(tensor) for name, tensor in states[0].items())


def test_compiled_stages_draw_as_others_do(monkeypatch):
    # All of torch.compile but the last step, the generated C++, which takes a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    cuts = ("schedule.virtual=2", "partition=[6]", "microbatches=2", "compile=true", "data.drop_last=true")
    case = Case("interleaved_1f1b", 1, (*DROPS, *cuts), 24)
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


DROPPED = Case("pipedream", 3, (*DROPS, "partition=[3,9]", "microbatches=3", "window=1"), 48)


def continued(case: Case, other: Case, folder: Path) -> list[dict[str, Tensor]]:
    """Return the end of a case, and that of another one which goes on from its second checkpoint."""
    wanted, _ = run_in_threads(case, saved=Saved(folder))
    source = sorted((folder / "checkpoints").glob("update-*"))[1]
    state, _ = run_in_threads(other, source=source)
    return [wanted, state]


def test_what_codecs_owe_goes_on_from_a_checkpoint(tmp_path):
    case = replace(DROPPED, overrides=(*DROPPED.overrides, *LOSSY))
    wanted, state = continued(case, case, tmp_path)
    assert all(state[name].equal(tensor) for name, tensor in wanted.items())


def test_a_checkpoint_goes_on_on_another_cut(tmp_path):
    case = replace(DROPPED, schedule="1f1b")
    other = replace(case, ranks=2, overrides=(*case.overrides, "partition=[6]"))
    torch.testing.assert_close(*continued(case, other, tmp_path), rtol=1e-12, atol=1e-12)
