"""AmoebaNet-D: its published sizes, what passes from cell to cell, what it refuses, and that it trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipetrain.config.build import build
from pipetrain.errors import ConfigError
from published.amoebanet import NORMAL, REDUCTION, Cell, Halving, amoebanet
from published.experiments.torchgpipe_amoebanet import WORDS
from tests.support.cases import Case, compare, options_of
from tests.support.thread_ranks import run_in_threads

# Of torchgpipe 0.0.7's tables: (normal cells, filters): layers, parameters for 1000 classes, rounded to 10^n.
PUBLISHED = {
    (6, 208): (12, 31_400_000, 5),
    (18, 208): (24, 81_505_540, 0),
    (18, 256): (24, 122_470_120, 0),
    (18, 416): (24, 319_000_000, 5),
    (18, 544): (24, 542_700_000, 5),
    (36, 544): (42, 1_060_000_000, 7),
    (72, 512): (78, 1_840_000_000, 7),
}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def narrow() -> nn.Sequential:
    return amoebanet(cells=3, filters=8)


def test_the_published_sizes_have_their_parameters(monkeypatch):
    monkeypatch.setattr(nn.init, "normal_", lambda weight, std: weight)  # on meta it costs most of the time
    with torch.device("meta"):
        for (cells, filters), (layers, parameters, rounded) in PUBLISHED.items():
            model = amoebanet(1000, cells, filters)
            assert (len(model), round(count(model), -rounded)) == (layers, parameters)
        raced = build(options_of([*WORDS, "model.num_classes=1000"]), "model")
        assert count(raced) == PUBLISHED[18, 256][1]


@torch.no_grad()
def test_each_layer_passes_on_what_the_one_before_it_made_and_writes_nothing():
    torch.manual_seed(0)
    model, x = amoebanet(7, 3, 16).double(), torch.randn(3, 3, 64, 64, dtype=torch.float64)
    wanted, out = model(x), model[0](x)
    for layer in model[1:]:
        entered = out if isinstance(out, tuple) else (out, out)
        before = [t.clone() for t in entered]
        out = layer(out)
        assert all(map(torch.equal, entered, before))
        if isinstance(layer, Cell):
            assert out[1] is entered[0]
            assert 0.1 < out[0].std() < 10
    assert out.shape == (3, 7)
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize(("kind", "channels"), [(NORMAL, 4 * 8), (REDUCTION, 3 * 8)])
def test_a_cell_joins_sums_of_two_operations(kind, channels):
    cell = Cell(kind, last=6, before=10, channels=8, halved=False).eval()
    last, before = torch.randn(2, 6, 8, 8), torch.randn(2, 10, 8, 8)
    out, _ = cell((last, before))
    assert out.shape == (2, channels, *((4, 4) if kind is REDUCTION else (8, 8)))
    states, operations = [cell.last(last), cell.before(before)], cell.operations
    for number, ((one, _), (other, _)) in enumerate(kind.pairs):
        states.append(operations[2 * number](states[one]) + operations[2 * number + 1](states[other]))
    torch.testing.assert_close(out, torch.cat([states[number] for number in kind.joined], 1))


def test_halving_sees_even_and_odd_pixels():
    halving = Halving(1, 2).eval()
    for conv in (halving.even, halving.odd):
        nn.init.ones_(conv.weight)
    x = torch.arange(16.0).view(1, 1, 4, 4)
    even, odd = halving(x)[0] * (1 + halving.norm.eps) ** 0.5
    torch.testing.assert_close((even, odd), (x[0, 0, ::2, ::2], x[0, 0, 1::2, 1::2]))


def test_stages_train_it_as_one_process_does():
    """Two tensors cross the first cut; the head, which uses one of its two, is a stage of its own."""
    words = (f"model._target_={__name__}.narrow", "partition=[4,8]", "microbatches=2", "epochs=1")
    case = Case("1f1b", 3, words)
    compare(case, *run_in_threads(case), 1e-10)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"cells": 4}, "model.cells=4 must be a multiple of 3"),
        ({"filters": 12}, "filters=12 .* multiple of 8"),
    ],
)
def test_sizes_that_cannot_be_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        amoebanet(**wrong)
