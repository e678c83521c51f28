"""Suites `schedules` and `jitter`: the machine, and the bounds."""

from __future__ import annotations

from itertools import repeat

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmark.paced import SAMPLE, Pace, products
from benchmark.schedules import LONG, WAYS, bound, prepared


def test_a_product_takes_its_time_in_forward_and_in_each_half_of_the_backward():
    x, weight = torch.rand(2, 3, 4, requires_grad=True), nn.Parameter(torch.rand(4, 4))
    with Pace(repeat(0.0)) as pace:
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
    for stage in model:
        y = stage(x.requires_grad_() if stage is model[1] else x)
        with Pace(repeat(0.0)) as pace:
            y.sum().backward()
        assert pace.products == 2


@pytest.mark.parametrize(
    ("name", "slots"),
    [("1f1b", 33), ("zb_h1", 27), (f"zb_h2{LONG}", 99 / 4), (f"zbv{LONG}", 97.5 / 4)],
)
def test_the_bound_of_four_ranks_and_eight_microbatches(name, slots):
    """At F = I = W = 1 of all that a rank has."""
    job, one_s = prepared(WAYS[name], 4, 8, 1.0)
    assert one_s == 1.0 / WAYS[name].slices
    assert bound(job.plan, one_s) == pytest.approx(slots)
