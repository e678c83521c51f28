"""What users configure on the command line, against a loop of plain PyTorch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from tests.support.plain import evaluated, of_pairs, plainly
from tests.test_main import train_here

pytestmark = pytest.mark.processes
SAMPLES = 7


def line() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 1))


class Tenths(Dataset[Any]):
    """Python's floats."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[list[float], list[float]]:
        return [index / 10], [index / 7]


def test_pythons_floats_in_float64_and_microbatches_that_do_not_divide_a_batch(monkeypatch, tmp_path):
    words = [f"{key}._target_=tests.users.test_command_line.Tenths" for key in ("data.train", "data.test")]
    words += ["data=custom", "model._target_=tests.users.test_command_line.line", "dtype=float64", "seed=3"]
    words += ["loss._target_=torch.nn.functional.mse_loss", "optim.lr=0.1", "optim.weight_decay=0"]
    words += [f"batch_size={SAMPLES}", "microbatches=3", "epochs=2", "lr_schedule=constant", "warmup=0"]
    train_here(monkeypatch, tmp_path, *words, "device=cpu", "partition=even", "logger=[]", "trace=true")
    torch.manual_seed(3)
    model = line().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x, y = (torch.tensor([[i / n] for i in range(SAMPLES)], dtype=torch.float64) for n in (10, 7))
    plainly(model, optimizer, of_pairs(functional.mse_loss), [(x, y)] * 2)
    (loss,) = evaluated(model, of_pairs(functional.mse_loss), [(x, y)])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val_loss"] == pytest.approx(loss, rel=1e-12)
