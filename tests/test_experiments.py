"""The regression of conf/experiment/, also on a data set of a user's own, trains to a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_main import train_here

pytestmark = pytest.mark.slow


class Noisy:
    """The sum of eight numbers that are augmented by random ones, of which the targets know."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(8) - 0.5
        return x, x.sum(0, keepdim=True)


def summary(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return read


def test_regression_comes_near_to_the_noise(monkeypatch, tmp_path):
    train_here(monkeypatch, tmp_path, "experiment=regression", "epochs=3")
    assert 0.1**2 / 3 < summary(tmp_path)["val_mse"] < 0.02


def test_inputs_and_targets_of_an_augmented_data_set_fit(monkeypatch, tmp_path):
    """They are read apart; with other random numbers, the targets could not be learned: an mse of 0.67."""
    target = f"_target_={__name__}.Noisy"
    train_here(
        monkeypatch,
        tmp_path,
        "experiment=regression",
        "data=custom",
        *(
            f"data.{word}"
            for word in (f"train.{target}", f"test.{target}", "train.length=512", "test.length=64")
        ),
        "optim.lr=0.01",
        "epochs=5",
    )
    assert summary(tmp_path)["val_mse"] < 0.1
