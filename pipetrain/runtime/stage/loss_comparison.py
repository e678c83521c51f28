"""Compares the loss of a batch with that of its microbatches, during training.

The trial before the first update uses the first batch, but a mask may matter only in a later one. So for the
batches 1, 2, 4, 8, ... the last stage holds the outputs, without their graph, until the update. The loss of
all of them together must equal the sum of the microbatches' losses, each times its share. All are computed in
float64, so only a loss of another kind makes them differ.
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
from pipetrain.runtime.microbatch_feed import Target
from pipetrain.runtime.stage.microbatch import Batch, Microbatch
from pipetrain.runtime.stage.nonfinite import GIVE_WEIGHT, ReadsLater
from pipetrain.runtime.stage.stage import Stage
from pipetrain.tasks import Task

MOST_KEPT = 2**18  # numbers in the outputs of a microbatch
TOLERANCE, SAME = 1e-5, 1e-9  # relative, for the batch, and for a microbatch that is computed twice


class BatchLoss(ReadsLater):
    """Stops a training if the loss of a batch is not that of its microbatches.

    Not compared are losses that differ when called again, as with random numbers, that read weights, or that
    do not accept float64 or a whole batch.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._compares = True
        self._outputs: dict[int, tuple[Tensors, Target]] = {}  # by microbatch
        self._largest = 0.0  # loss so far

    def needs_outputs(self) -> bool:
        update = self._stage.weights.updates
        return self._compares and (self._stage.rehearses or update & (update + 1) == 0)

    def after_forward(self, microbatch: Microbatch, outputs: Tensors, results: Tensors) -> None:
        if self.needs_outputs() and microbatch.target and sum(t.numel() for t in results) <= MOST_KEPT:
            self._outputs[microbatch.mb] = tuple(t.detach() for t in results), microbatch.target

    def after_reduce(self, batch: Batch) -> None:
        saved = [self._outputs.pop(mb) for mb in batch.mbs if mb in self._outputs]
        counted = [(outputs, target) for outputs, target in saved if target.weight]
        if not self._compares or len(saved) < len(batch.mbs) or len(counted) < 2:
            return
        try:
            with RngSnapshot().replayed():
                loss = partial(self._loss, self._stage.counts.task.copied())
                whole, *parts, again = map(loss, [counted, *([piece] for piece in counted), counted[-1:]])
                share = sum(part * target.share for part, (_, target) in zip(parts, counted, strict=True))
                numbers = torch.stack([whole, torch.as_tensor(share), parts[-1], again])
        except Exception:  # a user's loss may raise anything
            self._compares = False
            return
        self._compares = not numbers.requires_grad
        if self._compares and not self._stage.rehearses:
            self._read_later(partial(self._look, self._stage.weights.updates), numbers)

    def _loss(self, task: Task, counted: Sequence[tuple[Tensors, Target]]) -> Tensor:
        """Return the mean loss of several microbatches in one call."""
        outputs, targets = zip(*counted, strict=True)
        rows = [target.samples for target in targets]
        if any([len(t) for t in column] != rows for column in zip(*outputs, strict=True)):
            raise ValueError("outputs need a row for each sample")
        targets_joined = join([target.value for target in targets])
        whole = self._stage.counts.model_output(tuple(map(torch.cat, zip(*outputs, strict=True))))
        return task.loss(*(cast_floats(value, torch.float64) for value in (whole, targets_joined)))

    def _look(self, update: int, numbers: list[float]) -> None:
        whole, parts, last, again = numbers
        self._compares = self._compares and not abs(again - last) > SAME * abs(last)
        if not self._compares or not math.isfinite(whole) or not math.isfinite(parts):
            return
        # A loss near zero, as one of either sign may be, shows only rounding.
        self._largest = max(self._largest, abs(whole))
        if abs(whole - parts) > TOLERANCE * max(abs(whole), 1e-2 * self._largest):
            raise TrainingStopped(
                f"the loss of the batch of update {update} is {whole:.6g}, and that of its microbatches is "
                f"{parts:.6g}: it compares samples, or is no mean over what counts; {GIVE_WEIGHT}, or set "
                f"microbatches=1"
            )
