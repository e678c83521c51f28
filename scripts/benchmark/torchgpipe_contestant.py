"""Ours beside torchgpipe 0.0.7 on CPUs: a process a stage here, one process with a thread a device there.

Both have the same layers, cut, weights, batch, microbatches and optimizer, and take turns. There, backwards
run in one thread: autograd has one a device, and all CPUs are one. So the time of forwards stands apart.
`pip install pipetrain[records]`
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torchgpipe import GPipe, is_recomputing
from torchgpipe.dependency import fork, join
from torchgpipe.skip import Namespace, pop, skippable, stash

from benchmark.allocated import Allocated
from benchmark.contestants import Ours, Theirs
from benchmark.tasks import Job
from pipetrain.model.chain import Pop, Stash
from pipetrain.model.specs import as_tuple
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.actions import Op
from pipetrain.schedule.timeline import Row


@skippable(stash=["skip"])
class Stashing(nn.Module):
    """A Stash of a tensor."""

    def forward(self, x):  # type: ignore[no-untyped-def]
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Popping(nn.Module):
    """The Pop of a tensor."""

    def __init__(self, join: nn.Module) -> None:
        super().__init__()
        self.join = join

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.join((*as_tuple(x), (yield pop("skip"))))


def skipping(model: nn.Sequential) -> nn.Sequential:
    """Return the layers of a chain, with skips of torchgpipe's. A Stash must keep a tensor, not a tuple."""
    spaces: dict[nn.Module, Namespace] = {layer: Namespace() for layer in model if isinstance(layer, Stash)}
    kinds: dict[nn.Module, Any] = {layer: Stashing() for layer in spaces}
    kinds |= {layer: Popping(layer.join) for layer in model if isinstance(layer, Pop)}
    for layer, kind in kinds.items():
        kind.isolate(spaces[layer.stash if isinstance(layer, Pop) else layer])
    return nn.Sequential(*(kinds.get(layer, layer) for layer in model))


class Tokens(nn.Module):
    """A first layer of tokens as floats: torchgpipe orders microbatches by gradients, which integers lack."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, x: Tensor) -> Tensor:
        x, phony = fork(x)
        y: Tensor = join(self._layer(x.long()), phony)
        return y


class Device(nn.Module):
    """A partition of torchgpipe's whose bytes are counted, with a copy of what goes to the next device."""

    def __init__(self, partition: nn.Module, stage: int, allocated: Allocated) -> None:
        super().__init__()
        self._partition, self._stage, self._allocated = partition, stage, allocated

    def forward(self, x: Any) -> Any:
        stage, allocated, again = self._stage, self._allocated, is_recomputing()
        with nullcontext() if again else allocated:  # a backward's thread is counted already
            with allocated.at(stage):
                y = self._partition(x)
            if not again and stage + 1 < allocated.stages:
                with allocated.at(stage + 1):
                    y = tree_map(Tensor.clone, y)
        allocated.mark(stage, tree_leaves(y), tree_leaves(x))
        return y


class TorchGPipe(Theirs):
    """torchgpipe at the cut of a job's plan, on rank 0. `forwards`: the start and end of those of a batch."""

    def __init__(
        self, job: Job, groups: ProcessGroups, batches: int, checkpoint: str, deferred: bool
    ) -> None:
        job.plan.numerics.arrange_weights(job.model)
        slices, m = job.plan.cut.slices, job.microbatches
        how = {"checkpoint": checkpoint, "deferred_batch_norm": deferred, "devices": ["cpu"] * len(slices)}
        samples, layers = job.plan.numerics.arrange(job.samples), skipping(job.model)
        if not samples.is_floating_point():
            samples, layers[0] = samples.float().requires_grad_(), Tokens(layers[0])
        self._gpipe = GPipe(layers, [one.end - one.start for one in slices], chunks=m, **how)
        self.forwards: list[tuple[float, float]] = []

        def backward() -> Tensor:
            start = time.perf_counter()
            loss = job.task.loss(self._gpipe(samples), job.targets)
            self.forwards.append((start, time.perf_counter()))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        super().__init__("torchgpipe", job, batches, job.model, backward, 0 if groups.world.rank else 1)

    def peaks(self) -> list[int]:
        """Take a turn, and return the most bytes of each device in it."""
        partitions = [*self._gpipe.partitions]
        allocated = Allocated(len(partitions))
        devices = (Device(one, stage, allocated) for stage, one in enumerate(partitions))
        self._gpipe.partitions = nn.ModuleList(devices)
        with allocated.counting():
            self.run()
        return allocated.peaks() if self._threads else []


class OurRank(Ours):
    """Ours, with `forwards` as those of TorchGPipe; an infinite end where they stand among backwards."""

    timed = True

    def __init__(self, name: str, job: Job, groups: ProcessGroups, batches: int) -> None:
        super().__init__(name, job, groups, batches)
        self.forwards: list[tuple[float, float]] = []

    def measured(self, row: Row) -> None:
        ops = [(span.action.op, span.end) for span in row.spans if span.action is not None]
        ended = max(end for op, end in ops if op is Op.F)
        among = any(op in (Op.B, Op.I) and end < ended for op, end in ops)
        self.forwards.append((row.began, math.inf if among else ended))

    def peaks(self) -> list[int]:
        """Take a turn, and return the most bytes of this rank in it."""
        allocated = Allocated(1)
        with allocated.counting():
            self.run()
        return allocated.peaks()
