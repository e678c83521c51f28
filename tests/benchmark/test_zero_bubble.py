"""Suites `zero-bubble`, `split` and `timelines`: the machine, the bounds, the rows and the page."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmark import split, timelines, zero_bubble
from benchmark.contestants import Ours, Plain, TorchPipeline
from benchmark.paced import SAMPLE, Pace, products
from benchmark.worlds import run_world
from benchmark.zero_bubble import WAYS, best_cut, bound, copied, costs, prepared
from pipetrain.plan.profile import LayerTime
from pipetrain.schedule.actions import parse_action
from pipetrain.schedule.timeline import Row, Span, Timeline
from tests.support.deadlines import DEADLINE_S

# The machine


def test_a_product_takes_its_time_in_forward_and_in_each_half_of_the_backward():
    x, weight = torch.rand(2, 3, 4, requires_grad=True), nn.Parameter(torch.rand(4, 4))
    with Pace(0.0) as pace:
        y = F.linear(x, weight)
        assert pace.products == 1
        torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        assert pace.products == 2
        torch.autograd.grad(y, weight, torch.ones_like(y))
        assert pace.products == 3
    torch.testing.assert_close(y, F.linear(x, weight))
    assert pace.products == 3  # torch's own kernel is back


def test_the_first_stage_needs_the_gradient_of_its_product_too():
    model, x = products(2), torch.rand(1, *SAMPLE)
    for stage, count in zip(model, (2, 2), strict=True):
        y = stage(x.requires_grad_() if stage is model[1] else x)
        with Pace(0.0) as pace:
            y.sum().backward()
        assert pace.products == count


# Bounds, at F = I = W = 1 of a whole stage


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("1f1b", 33),
        ("zb_h1", 27),
        ("zb_h2, 4 batches a window", 99 / 4),
        ("zbv", 25.5),
        ("zbv, 4 batches a window", 97.5 / 4),
    ],
)
def test_the_bound_of_four_ranks_and_eight_microbatches(name, slots):
    job, one_s = prepared(WAYS[name], 4, 8, 1.0)
    assert one_s == (0.5 if WAYS[name].v else 1.0)
    assert bound(job.plan, one_s) == pytest.approx(slots)


def layer(forward_s: float) -> LayerTime:
    times = {"forward_s": forward_s, "backward_s": 2 * forward_s, "input_s": forward_s, "weight_s": forward_s}
    nothing = {field.name: 0 for field in fields(LayerTime)}
    return LayerTime(**{**nothing, **times, "name": "layer"})


def test_the_cut_is_the_fastest_on_paper_for_the_order():
    """Of a V each rank gets a half of the work: 1 + 2 and 2 + 1; in two stages, 3 and 3."""
    layers = [layer(1), layer(2), layer(2), layer(1)]
    assert best_cut(prepared(WAYS["1f1b"], 2, 4, 1.0)[0].plan, layers) == [2]
    assert best_cut(prepared(WAYS["zbv"], 2, 4, 1.0)[0].plan, layers) == [1, 2, 3]
    cost = costs([layers[:2], layers[2:]])
    actions = map(parse_action, ("0F0@0", "0I0@0", "0W0@0", "1I0@0", "1B0@0"))
    assert list(map(cost, actions)) == [3, 0, 6, 3, 6]


# Training alike


def turns(mesh, say):
    """Return the losses of everybody's batch, where this rank knows them."""
    losses = {}
    for name in ("zb_h1", "zbv"):
        job, _ = prepared(WAYS[name], 2, 4, 0.0)
        plain = Plain(f"plain, {name}", copied(job), mesh, 2)
        rival = TorchPipeline(WAYS[name].rival.removeprefix("torch "), copied(job), mesh, 2)
        ours = Ours(name, job, mesh, 2)
        for one in (ours, rival, plain):
            one.run()
            losses[one.name] = one.losses
    return losses


@pytest.mark.processes
def test_ours_and_theirs_train_what_a_plain_loop_does():
    by_rank = run_world(turns, 2, print, deadline=DEADLINE_S)
    losses = {name: max((rank[name] for rank in by_rank), key=len) for name in by_rank[0]}
    for name in ("zb_h1", "zbv"):
        plain = losses[f"plain, {name}"]
        assert len(plain) == 2
        assert losses[name] == pytest.approx(plain, rel=1e-6)
        assert losses[WAYS[name].rival] == pytest.approx(plain, rel=1e-6)


# Rows


def test_everybody_is_held_against_its_bound_our_1f1b_and_torchs():
    series = {
        "1f1b, m = 8": [1.0],
        "torch 1F1B, m = 8": [1.0],
        "zb_h1, m = 8": [0.8],
        "torch InterleavedZeroBubble, m = 8": [0.84],
        "v_min, m = 8": [1.25],
    }
    rows = zero_bubble.make_rows("zero bubble, 4 ranks", series, dict.fromkeys(series, 0.78))
    by_name = {row.contestant: row for row in rows}
    found = by_name["zb_h1, m = 8"]
    assert found.ratios == pytest.approx({"of bound": 0.975, "x 1f1b": 1.25, "x torch's": 1.05})
    assert [verdict.target for verdict in found.verdicts] == [
        "of bound >= 0.97",
        "x torch's >= 1.00",
        "x 1f1b >= 1.12",
    ]
    assert all(verdict.met for verdict in found.verdicts)
    assert [verdict.met for verdict in by_name["v_min, m = 8"].verdicts] == [False]
    assert by_name["torch 1F1B, m = 8"].verdicts == []


# The split backward


def test_the_halves_of_a_small_stage_are_the_whole_to_the_last_bit():
    case = split.Case(
        lambda: nn.Sequential(nn.Identity(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
        lambda: torch.rand(4, 8),
        1,
        4,
    )
    found = split.measure(case, rounds=2, repeats=1)
    row, walk = split.make_rows("split, small", found)
    product = 2 * 4 * 8 * 8
    for one in found.values():
        assert one.equal
        assert one.flops == {"F": 2 * product, "B": 4 * product, "I": 2 * product, "W": 2 * product}
        assert len(one.halves) == 2
    ours = found[split.OURS].held
    assert ours["F"] > ours["I"] > ours["W"] == 0
    assert row.ratios["flops I+W / B"] == 1.0
    assert [verdict.met for verdict in row.verdicts] == [True, True]
    assert walk.verdicts == []
    assert [len(row.values) for row in split.make_summary({"small": found})] == [2, 2]


# The page


def test_the_page_has_every_action_of_every_rank_and_its_figures():
    def ran(*words):
        """F takes 2 s, B 3, a STEP nothing."""
        spans, now = [], 10.0
        for word in words:
            action = parse_action(word)
            end = now + {"F": 2, "B": 3}.get(action.op, 0)
            spans.append(Span(action, now, end))
            now = end
        return Row(10.0, now, spans)

    rows = [ran("0F0@0", "0F1@0", "0B0@0", "0B1@0", "0STEP@1"), ran("1F0@0", "1B0@0", "1STEP@1")]
    one = timelines.Shown("1f1b", Timeline(rows, 2), 9.5)
    text = timelines.page([one], 0.03)
    assert len(re.findall('<g class="bar', text)) == 6
    assert len(re.findall('class="step"', text)) == 2
    assert "stage 0, whole backward of microbatch 1, version 0: 7000.0 to 10000.0 ms" in text
    assert "10.000 s (on paper 9.500 s) · bubble 25.0%" in text
    assert "a rank holds 2 microbatches of its part of the model at most · staleness 0" in text
    assert "http" not in text
