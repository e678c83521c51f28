"""A plain loop of PyTorch in one process, which the programs of users are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> its mean loss."""


def plainly(model: nn.Module, optimizer: Optimizer, loss: Loss, batches: Iterable[Any]) -> list[float]:
    """Train a model, an update a batch; return the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        found = loss(model, batch)
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


def of_pairs(loss: Callable[[Any, Tensor], Tensor], microbatches: int = 1) -> Loss:
    """Return the loss of batches (inputs, targets): the mean of those of its microbatches, of equal size."""

    def mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        pieces = zip(*(tensor.chunk(microbatches) for tensor in batch), strict=True)
        return torch.stack([loss(model(x), y) for x, y in pieces]).mean()

    return mean


@torch.no_grad()
def evaluated(model: nn.Module, loss: Loss, batches: Iterable[Any]) -> list[float]:
    """Return the loss of each batch in evaluation mode; modes are as they were."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    losses = [loss(model, batch).item() for batch in batches]
    for module, mode in modes:
        module.training = mode
    return losses
