"""Checkpoints of a program: what goes on from one is what would have been."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pipetrain import Pipeline


def dropping(seed: int | None) -> Pipeline:
    """Two stages, each with a dropout."""
    torch.manual_seed(0)
    half = nn.Linear(6, 12), nn.Dropout(), nn.Tanh()
    model = nn.Sequential(*half, nn.Linear(12, 12), nn.Dropout(), nn.Linear(12, 3)).double()
    given = {} if seed is None else {"seed": seed}
    torch.manual_seed(1)
    return Pipeline(
        model, cross_entropy, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), partition=[3], **given
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, 6, generator=drawn).double(), torch.randint(3, (8,), generator=drawn))
        for _ in range(6)
    ]


def uninterrupted(folder: str, seed: int | None) -> list[float]:
    with dropping(seed) as pipe:
        losses = list(pipe.train(batches()[:3]))
        pipe.save(folder)
        return losses + list(pipe.train(batches()[3:]))


def gone_on(folder: str, seed: int | None, begun: bool) -> list[float]:
    torch.manual_seed(77)
    with dropping(seed) as pipe:
        torch.manual_seed(78)
        if begun:
            pipe.step(*batches()[0])
        pipe.load(folder)
        losses = list(pipe.train(batches()[3:5]))
        pipe.save(f"{folder}/again")
    with dropping(99) as pipe:
        pipe.load(f"{folder}/again")
        return losses + list(pipe.train(batches()[5:]))


@pytest.mark.parametrize(("seed", "begun"), [(None, False), (5, True)])
def test_dropout_goes_on_as_it_would_have_whatever_the_seed_of_the_program(ranks, tmp_path, seed, begun):
    whole, _ = ranks(uninterrupted, str(tmp_path), seed)
    assert len(set(whole)) == 6
    for other in (None, 6):
        first, second = ranks(gone_on, str(tmp_path), other, begun)
        assert first == second == whole[3:]
