"""Makes the buffers of a stage's replicas equal: between windows, before an evaluation or a checkpoint.

Each replica has running statistics of its own, of the microbatches that it ran. Their mean, weighted by the
samples of each since they were last equal, is what an evaluation uses and a checkpoint holds, and with what
all go on. A counter of whole numbers, such as num_batches_tracked, becomes the sum of what all have counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipetrain.model.numerics import numbers_of
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.stage.batchnorm import BatchStatistics
from pipetrain.runtime.stage.stage import Stage


class BufferAverager:
    """Averages the buffers of this rank's replicas. All ranks call it at the same places."""

    def __init__(self, stages: Mapping[int, Stage], groups: ProcessGroups) -> None:
        replicated = {index: stage for index, stage in stages.items() if len(groups.placement[index]) > 1}
        self.stages = {index: stage for index, stage in replicated.items() if any(_numbers(stage))}
        self._groups = groups
        self._samples = dict.fromkeys(self.stages, 0)  # since they were equal
        self._counted: dict[int, list[Tensor]] = {}  # counters as they then were

    def before_window(self) -> None:
        """Save the counters, if the replicas are equal."""
        for index, stage in self.stages.items():
            if index not in self._counted:
                self._counted[index] = [t.clone() for t in _numbers(stage)[1]]

    def count(self, index: int, samples: int) -> None:
        self._samples[index] += samples

    @torch.no_grad()
    def average(self) -> None:
        """Make the replicas' buffers equal, if they have trained since they were."""
        for index, stage in self.stages.items():
            if index not in self._counted:
                continue
            means, counters = _numbers(stage)
            samples, before = self._samples[index], self._counted.pop(index)
            self._samples[index] = 0
            # Without samples its part is 0: 0 times an infinity, as in a mask, is NaN.
            weighted = [t.double() * samples if samples else torch.zeros_like(t).double() for t in means]
            counted = [(value - old).double() for value, old in zip(counters, before, strict=True)]
            addends = [(weighted + counted)[0].new_full((1,), samples), *weighted, *counted]
            sums = self._groups.sum_over_ranks((index,), torch.cat([t.flatten() for t in addends]))
            parts_of_sums = torch.split(sums, [t.numel() for t in addends])
            total, *parts = (part.view_as(t) for part, t in zip(parts_of_sums, addends, strict=True))
            for tensor, part in zip(means, parts, strict=False):
                tensor.copy_(part / total)
            for tensor, old, part in zip(counters, before, parts[len(means) :], strict=True):
                tensor.copy_(old + part.to(tensor.dtype))


def _numbers(stage: Stage) -> tuple[list[Tensor], list[Tensor]]:
    """Return a stage's buffers that have a mean, and those that count; each replica keeps its own booleans.

    Those that batchnorm=batch moves are equal anyway.
    """
    by_batch = [observer.buffers for observer in stage.observers if isinstance(observer, BatchStatistics)]
    buffers = [numbers_of(t) for t in stage.module.buffers() if id(t) not in set().union(*by_batch)]
    means = [t for t in buffers if t.is_floating_point()]
    return means, [t for t in buffers if not t.is_floating_point() and t.dtype is not torch.bool]
