"""The suite `routes`: a U-Net whose skips are handed on by hand is the same model."""

from __future__ import annotations

import pytest
import torch

from benchmark.routes import BY_HAND, ROUTES, Found, by_hand, make_rows
from pipetrain.models import unet

SIZES = {"num_classes": 3, "levels": 3, "convolutions": 1, "width": 2}


def test_by_hand_it_is_the_same_model_layer_by_layer():
    made, images = [], torch.rand(2, 3, 8, 8).double()
    for build in (unet, by_hand):
        torch.manual_seed(0)
        model = build(**SIZES).double()
        scores = model(images)
        scores.square().mean().backward()
        made.append((len(model), scores, [p.grad for p in model.parameters()]))
    (layers, scores, grads), (again, same, others) = made
    assert layers == again
    assert torch.equal(scores, same)
    assert all(map(torch.equal, grads, others))


@torch.no_grad()
def test_by_hand_each_open_skip_is_behind_the_value():
    """The skip of level 1 is 2 x 8 x 8 and of level 2, 4 x 4 x 4; both are open between the ways."""
    out, shapes = torch.rand(1, 3, 8, 8), {}
    for name, layer in by_hand(**SIZES).named_children():
        out = layer(out)
        shapes[name] = [tuple(t.shape[1:]) for t in ((out,) if isinstance(out, torch.Tensor) else out)]
    one, two = (2, 8, 8), (4, 4, 4)
    assert shapes == {
        "down1_conv1": [one],
        "down1_skip": [one],
        "down1_pool": [(2, 4, 4), one],
        "down2_conv1": [two, one],
        "down2_skip": [two, one],
        "down2_pool": [(4, 2, 2), one, two],
        "bottom_conv1": [(8, 2, 2), one, two],
        "up2_grow": [two, one, two],
        "up2_skip": [two, one, two],
        "up2_conv1": [two, one],
        "up1_grow": [one, one],
        "up1_skip": [one, one],
        "up1_conv1": [one],
        "head": [(3, 8, 8)],
    }


@pytest.mark.parametrize(
    ("sent", "loss", "met"),
    [
        (3.0, 0.5, [True, True, True, True]),
        (4.0, 0.5, [False, True, True, True]),
        (9.0, 0.6, [False, False, False, True]),
    ],
)
def test_the_bytes_are_held_against_the_plan_and_those_by_hand(sent, loss, met):
    found = Found(
        series={ROUTES: [0.1, 0.2], BY_HAND: [0.2, 0.5]},
        sent={ROUTES: sent, BY_HAND: 8.0},
        paper={ROUTES: 3.0, BY_HAND: 8.0},
        losses={ROUTES: loss, BY_HAND: 0.5},
    )
    rows = make_rows("routes", found)
    assert rows[0].ratios == {"x by hand": 2.25, "MiB a batch": sent, "MiB on paper": 3.0}
    assert [verdict.met for row in rows for verdict in row.verdicts] == met
