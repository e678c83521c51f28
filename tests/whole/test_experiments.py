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
    words = ("data.train_limit=2048", "data.test_limit=256", "optim.lr=0.01", "microbatches=1", "epochs=3")
    train_here(monkeypatch, tmp_path, "experiment=regression", *words)
    assert 0.1**2 / 3 < summary(tmp_path)["val_mse"] < 0.05


def test_inputs_and_targets_of_an_augmented_data_set_fit(monkeypatch, tmp_path):
    """They are read apart; with other random numbers, the targets could not be learned: an mse of 0.67."""
    sizes = {"train": 512, "test": 64}
    words = [f"data.{split}._target_={__name__}.Noisy" for split in sizes]
    words += [f"data.{split}.length={size}" for split, size in sizes.items()]
    words += ["data=custom", "optim.lr=0.01", "epochs=5"]
    train_here(monkeypatch, tmp_path, "experiment=regression", *words)
    assert summary(tmp_path)["val_mse"] < 0.1


def test_a_unet_finds_discs_and_rectangles(monkeypatch, tmp_path):
    small = ("model.levels=3", "model.width=8", "data.size=16")
    small += ("data.train_limit=160", "data.test_limit=32", "batch_size=8", "microbatches=1", "optim.lr=0.01")
    train_here(monkeypatch, tmp_path, "experiment=unet", *small, "epochs=2")
    assert summary(tmp_path)["val_miou"] > 0.45


def test_a_gpt_learns_more_than_the_frequency_of_letters(monkeypatch, tmp_path):
    """Letters by their frequency alone have a perplexity of 27 here."""
    small = ("model.depth=1", "model.width=48", "data.block=32", "data.train_limit=960", "data.test_limit=40")
    small += ("optim.lr=0.01", "batch_size=4", "microbatches=1")
    train_here(monkeypatch, tmp_path, "experiment=gpt", *small, "epochs=1")
    ran = summary(tmp_path)
    assert ran["best_val_ppl"] == ran["val_ppl"] < 24
