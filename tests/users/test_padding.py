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
from tests.support.plain import of_pairs, plainly


class Classifier(nn.Module):
    """Averages over all places, padded ones too."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8) if norm else None)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=ids == 0).mean(1))


class Vision(nn.Module):
    """A transformer of patches, whose last layer is the encoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.patches(x).flatten(2).transpose(1, 2))[:, 0]


def padded(to_the_right: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 20, (8, 6), generator=generator)
    ids[::2, 4:] = 0
    ids[1, 5] = 0
    return ids if to_the_right else ids.flip(1), torch.randint(3, (8,), generator=generator)


def apart(batch: tuple[Tensor, Tensor], frozen: bool = False, **options: Any) -> tuple[float, float]:
    """Return how far losses in training and evaluation are from those of one process."""
    torch.manual_seed(0)
    model = Classifier(**options).double()
    if frozen:
        for part in (model.embed, model.encoder):
            part.eval().requires_grad_(False)
    twin = deepcopy(model)
    with Pipeline(model, cross_entropy, partial(torch.optim.SGD, lr=0.0), device="cpu") as pipe:
        trained, evaluated = pipe.step(*batch), pipe.evaluate([batch])["loss"]
    wanted = cross_entropy(twin(batch[0]), batch[1]).item()
    with torch.no_grad():
        wanted_evaluated = cross_entropy(twin.eval()(batch[0]), batch[1]).item()
    assert (abs(wanted - wanted_evaluated) > 1e-3) == (not frozen and bool((batch[0][:, 0] != 0).all()))
    return trained - wanted, evaluated - wanted_evaluated


@pytest.mark.parametrize(("to_the_right", "norm"), [(True, True), (True, False), (False, False)])
def test_padded_places_are_evaluated_as_by_one_process(ranks, to_the_right, norm):
    for each in ranks(partial(apart, padded(to_the_right), norm=norm)):
        assert each == pytest.approx((0, 0), abs=1e-12)


class Masked(Classifier):
    """Takes the mask beside the numbers."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=mask).mean(1))


def with_a_mask() -> float:
    torch.manual_seed(0)
    ids, targets = padded(True)
    model, x = Masked().double(), torch.randn(8, 6, 8, dtype=torch.float64)
    twin = deepcopy(model).eval()
    with Pipeline(model, cross_entropy, partial(torch.optim.SGD, lr=0.0), device="cpu") as pipe:
        evaluated = pipe.evaluate([((x, ids == 0), targets)])["loss"]
    with torch.no_grad():
        return evaluated - cross_entropy(twin(x, ids == 0), targets).item()


def test_a_mask_may_be_an_input(ranks):
    """One that hides all of a sample would make other numbers on the fast path: none is made up so."""
    assert ranks(with_a_mask) == pytest.approx([0, 0], abs=1e-12)


def test_a_frozen_encoder_in_evaluation_mode_makes_them_in_training_too(ranks):
    for each in ranks(partial(apart, padded(True), frozen=True)):
        assert each == pytest.approx((0, 0), abs=1e-12)


def low_precision() -> tuple[float, float]:
    torch.manual_seed(0)
    model, x, y = Vision(), torch.randn(8, 3, 16, 16), torch.randint(8, (8,))
    twin = deepcopy(model).eval()
    sgd = partial(torch.optim.SGD, lr=0.0)
    with Pipeline(model, cross_entropy, sgd, device="cpu", precision="bf16") as pipe:
        pipe.step(x, y)
        evaluated = pipe.evaluate([(x, y)])["loss"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return evaluated, cross_entropy(twin(x).float(), y).item()


def trained_in_half() -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, 16, 16).bfloat16(), torch.randint(8, (8,))
    model = Vision().bfloat16()
    twin, sgd = deepcopy(model), partial(torch.optim.SGD, lr=0.1)
    wanted = plainly(twin, sgd(twin.parameters()), of_pairs(cross_entropy), [(x, y)] * 2)
    with Pipeline(model, cross_entropy, sgd, device="cpu", microbatches=1) as pipe:
        return list(pipe.train([(x, y)] * 2)), wanted


def test_a_model_of_half_precision_may_take_it_too(ranks):
    losses, wanted = ranks(trained_in_half)[0]
    assert losses == wanted


def test_another_dtype_of_the_fast_path_is_no_reason_to_refuse(ranks):
    evaluated, wanted = ranks(low_precision)[0]
    assert evaluated == pytest.approx(wanted, rel=1e-2)
