"""Suite: what the engine itself takes an action, over stages so small that nearly all of it is the engine.

Processor time of the thread that runs the engine, less that of the same stages in a plain loop: a thread
that waits for a message takes none, and a busy machine does not count. Where it goes is measured on a twin,
because looking at that clock takes microseconds itself: the parts add up to more than the whole.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import ParamSpec, TypeVar

from torch import nn

from benchmark.channels import Wrapped
from benchmark.contestants import Alone, Contestant, Ours
from benchmark.report import Row, Verdict
from benchmark.tasks import Scale, Task, prepare
from benchmark.worlds import Say, fitted, run_world, titled
from pipetrain.runtime.channel import Channel
from pipetrain.runtime.clock import Clock, Mark
from pipetrain.runtime.mesh import Mesh

RANKS, MICROBATCHES, BATCHES = 2, 4, 50
SCHEDULES = ("layer_dist", "gpipe", "1f1b", "pipedream", "pipedream_2bw")
MOST_US = 150.0
TOTAL = "besides compute and waiting"
CHANNEL, AROUND, LOOP = "of it the channel", "of it around compute", "of it the loop"
TASK = Task(("model._target_=benchmark.overhead.tiny", "partition=even", "batch_size=16"), (8,), 8)

P = ParamSpec("P")
R = TypeVar("R")
Figures = dict[str, float]
"""Microseconds an action, of one rank in one round."""


def tiny() -> nn.Sequential:
    """Return two layers that compute next to nothing."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


class CpuClock(Clock):
    """Marks the thread's processor time."""

    def mark(self) -> Mark:
        """Return the seconds so far."""
        return time.thread_time()


class TimedChannel(Wrapped):
    """A channel that knows how much processor time, in seconds, its thread spent in it."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.cpu_s = 0.0
        for name in ("expect", "send", "recv", "drain", "arrived", "room", "wait"):
            setattr(self, name, self._timed(getattr(channel, name)))

    def _timed(self, call: Callable[P, R]) -> Callable[P, R]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.cpu_s += time.thread_time() - start

        return timed


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure, and give the rows as they come; `scale.profile` tells the thread's time by function, too."""
    by_rank = run_world(measure, RANKS, titled(say, "overhead"), scale)
    for schedule in by_rank[0]:
        for rank, found in enumerate(by_rank):
            yield from make_rows(f"overhead, {schedule}, rank {rank}", found[schedule])


def make_rows(benchmark: str, rounds: Sequence[Figures]) -> list[Row]:
    """Make the rows of one schedule on one rank."""
    rows = []
    for name in (TOTAL, CHANNEL, AROUND, LOOP):
        values = [figures[name] for figures in rounds]
        verdict = Verdict(f"< {MOST_US:g} us an action", median(values) < MOST_US)
        rows.append(Row(benchmark, name, values, "us", verdicts=[verdict] if name == TOTAL else []))
    return rows


def measure(mesh: Mesh, say: Say, scale: Scale) -> dict[str, list[Figures]]:
    """Measure every schedule, on one rank."""
    batches = 10 if scale.quick else BATCHES
    found: dict[str, list[Figures]] = {}
    for schedule in SCHEDULES:
        m = 1 if schedule in ("layer_dist", "pipedream") else MICROBATCHES
        task = TASK.extended(f"microbatches={m}")
        job, twin = (prepare(task, schedule, RANKS, batches) for _ in range(2))
        ours = Ours(schedule, job, mesh, batches)
        channel = TimedChannel(fitted(mesh, job.plan).channel(job.plan.settings.buffer_size))
        timed = Ours("twin", twin, mesh, batches, channel, CpuClock(mesh.device))
        alone = Alone("plain", prepare(task, "1f1b", RANKS), mesh, batches)
        for one in (ours, timed, alone):
            one.run()
        say(schedule)
        found[schedule] = [_round(mesh, ours, timed, alone, channel) for _ in range(scale.rounds)]
        if scale.profile:
            for rank, text in enumerate(mesh.gather("the profiles", _profile(ours))):
                say(f"{schedule}, rank {rank}\n{text}")
    return found


def _round(mesh: Mesh, ours: Ours, timed: Ours, alone: Alone, channel: TimedChannel) -> Figures:
    whole, plain = cpu_seconds(mesh, ours), cpu_seconds(mesh, alone)
    busy, in_channel = _busy(timed), channel.cpu_s
    twin = cpu_seconds(mesh, timed)
    busy, in_channel = _busy(timed) - busy, channel.cpu_s - in_channel
    actions = len(ours.actions) * ours.batches / max(ours.plan.windows)
    seconds = {
        TOTAL: whole - plain,
        CHANNEL: in_channel,
        AROUND: busy - plain,
        LOOP: twin - busy - in_channel,
    }
    return {name: 1e6 * s / actions for name, s in seconds.items()}


def _busy(ours: Ours) -> float:
    return sum(record.busy_s for record in ours.stats.values())


def cpu_seconds(mesh: Mesh, contestant: Contestant) -> float:
    """Return the processor time that this rank's thread takes for a turn."""
    mesh.gather("the start of a turn", None)
    start = time.thread_time()
    contestant.run()
    return time.thread_time() - start


def _profile(ours: Ours) -> str:
    profile = cProfile.Profile()
    profile.runcall(ours.run)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
    return text.getvalue()
