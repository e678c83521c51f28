"""A training whose checkpoint is kept for each format that was ever released, as each is read for ever.

For a new format: `python -m tests.support.released FOLDER`, and keep those that are there.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

from pipetrain import Pipeline

KEPT = Path(__file__).parents[1] / "golden" / "checkpoints"
INPUTS, TARGETS = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([[0.5], [-1.0]])


def training() -> Pipeline:
    """Two layers that begin with ones, an optimizer with a state, and a moving average."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    sgd = partial(torch.optim.SGD, lr=0.125, momentum=0.5)
    return Pipeline(model, mse_loss, sgd, microbatches=1, seed=3, ema=0.5, device="cpu", threads=1)


if __name__ == "__main__":
    with training() as pipe:
        pipe.step(INPUTS, TARGETS)
        print(pipe.save(sys.argv[1]))
