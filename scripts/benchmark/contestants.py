"""The contestants, and their race: in the same processes they take turns, each timed from a barrier.

`Ours` is the real engine over the real channel, driven as the trainer drives it; what is left out is what the
others have not either: reading and augmenting images, evaluation, records. The others train the same job: the
same layers and cut, the same batch in the same microbatches, the same optimizer and memory format.
"""

from __future__ import annotations

import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmark.report import Row, Series, failed_row, timed_row
from benchmark.tasks import Job, Scale, Task, prepare
from benchmark.worlds import CPU, Place, Say, WorldFailed, fitted, run_world
from pipetrain.config.rate import LearningRate
from pipetrain.runtime.comm.channel import Channel
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.microbatch_feed import RepeatedFeed, Target
from pipetrain.runtime.rank_actions import order_of
from pipetrain.runtime.session import make_engine
from pipetrain.runtime.stage.stage_factory import make_stages
from pipetrain.schedule import timeline

TORCHS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
"""Of torch.distributed.pipelining, by ours of the same order. The last two split a backward by the graph."""


class Contestant(Protocol):
    """Something that trains, on one rank. `batches`: how many it does in a turn.

    `losses`: the mean loss of each batch of its last turn, where this rank knows them. `bound`: the seconds
    of a batch on paper, or 0.
    """

    name: str
    batches: int
    losses: list[float]
    bound: float

    def run(self) -> None:
        """Take a turn."""


Builders = Mapping[str, Callable[[], Contestant]]
"""By name, what builds each contestant of a race on one rank."""

Make = Callable[[ProcessGroups], Builders]


@dataclass(frozen=True, slots=True)
class Turn:
    """Who is at work, on all ranks alike."""

    when: str
    name: str

    def __str__(self) -> str:
        return f"{self.when}: {self.name}"


def rows_of_race(
    title: str,
    ranks: int,
    make: Make,
    scale: Scale,
    say: Say,
    against: Mapping[str, str],
    least: Mapping[str, Mapping[str, float]],
    place: Place = CPU,
) -> Iterator[Row]:
    """Race in processes of their own, and give a row for each contestant.

    One that fails takes its processes with it: the others race anew without it, for others may wait within
    its messages for ever.

    `against`: of each column of ratios, the other contestant, left out where it does not take part; {name} is
    the row's own, {m} what stands behind its last comma. `least`: by contestant, what the ratios should be.
    """
    failed: list[str] = []
    at_work = ""

    def heard(turn: Turn) -> None:
        nonlocal at_work
        at_work = turn.name
        say(f"{title}: {turn}")

    while True:
        try:
            raced = run_world(_race, ranks, heard, make, scale.rounds, tuple(failed), place=place)
            break
        except WorldFailed as error:
            if not at_work or at_work in failed:  # nobody's own fault
                raise
            failed.append(at_work)
            yield failed_row(title, at_work, error)
    series, bounds = raced[0]
    for name in series:
        names = {column: other.format(name=name, m=name.split(", ")[-1]) for column, other in against.items()}
        others = {column: series[other] for column, other in names.items() if other in series}
        if bounds.get(name):
            others["of bound"] = [bounds[name]] * scale.rounds
        yield timed_row(title, name, series[name], others, least.get(name, {}))


def _race(
    groups: ProcessGroups, say: Say, make: Make, rounds: int, without: Collection[str]
) -> tuple[Series, Mapping[str, float]]:
    """Build and race all but those `without` which it goes; return the series, and the bounds."""
    contestants: list[Contestant] = []
    for name, build in make(groups).items():
        if name not in without:
            say(Turn("building", name))
            groups.gather("the start of building", None)
            contestants.append(build())
            groups.gather("the end of building", None)
    bounds = {contestant.name: contestant.bound for contestant in contestants}
    return race(groups, contestants, rounds, say), bounds


def race(groups: ProcessGroups, contestants: Sequence[Contestant], rounds: int, say: Say) -> Series:
    """Return the seconds a batch of each contestant in each round, on every rank alike.

    A turn takes from the first rank's start to the last rank's end. The first round, to warm up, is not
    counted. The order rotates, so that nobody always comes after the same one.
    """
    series: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(-1, rounds) if contestants else ():
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            say(Turn(f"round {number + 1}/{rounds}" if number >= 0 else "warm-up", contestant.name))
            seconds = _turn(groups, contestant)
            if number >= 0:
                series[contestant.name].append(seconds)
    return {contestant.name: series[contestant.name] for contestant in contestants}


def _turn(groups: ProcessGroups, contestant: Contestant) -> float:
    gc.collect()  # nobody pays for what another left behind
    groups.gather("the start of a turn", None)
    start = time.perf_counter()
    contestant.run()
    if groups.device.type == "cuda":
        torch.cuda.synchronize(groups.device)  # a rank that knows no loss has not waited for its GPU
    starts, ends = zip(*groups.gather("a turn's times", (start, time.perf_counter())), strict=True)
    seconds: float = (max(ends) - min(starts)) / contestant.batches
    return seconds


class BatchFeed(RepeatedFeed):
    """The same batch again and again, from memory, in the plan's layout; `clones`: see RepeatedFeed."""

    def __init__(self, job: Job, device: torch.device, clones: bool = False) -> None:
        inputs = job.plan.numerics.arrange(job.samples.to(device)).chunk(job.microbatches)
        targets = job.targets.to(device).chunk(job.microbatches)
        weights = [float(job.task.weight(part)) for part in targets]
        parts = zip(targets, weights, strict=True)
        counted = [Target(part, weight, weight / sum(weights)) for part, weight in parts]
        super().__init__(job.size, [(part,) for part in inputs], counted, clones)


class Ours:
    """A schedule of pipetrain's. A turn is so many batches, in whole windows, and one window at least.

    `others`: the job with the batch of each window in turn; without them it is always its own.
    """

    bound = 0.0
    timed = False

    def __init__(
        self,
        name: str,
        job: Job,
        groups: ProcessGroups,
        batches: int = 1,
        channel: Channel | None = None,
        others: Sequence[Job] = (),
    ) -> None:
        plan, groups = job.plan, fitted(groups, job.plan)
        self.name, self.plan, self._microbatches = name, plan, job.microbatches
        self.window = max(plan.windows)
        self._windows = max(1, batches // self.window)
        self.batches = self._windows * self.window
        self.losses: list[float] = []
        self._feeds = [BatchFeed(other, groups.device) for other in others or [job]]
        self._rank = groups.world.rank
        self._stages = make_stages(
            plan, job.model, job.task, job.optimizer, LearningRate(plan.settings.rate(1)), groups
        )
        self._engine = make_engine(plan, self._stages, groups, channel)

    def run(self) -> None:
        """Train whole windows."""
        for _, feed in zip(range(self._windows), cycle(self._feeds), strict=False):
            order = order_of(self.plan, self.window, self._rank)
            row = self._engine.train(order, feed, timed=self.timed)
            if row is not None:
                self.measured(row)
        if self._rank in self.plan.placement[-1]:
            self.losses = self._stages[self.plan.stages - 1].counts.take_losses()

    def measured(self, row: timeline.Row) -> None:
        """Take the measured spans of a window, where it is `timed`."""


Ways = Mapping[str, tuple[str, ...]]
"""By contestant of ours: a schedule, and more overrides of the task."""


def ours(groups: ProcessGroups, task: Task, ways: Ways, batches: int = 1, window: int = 1) -> Builders:
    """Return what builds contestants of ours that train a task. `window`: of the schedules that set none."""

    def build(name: str, schedule: str, *more: str) -> Contestant:
        return Ours(name, prepare(task.extended(*more), schedule, groups.world.size, window), groups, batches)

    return {name: partial(build, name, *way) for name, way in ways.items()}


class Theirs:
    """A loop that trains a module batch by batch, with the job's optimizer.

    `backward` works out a batch's gradients, and returns its loss, where this rank knows it. `threads`: of
    torch meanwhile; 0: this rank takes no part.
    """

    bound = 0.0

    def __init__(
        self,
        name: str,
        job: Job,
        batches: int,
        module: nn.Module,
        backward: Callable[[], Tensor | None],
        threads: int = 1,
    ) -> None:
        self.name, self.batches = name, batches
        self.losses: list[float] = []
        self._backward, self._threads = backward, threads
        self._optimizer = job.optimizer(module.train().named_parameters())

    def run(self) -> None:
        """Train some batches, and see that the loss stays a number."""
        if not self._threads:
            return
        torch.set_num_threads(self._threads)
        losses = []
        for _ in range(self.batches):
            loss = self._backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            if loss is not None:
                losses.append(loss.detach())
        torch.set_num_threads(1)
        if losses:  # at the turn's end: to look at a number makes a GPU's host wait
            self.losses = torch.stack(losses).tolist()
            assert all(map(math.isfinite, self.losses)), f"losses {self.losses}: {self.name} does not train"


def plain(
    name: str, job: Job, groups: ProcessGroups, batches: int, threads: int = 1, parallel: bool = False
) -> Theirs:
    """Make a plain loop over the whole model, on rank 0 alone or, with `parallel`, shared by all (DDP).

    The gradients of a batch's microbatches add up.
    """
    rank, ranks, pieces = groups.world.rank, groups.world.size, job.microbatches
    model: nn.Module = job.model.to(groups.device)
    job.plan.numerics.arrange_weights(model)
    samples = job.plan.numerics.arrange(job.samples.to(groups.device))
    targets = job.targets.to(groups.device)
    if parallel:
        model = DistributedDataParallel(job.model)
        samples, targets = samples.chunk(ranks)[rank], targets.chunk(ranks)[rank]
    batch = list(zip(samples.chunk(pieces), targets.chunk(pieces), strict=True))
    loss_of = job.task.to(groups.device).loss

    def backward() -> Tensor:
        losses = []
        for inputs, wanted in batch:
            loss = loss_of(model(inputs), wanted) / pieces
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return Theirs(name, job, batches, model, backward, threads if parallel or rank == 0 else 0)


def _entering(job: Job, stage: int) -> Tensor:
    """Return a made-up tensor as it enters a stage behind the first."""
    (spec,) = job.plan.cut.entering(stage, job.size)
    return torch.randn(spec.shape, dtype=spec.dtype)


class Innermost(nn.Module):
    """A stage in channels_last whose messages are contiguous: they travel with their channels innermost.

    `enters`, `leaves`: whether there is a message before it, and behind it. `splits`: whether backwards are
    split, after which torch detaches the outputs in place, as no view can be: they are copied.
    """

    def __init__(self, stage: nn.Module, enters: bool, leaves: bool, splits: bool) -> None:
        super().__init__()
        self.stage, self._enters, self._leaves, self._splits = stage, enters, leaves, splits

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage."""
        if self._enters and x.dim() == 4:
            x = x.permute(0, 3, 1, 2)
        y: Tensor = self.stage(x)
        if not self._leaves or y.dim() != 4:
            return y
        y = y.permute(0, 2, 3, 1)
        return y.clone(memory_format=torch.contiguous_format) if self._splits else y.contiguous()


def torch_pipeline(
    schedule: str,
    job: Job,
    groups: ProcessGroups,
    batches: int,
    name: str = "",
    others: Sequence[Job] = (),
) -> Theirs:
    """Make torch.distributed.pipelining's schedule of the same order as ours, at the cut of the job's plan.

    `others`: as those of Ours, all of one shape. Each stage runs once alone first: on a GPU, what runs for
    the first time while a receive is posted may wait for it for good.
    """
    from torch.distributed import pipelining  # takes a second to import

    plan, last, device = job.plan, job.plan.stages - 1, groups.device
    innermost, kind = plan.numerics.channels_last, getattr(pipelining, TORCHS[schedule])
    several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    parts: dict[int, nn.Module] = {}
    for stage in (stage for stage, ranks in enumerate(plan.placement) if groups.world.rank in ranks):
        part: nn.Module = job.stage(stage).to(device)
        plan.numerics.arrange_weights(part)
        parts[stage] = Innermost(part, stage > 0, stage < last, several) if innermost else part
    samples = plan.numerics.arrange(job.samples.to(device))
    targets, loss_of = job.targets.to(device), job.task.to(device).loss
    moved = [(plan.numerics.arrange(of.samples.to(device)), of.targets.to(device)) for of in others]
    turn = cycle(moved or [(samples, targets)])
    for stage, part in parts.items():
        x = _entering(job, stage).to(device) if stage else samples[: job.size.samples]
        x = x.permute(0, 2, 3, 1).contiguous() if stage and innermost and x.dim() == 4 else x
        outputs = part(x.requires_grad_() if stage else x)
        outputs = loss_of(outputs, targets[: job.size.samples]) if stage == last else outputs
        outputs.backward(torch.ones_like(outputs))
        part.zero_grad()
    group = _own_group(groups)
    stages = [
        pipelining.PipelineStage(part, stage, plan.stages, device, group=group)
        for stage, part in parts.items()
    ]
    # Gradients are divided by the number of microbatches, so that an update is the batch's mean, as ours.
    runs = kind(stages if several else stages[0], job.microbatches, loss_fn=loss_of, scale_grads=True)

    def backward() -> Tensor | None:
        losses: list[Tensor] = []
        inputs, wanted = next(turn)
        first_inputs, target = (inputs,) if 0 in parts else (), wanted if last in parts else None
        runs.step(*first_inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean() if last in parts else None

    return Theirs(name or f"torch {schedule}", job, batches, nn.ModuleList(parts.values()), backward)


@cache
def _own_group(groups: ProcessGroups) -> dist.ProcessGroup:
    """Return a group of all ranks for torch's messages, over what ours use, that has been used once."""
    group = dist.new_group(list(range(groups.world.size)), backend=groups.backend)
    assert isinstance(group, dist.ProcessGroup)
    dist.all_reduce(torch.ones(1, device=groups.device), group=group)
    return group
