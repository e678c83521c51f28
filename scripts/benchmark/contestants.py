"""The contestants, and their race: in the same processes they take turns, each timed from a barrier.

`Ours` is the real engine over the real channel, driven as the trainer drives it; what is left out is what the
others have not either: reading and augmenting images, evaluation, records. The others train the same job: the
same layers and cut, the same batch in the same microbatches, the same optimizer.
"""

from __future__ import annotations

import gc
import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.nn.parallel import DistributedDataParallel

from benchmark.report import Series
from benchmark.tasks import LR, Job
from benchmark.worlds import Say, fitted
from pipetrain.network.values import TensorSpec
from pipetrain.runtime.channel import Channel
from pipetrain.runtime.clock import Clock
from pipetrain.runtime.feed import Target
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.order import order_of
from pipetrain.runtime.session import make_engine, make_stages
from pipetrain.runtime.times import Observe
from pipetrain.schedule.timeline import StageStats

FULL = ", once full"
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
ZERO_BUBBLE = {"InterleavedZeroBubble": ScheduleInterleavedZeroBubble, "ZBVZeroBubble": ScheduleZBVZeroBubble}
"""They split the backward by walking the graph, and want a list of a rank's stages."""
RIVALS = {"gpipe": "torch GPipe", "1f1b": "torch 1F1B"}
"""By ours: the one that should never be faster."""

T = TypeVar("T")


class Contestant(Protocol):
    """Something that trains, on one rank. `batches`: how many it does in a turn, each in `microbatches`.

    `losses`: the mean loss of each batch of its last turn, where this rank knows them.
    """

    name: str
    batches: int
    microbatches: int
    losses: list[float]

    def run(self) -> float | None:
        """Take a turn. Returns the seconds a batch once the pipeline is full, where this rank knows them."""


def race(mesh: Mesh, contestants: Sequence[Contestant], rounds: int, say: Say, warmup: int = 1) -> Series:
    """Return the seconds a batch of each contestant in each round, on every rank alike.

    A turn takes from the first rank's start to the last rank's end. Warm-up rounds are not counted. Where a
    contestant knows its time once full, that is a series of its own, named with FULL.
    """
    series: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(-warmup, rounds):
        counted = number >= 0
        for contestant in rotated(contestants, number):
            say(f"{f'round {number + 1}/{rounds}' if counted else 'warm-up'}: {contestant.name}")
            seconds, full = _turn(mesh, contestant)
            if counted:
                series[contestant.name].append(seconds)
            if counted and full is not None:
                series[contestant.name + FULL].append(full)
    return dict(series)


def rotated(contestants: Sequence[T], number: int) -> list[T]:
    """Return the order of a round, which rotates so that nobody always comes after the same one."""
    first = number % len(contestants)
    return [*contestants[first:], *contestants[:first]]


def _turn(mesh: Mesh, contestant: Contestant) -> tuple[float, float | None]:
    gc.collect()  # nobody pays for what another left behind
    mesh.gather("the start of a turn", None)
    start = time.perf_counter()
    full = contestant.run()
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)  # a rank that knows no loss has not waited for its GPU
    end = time.perf_counter()
    laps: list[tuple[float, float, float | None]] = mesh.gather("a turn's times", (start, end, full))
    starts, ends, known = zip(*laps, strict=True)
    seconds = (max(ends) - min(starts)) / contestant.batches
    return seconds, next((f for f in known if f is not None), None)


class BatchFeed:
    """The same batch again and again, from memory, in the plan's layout. See engine.Feed."""

    def __init__(self, job: Job, device: torch.device) -> None:
        samples = job.plan.numerics.arrange(job.samples.to(device))
        self._inputs = samples.chunk(job.microbatches)
        targets = job.targets.to(device).chunk(job.microbatches)
        self._weight = job.task.weight
        weights = [float(self._weight(part)) for part in targets]
        self._targets = [
            Target(part, weight, weight / sum(weights)) for part, weight in zip(targets, weights, strict=True)
        ]

    def size(self, mb: int) -> int:
        """Return the samples in a microbatch."""
        return len(self._inputs[0])

    def input(self, mb: int) -> tuple[Tensor, ...]:
        """Return a microbatch's samples."""
        return (self._inputs[mb % len(self._inputs)],)

    def target(self, mb: int) -> Target:
        """Return a microbatch's targets."""
        return self._targets[mb % len(self._targets)]

    def prepare(self) -> None:
        """There is nothing to make."""

    def first(self) -> tuple[tuple[Tensor, ...] | None, Target | None]:
        """Return the first microbatch's inputs and targets, without taking them."""
        return self.input(0), self.target(0)


class Ours:
    """A schedule of pipetrain's. A turn is so many batches, in whole windows, and one window at least."""

    def __init__(
        self,
        name: str,
        job: Job,
        mesh: Mesh,
        batches: int = 1,
        channel: Channel | None = None,
        clock: Clock | None = None,
    ) -> None:
        plan, mesh = job.plan, fitted(mesh, job.plan)
        window = max(plan.windows)
        self.name = name
        self.plan = plan
        self.microbatches = job.microbatches
        self._windows = max(1, batches // window)
        self.batches = self._windows * window
        self.actions = plan.windows[window].program[mesh.world.rank]  # where a policy decides: as many
        self.losses: list[float] = []
        self.observe: Observe | None = None  # gets the spans of each window
        self._feed = BatchFeed(job, mesh.device)
        self._full_after = plan.stages if window > 2 * plan.stages else None  # updates; None: never full
        self._updates: list[float] = []
        self._rank = mesh.world.rank
        self._last = plan.placement[-1] == self._rank
        self._stages = make_stages(plan, job.model, job.task, job.optimizer, plan.settings.rate(1), mesh)
        self._engine = make_engine(plan, self._stages, mesh, channel, clock)

    @property
    def stats(self) -> dict[int, StageStats]:
        """What each stage of this rank has done."""
        return self._engine.stats

    def run(self) -> float | None:
        """Train whole windows. The rank of the last stage knows when the pipeline was full."""
        self._updates.clear()
        for _ in range(self._windows):
            order = order_of(self.plan, max(self.plan.windows), self._rank)
            self._engine.train(order, self._feed, self.microbatches, self._count, self.observe)
        if self._last:
            self.losses = self._stages[self.plan.stages - 1].take_losses()
        if not self._last or self._full_after is None:
            return None
        full = self._updates[self._full_after :]
        return (full[-1] - full[0]) / (len(full) - 1)

    def _count(self, stage: int) -> None:
        if stage == self.plan.stages - 1:
            self._updates.append(time.perf_counter())


class Theirs(ABC):
    """A loop that trains a module batch by batch, with the job's optimizer."""

    def __init__(self, name: str, job: Job, module: nn.Module, batches: int, microbatches: int) -> None:
        self.name, self.batches, self.microbatches = name, batches, microbatches
        self.losses: list[float] = []
        self._module = module.train()
        self._optimizer = job.optimizer(module.named_parameters())

    @abstractmethod
    def _backward(self) -> Tensor | None:
        """Work out a batch's gradients. Returns its loss, where this rank knows it."""

    def run(self) -> None:
        """Train some batches, and see that the loss stays a number."""
        losses = []
        for _ in range(self.batches):
            loss = self._backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            if loss is not None:
                losses.append(loss.detach())
        if losses:  # at the turn's end: to look at a number makes a GPU's host wait
            self.losses = torch.stack(losses).tolist()
            assert all(map(math.isfinite, self.losses)), f"losses {self.losses}: {self.name} does not train"


class Innermost(nn.Module):
    """A stage in channels_last whose messages are contiguous: they travel with their channels innermost.

    `enters`, `leaves`: whether there is a message before it, and behind it.
    """

    def __init__(self, stage: nn.Module, enters: bool, leaves: bool) -> None:
        super().__init__()
        self.stage, self._enters, self._leaves = stage, enters, leaves

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage."""
        if self._enters and x.dim() == 4:
            x = x.permute(0, 3, 1, 2)
        y: Tensor = self.stage(x)
        return y.permute(0, 2, 3, 1).contiguous() if self._leaves and y.dim() == 4 else y


class TorchPipeline(Theirs):
    """A schedule of torch.distributed.pipelining over the job's stages, where the job's plan has them.

    `group`: of all ranks, for its messages; None: the default one. `arranged`: in the plan's layout, as ours;
    else contiguous. On a GPU each stage runs once alone, because what is run for the first time while a
    receive is posted may wait for it for good.
    """

    def __init__(
        self,
        schedule: str,
        job: Job,
        mesh: Mesh,
        batches: int,
        group: dist.ProcessGroup | None = None,
        arranged: bool = False,
    ) -> None:
        plan, rank = job.plan, mesh.world.rank
        numbers = [stage for stage, on in enumerate(plan.placement) if on == rank]
        last = plan.stages - 1
        parts: dict[int, nn.Module] = {stage: job.stage(stage).to(mesh.device) for stage in numbers}
        samples = job.samples.to(mesh.device)
        if arranged:
            samples = plan.numerics.arrange(samples)
            for part in parts.values():
                plan.numerics.arrange_weights(part)
            if plan.numerics.channels_last:
                parts = {stage: Innermost(part, stage > 0, stage < last) for stage, part in parts.items()}
        super().__init__(f"torch {schedule}", job, nn.ModuleList(parts.values()), batches, job.microbatches)
        self._inputs = (samples,) if 0 in parts else ()
        self._targets = job.targets.to(mesh.device) if last in parts else None
        loss = job.task.to(mesh.device).loss
        if mesh.device.type == "cuda":
            for stage, part in parts.items():
                _rehearse(
                    part, _entering(job, stage, samples), loss if stage == last else None, self._targets
                )
        made = {**SCHEDULES, **ZERO_BUBBLE}[schedule]
        stages = [
            PipelineStage(part, stage, plan.stages, mesh.device, group=group) for stage, part in parts.items()
        ]
        several = issubclass(made, PipelineScheduleMulti)
        # Gradients are divided by the number of microbatches, so that an update is the batch's mean, as ours.
        self._schedule = made(
            stages if several else stages[0], job.microbatches, loss_fn=loss, scale_grads=True
        )

    def _backward(self) -> Tensor | None:
        losses: list[Tensor] = []
        self._schedule.step(*self._inputs, target=self._targets, losses=losses, return_outputs=False)
        if self._targets is None:
            return None
        assert len(losses) == self.microbatches
        return torch.stack(losses).mean()


def _entering(job: Job, stage: int, samples: Tensor) -> Tensor:
    """Return what enters a stage of TorchPipeline's, made up but for the first one."""
    if stage == 0:
        return samples[: job.size]
    x = _random(job.plan.cut.entering(stage, job.size)[0]).to(samples.device)
    if job.plan.numerics.channels_last and x.dim() == 4:
        x = x.permute(0, 2, 3, 1).contiguous()
    return x.requires_grad_()


def _rehearse(
    part: nn.Module, x: Tensor, loss: Callable[[Tensor, Tensor], Tensor] | None, targets: Tensor | None
) -> None:
    """Run a stage once, forward and backward, and forget its gradients."""
    outputs = part(x)
    if loss is not None and targets is not None:
        outputs = loss(outputs, targets[: len(x)])
    outputs.backward(torch.ones_like(outputs))
    part.zero_grad()


class Plain(Theirs):
    """A plain PyTorch loop over the whole model, on rank 0 alone or, with `parallel`, shared by all (DDP).

    `pieces`: into which a batch is cut, whose gradients add up. `arranged`: in the plan's layout, as ours;
    else contiguous.
    """

    def __init__(
        self,
        name: str,
        job: Job,
        mesh: Mesh,
        batches: int,
        threads: int = 1,
        parallel: bool = False,
        pieces: int = 1,
        arranged: bool = False,
    ) -> None:
        rank, ranks = mesh.world.rank, mesh.world.size
        model: nn.Module = job.model.to(mesh.device)
        samples, targets = job.samples.to(mesh.device), job.targets.to(mesh.device)
        if arranged:
            job.plan.numerics.arrange_weights(model)
            samples = job.plan.numerics.arrange(samples)
        if parallel:
            model = DistributedDataParallel(job.model)
            samples, targets = samples.chunk(ranks)[rank], targets.chunk(ranks)[rank]
        self._batch = list(zip(samples.chunk(pieces), targets.chunk(pieces), strict=True))
        super().__init__(name, job, model, batches, pieces)
        self._loss = job.task.to(mesh.device).loss
        self._threads = threads
        self._works = parallel or rank == 0

    def run(self) -> None:
        """Train, on the ranks that take part."""
        if self._works:
            torch.set_num_threads(self._threads)
            super().run()
            torch.set_num_threads(1)

    def _backward(self) -> Tensor:
        losses = []
        for samples, targets in self._batch:
            loss = self._loss(self._module(samples), targets) / len(self._batch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()


class Alone(Theirs):
    """The no-communication ideal: each rank trains its own stage on local tensors, all at the same time.

    Inputs and output gradients are random tensors of the right shapes, in the job's layout; a turn ends with
    the slower stage.
    """

    def __init__(self, name: str, job: Job, mesh: Mesh, batches: int) -> None:
        index, numerics = mesh.world.rank, job.plan.numerics
        module = job.stage(index)
        numerics.arrange_weights(module)
        super().__init__(name, job, module, batches, job.microbatches)
        self._inputs = numerics.arrange(job.samples.chunk(job.microbatches)[0])
        self._loss = job.task.loss
        self._targets = job.targets.chunk(job.microbatches)[0]
        if index > 0:
            (entering,) = job.plan.cut.entering(index, job.size)
            self._inputs = numerics.arrange(_random(entering)).requires_grad_()
        self._grads = None
        if index < job.plan.stages - 1:
            (leaving,) = job.plan.cut.entering(index + 1, job.size)
            self._grads = numerics.arrange(_random(leaving)) * LR

    def _backward(self) -> None:
        for _ in range(self.microbatches):
            self._inputs.grad = None
            outputs = self._module(self._inputs)
            if self._grads is None:
                outputs = self._loss(outputs, self._targets) / self.microbatches
            outputs.backward(self._grads)


def _random(spec: TensorSpec) -> Tensor:
    return torch.randn(spec.shape, dtype=spec.dtype)
