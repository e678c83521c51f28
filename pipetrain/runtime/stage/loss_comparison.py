"""Compares the loss of a batch with that of its microbatches, while a training goes on.

What is tried before the first update is the first batch, and a mask may matter in a later one alone. So of
the batches 1, 2, 4, 8, ... the last stage keeps the outputs, without their graph, until the update. The loss
of all of them together must be what the losses of the microbatches, each with its share, add up to. All are
computed in float64, in which nothing but a loss of another kind makes them differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pipetrain.errors import TrainingStopped
from pipetrain.model.network import Tensors
from pipetrain.model.random_numbers import RngSnapshot
from pipetrain.model.specs import cast_floats, join
from pipetrain.runtime.feed import Target
from pipetrain.runtime.stage.finite import WEIGH, Awaiting
from pipetrain.runtime.stage.microbatch import Batch, Microbatch
from pipetrain.runtime.stage.stage import Stage
from pipetrain.tasks import Task

MOST_KEPT = 2**18  # numbers in the outputs of a microbatch
TOLERANCE, SAME = 1e-5, 1e-9  # relative, of the batch and of a microbatch that is computed twice


class BatchLoss(Awaiting):
    """Stops a training if the loss of a batch is not that of its microbatches.

    A loss that is another when it is called again, as one that draws, is not compared, nor is one that reads
    weights, or takes no float64 or no whole batch.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._compares = True
        self._kept: dict[int, tuple[Tensors, Target]] = {}  # by microbatch
        self._largest = 0.0  # loss so far

    def needs_outputs(self) -> bool:
        update = self._stage.weights.updates
        return self._compares and (self._stage.rehearses or update & (update + 1) == 0)

    def after_forward(self, microbatch: Microbatch, outputs: Tensors, made: Tensors) -> None:
        if self.needs_outputs() and microbatch.target and sum(t.numel() for t in made) <= MOST_KEPT:
            self._kept[microbatch.mb] = tuple(t.detach() for t in made), microbatch.target

    def after_reduce(self, batch: Batch) -> None:
        kept = [self._kept.pop(mb) for mb in batch.mbs if mb in self._kept]
        several = [one for one in kept if one[1].weight]
        if not self._compares or len(kept) < len(batch.mbs) or len(several) < 2:
            return
        try:
            with RngSnapshot().replayed():
                loss = partial(self._loss, self._stage.counts.task.copied())
                whole, *parts, again = map(loss, [several, *([one] for one in several), several[-1:]])
                share = sum(part * target.share for part, (_, target) in zip(parts, several, strict=True))
                numbers = torch.stack([whole, torch.as_tensor(share), parts[-1], again])
        except Exception:  # a user's loss may raise anything
            self._compares = False
            return
        self._compares = not numbers.requires_grad
        if self._compares and not self._stage.rehearses:
            self._await(partial(self._look, self._stage.weights.updates), numbers)

    def _loss(self, task: Task, several: Sequence[tuple[Tensors, Target]]) -> Tensor:
        """Return the mean loss of several microbatches together."""
        outputs, targets = zip(*several, strict=True)
        rows = [target.samples for target in targets]
        if any([len(t) for t in column] != rows for column in zip(*outputs, strict=True)):
            raise ValueError("outputs need a row for each sample")
        wanted = join([target.value for target in targets])
        whole = self._stage.counts.model_output(tuple(map(torch.cat, zip(*outputs, strict=True))))
        return task.loss(*(cast_floats(value, torch.float64) for value in (whole, wanted)))

    def _look(self, update: int, numbers: list[float]) -> None:
        whole, parts, last, again = numbers
        self._compares = self._compares and not abs(again - last) > SAME * abs(last)
        if not self._compares or not math.isfinite(whole) or not math.isfinite(parts):
            return
        # Of a loss that is next to nothing, as one of both signs may be, there is only rounding to see.
        self._largest = max(self._largest, abs(whole))
        if abs(whole - parts) > TOLERANCE * max(abs(whole), 1e-2 * self._largest):
            raise TrainingStopped(
                f"the loss of the batch of update {update} is {whole:.6g}, and that of its microbatches is "
                f"{parts:.6g}: it compares samples, or is no mean over what counts; {WEIGH}, or set "
                f"microbatches=1"
            )
