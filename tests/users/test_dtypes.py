"""Models whose layers have dtypes of their own."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain import Pipeline

pytestmark = pytest.mark.processes
NARROW, WIDE = torch.bfloat16, torch.float64


class As(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class Traced(nn.Module):
    """Layers of three dtypes, and a buffer of a fourth kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8, dtype=NARROW)
        self.third = nn.Linear(8, 5, dtype=WIDE)
        self.register_buffer("shift", torch.tensor(0.1, dtype=WIDE))

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)).to(NARROW))
        return self.third(torch.tanh(h.to(WIDE) + self.shift))


def sequential() -> nn.Sequential:
    layers = [nn.Linear(6, 8), nn.Tanh(), As(NARROW), nn.Linear(8, 8, dtype=NARROW), nn.Tanh(), As(WIDE)]
    return nn.Sequential(*layers, nn.Linear(8, 5, dtype=WIDE))


def narrow() -> nn.Sequential:
    return nn.Sequential(As(NARROW), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).bfloat16()


def wide() -> nn.Sequential:
    """Float32 parameters, and a buffer that float32 would round."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    model[2].register_buffer("unused", torch.tensor(0.1, dtype=WIDE))
    return model


MODELS = {"traced": Traced, "sequential": sequential, "narrow": narrow, "wide": wide}
CUTS = {"traced": ["even"], "sequential": [[3], [6]], "narrow": [[1]], "wide": [[1]]}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]()
    return model


adamw = partial(torch.optim.AdamW, lr=0.01)
BATCHES = [
    (torch.randn(8, 6, generator=torch.Generator().manual_seed(n)), torch.arange(8) % 5) for n in range(4)
]


def train(name: str, cut: Any, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train two batches, and the rest from a checkpoint; return the losses and the weights."""
    losses = []
    options = {"clip_grad_norm": 1.0, "ema": 0.5, "microbatches": 1, "device": "cpu"}
    for half in (BATCHES[:2], BATCHES[2:]):
        with Pipeline(made(name), functional.cross_entropy, adamw, partition=cut, **options) as pipe:
            if losses:
                pipe.load(folder)
            losses += pipe.train(half)
            pipe.save(folder)
            assert math.isfinite(pipe.evaluate(half)["loss"])
            state = pipe.state_dict()
    return losses, state


@pytest.mark.parametrize("name", MODELS)
def test_without_a_dtype_each_parameter_keeps_its_own(ranks, name, tmp_path):
    model = made(name)
    optimizer, losses = adamw(model.parameters()), []
    for x, y in BATCHES:
        loss = functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for number, cut in enumerate(CUTS[name]):
        (found, state), _ = ranks(train, name, cut, str(tmp_path / str(number)))
        assert found == pytest.approx(losses, rel=1e-5)
        for key, tensor in model.state_dict().items():
            near = 1e-2 if tensor.dtype == NARROW else 1e-5
            torch.testing.assert_close(state[key], tensor, rtol=near, atol=near)  # dtypes too
