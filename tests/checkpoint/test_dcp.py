"""torch.distributed.checkpoint saves what a Pipeline trains, and plain PyTorch goes on; and the other way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import cross_entropy

from pipetrain import Pipeline

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Head(nn.Module):
    """Shares the weight of an embedding."""

    def __init__(self, shared: nn.Embedding) -> None:
        super().__init__()
        self.weight = shared.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Embedding(5, 6)
    return nn.Sequential(first, nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh(), Head(first)).double()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.05)


def batches() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(2)
    return [
        (torch.randint(5, (8,), generator=drawn), torch.randint(5, (8,), generator=drawn)) for _ in range(5)
    ]


def losses(pipe: Pipeline, number: int, end: int) -> list[float]:
    return list(pipe.train(batches()[number:end]))


def pipeline(schedule: str, partition: Any, **options: Any) -> Pipeline:
    options |= {"partition": partition, "sample": batches()[0], "threads": 1}
    return Pipeline(tied(), cross_entropy, adam, schedule, **{"microbatches": 1, **options})


def saved(folder: str) -> list[float]:
    """Train 3 updates on 2 ranks, which share a weight; save, and train 2 more. Load and save on replicas."""
    with pipeline("1f1b", [2]) as pipe:
        known = losses(pipe, 0, 3)
        pipe.collect()
        dcp.save(pipe.dcp(), checkpoint_id=folder)
        known += losses(pipe, 3, 5)
    with pipeline("1f1b", [2], placement="0-1.0-1", microbatches=2) as pipe:
        dcp.load(pipe.dcp(), checkpoint_id=folder)
        dcp.save(pipe.dcp(), checkpoint_id=f"{folder} of replicas")
    return known


def gone_on(folder: str) -> list[float]:
    """On other stages, of which rank 0 has two that share a weight, from other weights."""
    with pipeline("v_async", [1, 2, 4]) as pipe:
        dcp.load(pipe.dcp(), checkpoint_id=folder)
        assert pipe.updates == 3
        return list(pipe.train(batches()[3:], window=1))


class Plain:
    """The same training in plain PyTorch."""

    def __init__(self) -> None:
        self.model = tied().train()
        self.optimizer = adam(self.model.parameters())
        self.updates = torch.tensor(0)

    def train(self, end: int) -> list[float]:
        found = []
        for inputs, targets in batches()[int(self.updates) : end]:
            loss = cross_entropy(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.updates += 1
            found.append(loss.item())
        return found

    def state(self) -> dict[str, Any]:
        known = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": self.model.state_dict(), "state": known["state"], "updates": self.updates}

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        self.model.load_state_dict(state["model"])
        groups = get_optimizer_state_dict(self.model, self.optimizer)["param_groups"]
        set_optimizer_state_dict(
            self.model, self.optimizer, {"state": state["state"], "param_groups": groups}
        )


def stored(folder: str) -> Iterable[Any]:
    return dcp.FileSystemReader(folder).read_metadata().storage_data.values()


@pytest.mark.processes
def test_what_two_ranks_save_others_and_plain_pytorch_go_on_from_and_the_other_way(ranks, tmp_path):
    whole = [pytest.approx(loss, rel=1e-12) for loss in Plain().train(5)]
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    assert ranks(saved, ours) == [whole] * 2
    sizes = [sum(of.length for of in stored(folder)) for folder in (ours, f"{ours} of replicas")]
    assert sizes == [sizes[0]] * 2
    assert ranks(gone_on, ours) == [whole[3:]] * 2
    plain = Plain()
    plain.load(f"{ours} of replicas")
    assert plain.train(5) == whole[3:]
    plain = Plain()
    plain.train(3)
    dcp.save(plain.state(), checkpoint_id=theirs)
    assert ranks(gone_on, theirs) == [whole[3:]] * 2
