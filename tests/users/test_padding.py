"""Transformers of torch.nn whose evaluation takes PyTorch's fast path."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipetrain import Pipeline
from tests.support.parity import of_pairs, plainly
from tests.users.programs import apart, sgd, trained


def encoder(norm: bool = False) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(8) if norm else None)


class Classifier(nn.Module):
    """Averages over all places, padded ones too. Takes the mask beside the numbers, or makes it."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.encoder, self.head = encoder(norm), nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = ids if mask is not None else self.embed(ids)
        return self.head(self.encoder(x, src_key_padding_mask=ids == 0 if mask is None else mask).mean(1))


class Vision(nn.Module):
    """A transformer of patches, whose last layer is the encoder's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.encoder = nn.Conv2d(3, 8, 4, 4), encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.patches(x).flatten(2).transpose(1, 2))[:, 0]


def padded(to_the_right: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 20, (8, 6), generator=generator)
    ids[::2, 4:] = 0
    ids[1, 5] = 0
    return ids if to_the_right else ids.flip(1), torch.randint(3, (8,), generator=generator)


def classified(kind: str) -> float:
    torch.manual_seed(0)
    model = Classifier(kind == "norm").double()
    ids, targets = padded(kind != "to the left")
    if kind == "frozen":
        for part in (model.embed, model.encoder):
            part.eval().requires_grad_(False)
    if kind == "mask":
        return on_one(model, ((torch.randn(8, 6, 8).double(), ids == 0), targets))
    trained, tested = model(ids), deepcopy(model).eval()
    with torch.no_grad():  # the fast path makes zeros of padded places, but for the left ones
        assert torch.allclose(trained, tested(ids)) == (kind in ("frozen", "to the left"))
    return on_one(model, (ids, targets))


def on_one(model: nn.Module, batch: tuple[Any, Tensor]) -> float:
    """Train two stages on one rank, which takes one trace: that is most of the time."""
    return apart(model, cross_entropy, [batch], schedule="interleaved_1f1b")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["norm", "to the left", "frozen", "mask"])
def test_padded_places_are_evaluated_as_by_one_process(kind):
    """A frozen encoder in evaluation mode makes them in training too."""
    assert classified(kind) < 1e-11


def in_bf16(x: Tensor, y: Tensor) -> float:
    model = Vision()
    with Pipeline(model, cross_entropy, partial(torch.optim.SGD, lr=0.0), precision="bf16") as pipe:
        pipe.step(x, y)
        return pipe.evaluate([(x, y)])["loss"]


def test_a_model_of_half_precision_or_in_autocast_may_take_it_too(ranks):
    """In autocast the fast path has another dtype than the trace."""
    x, y = torch.randn(8, 3, 16, 16), torch.randint(8, (8,))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = cross_entropy(Vision().eval()(x).float(), y).item()
    assert ranks(in_bf16, x, y) == [pytest.approx(wanted, rel=1e-2)] * 2
    model, batches = Vision().bfloat16(), [(x.bfloat16(), y)] * 2
    told = ranks(partial(trained, microbatches=1), model, cross_entropy, batches)
    assert told == [(plainly(model, sgd(model.parameters()), of_pairs(cross_entropy), batches), "")] * 2
