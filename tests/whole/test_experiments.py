"""The experiments of conf/experiment/, one also on a data set of a user's own."""

from __future__ import annotations

import json
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

from pipetrain.config.build import make_model
from pipetrain.models.vision import Residual
from tests.commands.test_train import train_here
from tests.support.cases import options_of

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


WITH_ITS_DATA = [f"data.{split}._target_={__name__}.Noisy" for split in ("train", "test")]
WITH_ITS_DATA += ["data=custom", "data.train.length=512", "data.test.length=64", "epochs=5"]
EXPERIMENTS: list[tuple[str, str, float, float]] = [
    # Near to the noise
    ("regression", "data.train_limit=2048 data.test_limit=256 microbatches=1 epochs=3", 0.1**2 / 3, 0.05),
    # Inputs and targets are read apart; with other random numbers they would not fit: an mse of 0.67
    ("regression", " ".join(WITH_ITS_DATA), 0, 0.1),
    # Discs and rectangles
    (
        "unet",
        "model.levels=3 model.width=8 data.size=16 data.train_limit=160 data.test_limit=32 batch_size=8 "
        "microbatches=1 epochs=2",
        0.45,
        1,
    ),
    # Letters by their frequency alone have a perplexity of 27 here
    (
        "gpt",
        "model.depth=1 model.width=48 data.block=32 data.train_limit=960 data.test_limit=40 batch_size=4 "
        "microbatches=1 epochs=1",
        1,
        24,
    ),
]
FIGURES = {"regression": "val_mse", "unet": "val_miou", "gpt": "val_ppl"}


@pytest.mark.parametrize(("experiment", "words", "least", "most"), EXPERIMENTS)
def test_an_experiment_trains_to_a_figure(monkeypatch, tmp_path, experiment, words, least, most):
    train_here(monkeypatch, tmp_path, f"experiment={experiment}", "optim.lr=0.01", *words.split())
    ran = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert least < ran[FIGURES[experiment]] < most
    assert experiment != "gpt" or ran["best_val_ppl"] == ran["val_ppl"]  # the lower the better


# OneFlow's SSP cuts its list of operators after the share of the first stage (oneflow/core/job_rewriter,
# StagePartitionPass, 2020). A bias is one of its own, the loss is three, the first convolution is not on it.
SHARES = {"ssp_alexnet": (3, 4), "ssp_vgg16": (11, 18), "ssp_resnet50": (1, 28)}
ONE = (nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d, nn.Flatten, nn.Dropout, Residual)
LOSS = 3


def operators(layer: nn.Module) -> int:
    weighted = [inner for inner in layer.modules() if isinstance(inner, nn.Conv2d | nn.Linear)]
    return sum(1 + (inner.bias is not None) for inner in weighted) + sum(
        isinstance(inner, ONE) or getattr(inner, "output_size", None) == 1 for inner in layer.modules()
    )


@pytest.mark.parametrize(("experiment", "share"), SHARES.items())
def test_the_cuts_of_oneflow_are_at_the_layer_that_is_nearest_to_its_operator(experiment, share):
    cfg = options_of([f"experiment={experiment}"])
    with torch.device("meta"):
        model = make_model(cfg, 0, torch.float32)
    ends = [end - 1 for end in accumulate(map(operators, model))]
    first, whole = share
    last = (ends[-1] + LOSS) * first // whole
    assert cfg["partition"] == [1 + min(range(len(model) - 1), key=lambda layer: abs(ends[layer] - last))]
    assert abs(ends[cfg["partition"][0] - 1] - last) <= 3
