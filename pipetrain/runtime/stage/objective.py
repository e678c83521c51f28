"""The last stage's loss and metrics of each microbatch, and their sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipetrain.model.network import Tensors
from pipetrain.model.specs import as_tuple, cast_floats, differentiable
from pipetrain.runtime.microbatch_feed import Target
from pipetrain.tasks import Task
from pipetrain.tasks.running_sums import Accumulator


class Counted(NamedTuple):
    """What the last stage counts for a microbatch."""

    share: float  # of the batch's loss
    loss: Tensor  # the mean
    weight: float  # of the targets
    samples: int
    sums: Mapping[str, Tensor]  # of the metrics


class Objective:
    """A task for a model's outputs, with its counts. `pack` returns tensors in the model's form.

    `autocast`: outputs may be of lower precision, in which no loss is computed.
    """

    def __init__(self, task: Task, pack: Callable[[Tensors], Any], autocast: bool) -> None:
        self.task, self._pack, self._autocast = task, pack, autocast
        self._share: tuple[float, Tensor] | None = None  # the last share, as a number and as a tensor
        self.start_counting()

    def start_counting(self) -> None:
        self.trained, self.evaluated = Accumulator(), Accumulator()
        self.losses: list[Tensor | None] = []  # the mean of each update; None: counted by other replicas

    def take_losses(self) -> list[float]:
        losses, self.losses = self.losses, []
        local = [loss for loss in losses if loss is not None]
        numbers = iter(torch.stack(local).tolist() if local else [])
        return [0.0 if loss is None else next(numbers) for loss in losses]

    def loss(self, outputs: Tensors, target: Target | None) -> Tensor:
        """Return the mean loss of a microbatch; 0 if no target counts."""
        assert target is not None, "the last stage needs the targets"
        if not target.weight and target.share == 0:
            # A loss among the outputs may be a mean over nothing.
            numbers = (t if t.dim() else t.nan_to_num() for t in outputs if differentiable(t))
            return torch.stack([(t * 0).sum() for t in numbers]).sum()
        return self.task.loss(self.model_output(outputs), target.value)

    def counted(self, loss: Tensor, outputs: Tensors, target: Target | None) -> Counted:
        assert target is not None, "the last stage needs the targets"
        sums: dict[str, Tensor] = {}
        if self.task.metrics:
            with torch.no_grad():
                output = self.model_output(tuple(t.detach() for t in outputs))
                sums = {metric.name: metric.sums(output, target.value) for metric in self.task.metrics}
        return Counted(target.share, loss.detach(), target.weight, target.samples, sums)

    def gradient(self, loss: Tensor, share: float) -> Tensor:
        """Return the gradient of a loss with this share; the last tensor is reused for the same share."""
        if self._share is None or self._share[0] != share:
            self._share = share, torch.full_like(loss, share)
        return self._share[1]

    def evaluate(self, outputs: Tensors, target: Target) -> None:
        loss = self.task.evaluation_loss(self.model_output(outputs), target.value)
        self.evaluated.add(*self.counted(loss, outputs, target)[1:])

    def count(self, losses: Tensor | None, counted: Sequence[Counted]) -> None:
        """Count a batch: the losses [n] of its microbatches, times their shares, and the counted ones.

        `losses`: None if other replicas have all its microbatches.
        """
        self.losses.append(None if losses is None else losses.sum() if len(losses) > 1 else losses[0])
        self.count_all(counted)

    def count_all(self, counted: Sequence[Counted]) -> None:
        for microbatch in counted:
            self.trained.add(*microbatch[1:])
        self.trained.add_up()

    def model_output(self, outputs: Tensors) -> Any:
        return self._pack(as_tuple(cast_floats(outputs, torch.float32)) if self._autocast else outputs)


def weighted(counted: Sequence[Counted]) -> Tensor:
    """Return the losses of microbatches, each times its share of the batch's loss [n]."""
    if [microbatch.share for microbatch in counted] == [1.0]:
        return counted[0].loss.unsqueeze(0)
    losses, shares = [microbatch.loss for microbatch in counted], [microbatch.share for microbatch in counted]
    if len({*shares}) == 1:
        return torch.stack(losses).mul_(shares[0])
    return torch.stack(torch._foreach_mul(losses, shares))
