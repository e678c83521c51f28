"""Ours beside torchgpipe 0.0.7 on CPUs: a process a stage here, one process with a thread a device there.

Both have the same layers, cut, weights, batch, microbatches and optimizer, and take turns. There, backwards
run in one thread: autograd has one a device, and all CPUs are one. So the time of forwards stands apart.
`pip install pipetrain[records]`
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torchgpipe import GPipe, is_recomputing
from torchgpipe.skip import Namespace, pop, skippable, stash

from benchmark.allocated import Allocated
from benchmark.contestants import Ours, Theirs, Ways, race
from benchmark.tasks import Job, Task, prepare
from benchmark.worlds import Say, run_world
from pipetrain.model.chain import Pop, Stash
from pipetrain.model.specs import as_tuple
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.actions import Op
from pipetrain.schedule.timeline import Row

WAYS: Ways = {"gpipe": ("gpipe",), "1f1b": ("1f1b",)}


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
        self._gpipe = GPipe(skipping(job.model), [one.end - one.start for one in slices], chunks=m, **how)
        samples = job.plan.numerics.arrange(job.samples)
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

    def __init__(self, name: str, job: Job, groups: ProcessGroups, batches: int) -> None:
        super().__init__(name, job, groups, batches)
        self.forwards: list[tuple[float, float]] = []
        self.observe = self._observe

    def _observe(self, row: Row) -> None:
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


def compete(
    groups: ProcessGroups, say: Say, task: Task, ways: Ways, how: Any, rounds: int, batches: int
) -> Any:
    """Race all; return for each the seconds of batches, forwards, peaks and losses that this rank knows."""
    ours = {
        name: prepare(task.extended(*more), way, groups.world.size) for name, (way, *more) in ways.items()
    }
    all_of_them = [OurRank(name, job, groups, batches) for name, job in ours.items()]
    theirs = [TorchGPipe(prepare(task, "gpipe", groups.world.size), groups, batches, *how)] if how else []
    contestants: list[Any] = [*all_of_them, *theirs]
    series = race(groups, contestants, rounds, say)
    return {
        one.name: (series[one.name], one.forwards[-rounds * one.batches :], one.peaks(), one.losses)
        for one in contestants
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median of values, the least, the most, and all in their order."""
    return {"median": median(values), "least": min(values), "most": max(values), "all": list(values)}


def race_torchgpipe(
    overrides: Sequence[str],
    balance: Sequence[int],
    batch: int,
    microbatches: int,
    recompute: str = "never",
    rounds: int = 5,
    ways: Ways = WAYS,
    example: Sequence[int] | None = (3, 32, 32),
    classes: int = 10,
    deferred: bool = False,
    batches: int = 1,
    beside: bool = True,
    say: Say = print,
) -> dict[str, dict[str, Any]]:
    """Race schedules of ours `beside` torchgpipe; return the figures of each, which JSON can have.

    `overrides`: of the configuration, such as model=gpt. `balance`: layers of each stage. `recompute`: never,
    always or except_last (the last stage here, the last microbatch there). `deferred`: BatchNorm's statistics
    move by batches. `batches`: of a turn. `example`, `classes`: see Task.

    Figures: `step_s` and `forward_s` of a batch, the latter None where forwards stand among backwards;
    `peak_bytes` of each rank or device, see `allocated`; `losses` of as many batches for all.
    """
    cuts = str([*accumulate(balance)][:-1]) if len(balance) > 1 else "even"
    words = [f"batch_size={batch}", f"microbatches={microbatches}", f"recompute={recompute}"]
    words += [f"partition={cuts}", f"batchnorm={'batch' if deferred else 'microbatch'}"]
    task = Task((*overrides, *words), None if example is None else tuple(example), classes)
    how = (recompute, deferred) if beside else ()
    ranks = run_world(compete, len(balance), say, task, ways, how, rounds, batches)
    figures: dict[str, dict[str, Any]] = {}
    for name, (seconds, *_) in ranks[0].items():
        _, forwards, peaks, losses = zip(*(rank[name] for rank in ranks), strict=True)
        marks = zip(*filter(None, forwards), strict=True)
        forward = [max(end for _, end in of) - min(start for start, _ in of) for of in marks]
        figures[name] = {
            "step_s": spread(seconds),
            "forward_s": spread(forward) if max(forward) < math.inf else None,
            "peak_bytes": [nbytes for of_rank in peaks for nbytes in of_rank],
            "losses": next(filter(None, losses)),
        }
    return figures
