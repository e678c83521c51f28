"""Programs with a Pipeline of a factory, for one process and for the ranks of a spawned world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.nn import functional
from torch.utils.data import DataLoader

from pipetrain import Pipeline
from pipetrain.models import gpt
from pipetrain.runtime.ranks import World
from pipetrain.runtime.session import make_stages
from tests.support.live import Live
from tests.support.programs import DOUBLE, falling, labelled, momentum, process_group


class Scaled(nn.Linear):
    """A layer with a constant buffer, that is initialised in a way of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, inputs), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def normed() -> nn.Sequential:
    layers = [Scaled(6, 6), nn.BatchNorm1d(6), nn.Tanh(), Scaled(6, 6), nn.BatchNorm1d(6), nn.Tanh()]
    return nn.Sequential(*layers, Scaled(6, 5)).to(DOUBLE)


class Branches(nn.Module):
    """Two ways, of which the second needs what entered the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.second(self.first(x) * self.scale), x], dim=1))
        return out


def branches() -> nn.Module:
    return Branches().to(DOUBLE)


FACTORIES = {"normed": normed, "branches": branches}


def pipe_of(name: str, model: nn.Module | None = None, **options: Any) -> Pipeline:
    return Pipeline(
        model or FACTORIES[name],
        functional.cross_entropy,
        momentum,
        microbatches=2,
        lr_schedule=falling,
        device="cpu",
        threads=1,
        **options,
    )


def trained(name: str, **options: Any) -> dict[str, Any]:
    """Train a factory's model for 3 updates; return what is told, and the weights before and after."""
    with pipe_of(name, **options) as pipe:
        initial = pipe.state_dict()
        batches = list(DataLoader(labelled(24), batch_size=8))
        early = pipe.evaluate(batches)
        losses = list(pipe.train(batches, window=3))
        states = {"initial": initial, "final": pipe.state_dict()}
        averaged = pipe.state_dict(ema=True) if "ema" in options else {}
        told = {"early": early, "losses": losses, "late": pipe.evaluate(batches)}
    arrays = {key: {n: t.numpy() for n, t in state.items()} for key, state in states.items()}
    return {**told, **arrays, "ema": {n: t.numpy() for n, t in averaged.items()}}


def all_trained(
    world: World, store: Store, names: Sequence[str], options: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    with process_group(world, store):
        return [trained(name, **options or {}) for name in names]


def saved(world: World, store: Store, folder: Path) -> list[float]:
    """Train 3 updates, save, and train 3 more; return the losses of these."""
    batches = list(DataLoader(labelled(24), batch_size=8))
    with process_group(world, store), pipe_of("normed") as pipe:
        list(pipe.train(batches))
        pipe.save(folder)
        return list(pipe.train(batches))


def large() -> nn.Sequential:
    return gpt(depth=6, heads=2, width=32, sequence=8, vocabulary=64)


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, 0.1)


def next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def peak(world: World, store: Store) -> tuple[int, int, int]:
    """Build a model and train one batch; return the peaks of both, and the bytes of the rank's weights."""
    batch = (torch.zeros(2, 8, dtype=torch.int64),) * 2
    held: list[int] = []

    def noting(*given: Any) -> Any:
        stages = make_stages(*given)
        held.extend(t.nbytes for stage in stages.values() for t in stage.module.state_dict().values())
        return stages

    options = {"microbatches": 1, "device": "cpu", "threads": 1, "partition": "params"}
    with process_group(world, store), Live() as live, patch("pipetrain.runtime.session.make_stages", noting):
        pipe = Pipeline(large, next_token, sgd, sample=batch, **options)
        built = live.peak
        pipe.step(*batch)
        pipe.close()
    return built, live.peak, sum(held)
