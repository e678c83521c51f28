"""Timelines: when each action ran, simulated or measured.

A timeline has a row per rank, and a row a span per action. Busy and waiting time, bubble, bytes, staleness
and peaks are computed from it, so measurement and simulation follow the same rules. Times are in seconds, or
in units of cost when simulated, on one clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from pipetrain.schedule.actions import COMMUNICATION, SENDS, Action, Op, most_versions


class Span(NamedTuple):
    """One action of one rank; without an action, a wait such as that for the last sends of a window.

    A SEND first waits for room, a RECV for its message. With a codec, a SEND encodes before it waits, but
    its times are as if it encoded afterwards.
    """

    action: Action | None
    start: float
    end: float
    waited: float = 0.0  # part of the time, at its start, blocked by another rank
    nbytes: int = 0  # of a message, on the wire
    codec_s: float = 0.0  # encoding or decoding


class Bounds(NamedTuple):
    """The most that a stage holds with any timing: microbatches, weight versions, staleness in updates."""

    activations: int
    versions: int
    staleness: int


@dataclass(slots=True)
class Row:
    """The spans of one rank in one window."""

    began: float
    ended: float
    spans: list[Span]

    @property
    def actions(self) -> list[Action]:
        return [span.action for span in self.spans if span.action is not None]

    @property
    def busy(self) -> float:
        """The time of compute actions and updates."""
        return sum(
            span.end - span.start - span.waited
            for span in self.spans
            if span.action is not None and span.action.op not in COMMUNICATION
        )

    @property
    def waited(self) -> float:
        """The time in which the rank was blocked."""
        return sum(span.waited for span in self.spans)


@dataclass(slots=True)
class StageStats:
    """One stage's sums and peaks over some windows."""

    updates: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0  # in its messages; waits without an action count for the rank's first stage
    activations: int = 0  # peak of microbatches between their F and the end of their B or W
    versions: int = 1  # peak of weight versions: the newest, older ones still to be read, and predictions
    staleness: dict[int, int] = field(default_factory=dict)  # number of forwards by staleness in updates
    bytes_sent: int = 0  # on the wire
    codec_s: float = 0.0  # encoding and decoding
    raw_bytes: int = 0  # sent, before encoding; this and the next are set by the engine
    skipped: int = 0  # updates skipped because of a non-finite gradient

    @property
    def max_staleness(self) -> int:
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        forwards = sum(self.staleness.values())
        return sum(late * n for late, n in self.staleness.items()) / forwards if forwards else 0.0

    @property
    def ratio(self) -> float | None:
        """The compression ratio of the messages sent; None without any."""
        return self.raw_bytes / self.bytes_sent if self.bytes_sent else None


def total(parts: Sequence[StageStats]) -> StageStats:
    """Add up the statistics of a stage over several windows or epochs."""
    staleness: Counter[int] = Counter()
    for part in parts:
        staleness.update(part.staleness)
    summed = ("updates", "busy_s", "wait_s", "bytes_sent", "codec_s", "raw_bytes", "skipped")
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in summed}
    return StageStats(
        activations=max((part.activations for part in parts), default=0),
        versions=max((part.versions for part in parts), default=1),
        staleness=dict(sorted(staleness.items())),
        **sums,
    )


def of_replicas(parts: Sequence[StageStats]) -> StageStats:
    """Return the statistics of a stage from those of its replicas: mean times, peaks, and all other sums."""
    if len(parts) == 1:
        return parts[0]
    summed = total(parts)
    return replace(
        summed,
        updates=max(part.updates for part in parts),
        skipped=max(part.skipped for part in parts),
        busy_s=summed.busy_s / len(parts),
        wait_s=summed.wait_s / len(parts),
    )


def of_another(stats: StageStats) -> StageStats:
    """Return the share of a further replica, if the first has `stats`: together they count once."""
    return replace(stats, staleness={}, bytes_sent=0, codec_s=0.0, raw_bytes=0)


def add_stats(stages: dict[int, StageStats], row: Row, microbatches: int) -> None:
    """Add the statistics of a rank's window to those of its stages."""
    actions = row.actions
    versions = most_versions(actions)
    opened = dict.fromkeys(versions, 0)
    trains = any(action.op in (Op.B, Op.W) for action in actions)
    unowned = 0.0
    for action, start, end, waited, nbytes, codec_s in row.spans:
        if action is None:
            unowned += waited
            continue
        stage, op = action.stage, action.op
        if stage not in stages:
            stages[stage] = StageStats()
        stats = stages[stage]
        stats.wait_s += waited
        if op in COMMUNICATION:
            stats.bytes_sent += nbytes if op in SENDS else 0
            stats.codec_s += codec_s
            continue
        stats.busy_s += end - start - waited
        if op is Op.F and trains:  # an evaluation saves nothing for a backward
            opened[stage] += 1
            stats.activations = max(stats.activations, opened[stage])
            late = action.mb // microbatches - action.version
            stats.staleness[late] = stats.staleness.get(late, 0) + 1
        elif op in (Op.B, Op.W):
            opened[stage] -= 1
        elif op is Op.STEP:
            stats.updates += 1
            stats.versions = max(stats.versions, versions[stage])
    if stages:
        stages[min(stages)].wait_s += unowned


@dataclass(frozen=True)
class Timeline:
    """The rows of all ranks in one window, with batches of `microbatches` each.

    `order`: of a simulation, the rank of each action in turn; no action comes before one that it waits for.
    """

    rows: list[Row]
    microbatches: int
    order: Sequence[int] = field(default=(), compare=False)

    @property
    def makespan(self) -> float:
        if not self.rows:
            return 0.0
        return max(row.ended for row in self.rows) - min(row.began for row in self.rows)

    def makespan_shared(self, alone: float) -> float:
        """Return the makespan where ranks slow each other, at costs that hold while all of them compute.

        What a rank computes while all others wait takes it `alone` of that time; between, in proportion.
        """
        changes: Counter[float] = Counter()  # of the number of ranks that compute
        for row in self.rows:
            for action, start, end, waited, *_ in row.spans:
                if action is not None and action.op not in COMMUNICATION:
                    changes[start + waited] += 1
                    changes[end] -= 1
        gained, computing, most_waiting = 0.0, 0, max(len(self.rows) - 1, 1)
        for now, then in pairwise(sorted(changes)):
            computing += changes[now]
            gained += (
                (then - now) * (1 - alone) * (len(self.rows) - computing) / most_waiting * (computing > 0)
            )
        return self.makespan - gained

    @property
    def busy(self) -> list[float]:
        """The time of compute actions and updates of each rank."""
        return [row.busy for row in self.rows]

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they do not compute."""
        makespan = self.makespan
        return 1 - sum(self.busy) / (len(self.rows) * makespan) if makespan else 0.0

    @property
    def bubble_per_rank(self) -> list[float]:
        makespan = self.makespan
        return [1 - busy / makespan if makespan else 0.0 for busy in self.busy]

    def waits(self, repeated: bool) -> list[float]:
        """Return each rank's blocked time; in `repeated` windows including the time until the next one."""
        end = max(row.ended for row in self.rows)
        return [row.waited + (end - row.ended if repeated else 0.0) for row in self.rows]

    @cached_property
    def stages(self) -> list[StageStats]:
        """The statistics of each stage, see `of_replicas`."""
        parts: dict[int, list[StageStats]] = defaultdict(list)
        for row in self.rows:
            of_rank: dict[int, StageStats] = {}
            add_stats(of_rank, row, self.microbatches)
            for stage, stats in of_rank.items():
                parts[stage].append(stats)
        return [of_replicas(parts[stage]) for stage in sorted(parts)]

    @property
    def activations(self) -> list[int]:
        """By stage: the peak of open microbatches."""
        return [stats.activations for stats in self.stages]

    @property
    def versions(self) -> list[int]:
        """By stage: the peak of weight versions."""
        return [stats.versions for stats in self.stages]

    @property
    def staleness(self) -> list[int]:
        """By stage: the maximum staleness in updates."""
        return [stats.max_staleness for stats in self.stages]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The time of a stage, measured or predicted; `stage_time_s`: seconds of computing a batch, if known.

    `bubble`: the fraction of training in which its rank does not compute; `wait`: in which it is blocked.
    """

    bubble: float
    stage_time_s: float | None
    wait: float


Kind = tuple[int, Op] | tuple[int, Op, int]  # (stage, op) or, of one route's messages, (stage, op, peer)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of each kind of action at each stage, by default 0; for a SEND, its message's travel time.

    The messages of one route have priority over those of all routes.
    """

    seconds: Mapping[Kind, float]

    def __call__(self, action: Action) -> float:
        of_all = self.seconds.get((action.stage, action.op), 0.0)
        return self.seconds.get((action.stage, action.op, action.peer), of_all)


@dataclass(frozen=True, slots=True)
class TracedWindow:
    """One window of training, with the spans of all ranks."""

    epoch: int  # from 0
    samples: list[int]  # of each microbatch
    timeline: Timeline
