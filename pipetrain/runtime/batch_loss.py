"""Compares the loss of a batch with that of its microbatches, while a training goes on.

What is tried before the first update is the first batch, and a mask may matter in a later one alone. So of
the batches 1, 2, 4, 8, ... the last stage keeps the outputs, without their graph, until the update. The loss
of all of them together must be what the losses of the microbatches, each with its share, add up to. All are
computed in float64, in which nothing but a loss of another kind makes them differ.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import torch
from torch import nn

from pipetrain.errors import TrainingStopped
from pipetrain.network.draws import Beginning
from pipetrain.runtime.finite import WEIGH, Awaiting
from pipetrain.runtime.microbatch import Batch
from pipetrain.runtime.stage import Stage
from pipetrain.tasks import Task

TOLERANCE, SAME = 1e-5, 1e-9  # relative, of the batch and of a microbatch that is computed twice


class BatchLoss(Awaiting):
    """Stops a training if the loss of a batch is not that of its microbatches.

    A loss that is another when it is called again, as one that draws, is not compared, nor is one that reads
    weights, or takes no float64 or no whole batch.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._compares = True
        self._largest = 0.0  # loss so far

    def keeps_outputs(self) -> bool:
        update = self._stage.weights.updates
        return self._compares and (self._stage.rehearses or update & (update + 1) == 0)

    def after_reduce(self, batch: Batch) -> None:
        kept = [one for one in batch.kept if one is not None and one.target.weight]
        if not self._compares or None in batch.kept or len(kept) < 2:
            return
        try:
            with Beginning().again(), _copied(self._stage.counts.task) as task:
                joined = partial(self._stage.counts.joined, task)
                whole, *parts, again = map(joined, [kept, *([one] for one in kept), kept[-1:]])
                parted = torch.stack([part * one.target.share for part, one in zip(parts, kept, strict=True)])
        except Exception:  # a user's loss may raise anything
            self._compares = False
            return
        self._compares = not whole.requires_grad
        if self._compares and not self._stage.rehearses:
            look = partial(self._look, self._stage.weights.updates)
            self._await(look, torch.stack([whole, parted.sum(), parts[-1], again]))

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


@contextmanager
def _copied(task: Task) -> Iterator[Task]:
    """Yield a copy of a task, which may count its calls; a function that does gets its variables back."""
    function = task.function
    if inspect.ismethod(function):
        raise TypeError("a copy would be of the whole object")
    if not inspect.isfunction(function):
        owners = [task, function] if hasattr(function, "__dict__") else [task]
        modules = [
            value for owner in owners for value in vars(owner).values() if isinstance(value, nn.Module)
        ]
        yield deepcopy(task, {id(p): p for module in modules for p in module.parameters()})
        return
    before = inspect.getclosurevars(function)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    try:
        yield task
    finally:
        function.__globals__.update(before.globals)
        for name, value in before.nonlocals.items():
            cells[name].cell_contents = value
