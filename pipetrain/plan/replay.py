"""cost=trace.json: the costs of a traced run's actions, with which `simulate` predicts the time of a plan.

The costs, from whole microbatches only:

- an action takes its stage's typical time; F, B, I and W also their share of their rank's overhead, that is,
  of the time neither computing nor waiting (posting messages, the loop itself, between windows);
- a message travels for the typical time from its send to its arrival, over those that their receiver waited
  for, as the arrival of others is unknown. If no receiver ever waited, it takes no time, as TIE and NORM do.

The typical time is the mean, because times along a path add up and their distribution is skewed: with
medians, replays of traced runs were 1 to 4 % too short. Outliers above three medians count as three. The
durations include the interference between ranks that compute at once, as it was in the traced schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from pipetrain.data import pieces
from pipetrain.errors import ConfigError
from pipetrain.plan.comparing import aligned
from pipetrain.plan.plan import Plan
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import (
    COMMUNICATION,
    COMPUTE,
    RECEIVES,
    TOLD,
    UPDATE,
    Action,
    Op,
    Program,
    Ties,
)
from pipetrain.schedule.simulate import BufferSize, simulate
from pipetrain.schedule.timeline import Costs, Kind, TracedWindow

CONDITIONS = {
    "model", "parameters", "schedule", "ranks", "placement", "partition", "dtype", "precision",
    "memory_format", "epoch_batches", "batch_size", "microbatches", "window", "bounds", "ties",
}  # fmt: skip
"""The keys that a trace must have."""


class Figures(NamedTuple):
    """The time of a schedule, measured or simulated."""

    batch_s: float  # seconds per batch
    wait: list[float]  # by rank: fraction of time blocked


@dataclass(frozen=True, slots=True)
class Replay:
    """A traced run: its conditions, its windows, and the costs of its actions."""

    about: Mapping[str, Any]
    windows: Sequence[TracedWindow]
    costs: Costs

    @property
    def measured(self) -> Figures:
        rows = [window.timeline.rows for window in self.windows]
        began = [min(row.began for row in of) for of in rows]
        lasted = _lasted(self.windows, began, [max(row.ended for row in of) for of in rows])
        batches = [sum(window.samples) / self.about["batch_size"] for window in self.windows]
        waits = zip(
            *([row.waited / s for row in of] for of, s in zip(rows, lasted, strict=True)), strict=True
        )
        return Figures(typical(s / n for s, n in zip(lasted, batches, strict=True)), list(map(mean, waits)))

    @property
    def again(self) -> Figures:
        """The simulated figures of the traced schedule; they differ from `measured` by the replay's error."""
        longest = max(self.windows, key=lambda window: sum(window.samples))
        return self.figures(
            [row.actions for row in longest.timeline.rows],
            longest.samples,
            batch_size=self.about["batch_size"],
            buffer_size={(source, to): bound for source, to, bound in self.about["bounds"]},
            ties=self.about["ties"],
            repeated=self.about["window"] is not None,
        )

    def figures(
        self,
        program: Program,
        samples: Sequence[int],
        *,
        batch_size: int,
        buffer_size: BufferSize,
        ties: Ties = (),
        repeated: bool,
    ) -> Figures:
        """Simulate a lowered program whose microbatches have these numbers of samples.

        The cost of a microbatch is proportional to its samples. `repeated`: windows follow each other, so
        that a rank that is done waits for the next one.
        """
        whole = full_of(self.about)

        def cost(action: Action) -> float:
            return self.costs(action) * (1.0 if action.op in UPDATE else samples[action.mb] / whole)

        # These figures do not depend on the number of microbatches in a batch.
        run = simulate(program, 1, buffer_size=buffer_size, cost=cost, ties=ties)
        wait = [seconds / run.makespan for seconds in run.waits(repeated)]
        return Figures(run.makespan * batch_size / sum(samples), wait)


def full_of(about: Mapping[str, Any]) -> int:
    """Return the samples of a full microbatch of a traced run."""
    return -(-int(about["batch_size"]) // int(about["microbatches"]))


def typical(times: Iterable[float]) -> float:
    """Return the mean of times, each of at most three times their median."""
    times = list(times)
    most = 3 * median(times)
    return mean(min(time, most) for time in times)


def read_trace(path: Path) -> Replay:
    """Read a run's trace.json. Raises ConfigError."""
    try:
        return replay(*chrome.read(path))
    except OSError as error:
        raise ConfigError(f"cost={path} cannot be read: {error.strerror}; give a run's trace.json") from error
    except (LookupError, AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"cost={path} is not a whole trace.json of this version ({type(error).__name__}: {error}); "
            f"write one with trace=true"
        ) from error


def replay(about: Mapping[str, Any], windows: Sequence[TracedWindow]) -> Replay:
    """Find the costs of a traced run's actions. Raises KeyError for keys missing in `about`."""
    if missing := CONDITIONS - about.keys():
        raise KeyError(", ".join(sorted(missing)))
    own = [_own_time(windows, rank) for rank in range(about["ranks"])]
    whole = full_of(about)
    times: dict[Kind, list[float]] = defaultdict(list)
    for window in windows:
        sent = chrome.sent(window.timeline)
        for span in (span for row in window.timeline.rows for span in row.spans):
            action = span.action
            if action is None:
                continue
            if action.op in RECEIVES and span.start < (left := sent[action.edge, action.mb]):
                send = Op.SEND_F if action.op is Op.RECV_F else Op.SEND_B
                times[action.peer, send, action.stage].append(max(0.0, span.start + span.waited - left))
            elif action.op not in COMMUNICATION | TOLD and (
                action.op in UPDATE or window.samples[action.mb] == whole
            ):
                overhead = own[about["placement"][action.stage]] if action.op in COMPUTE else 0.0
                times[action.stage, action.op].append(span.end - span.start - span.waited + overhead)
    return Replay(about, windows, Costs({kind: typical(of) for kind, of in times.items()}))


def _own_time(windows: Sequence[TracedWindow], rank: int) -> float:
    """Return a rank's overhead per F, B, I or W."""
    rows = [window.timeline.rows[rank] for window in windows]
    lasted = _lasted(windows, [row.began for row in rows], [row.ended for row in rows])
    own = [
        (time - row.busy - row.waited) / sum(action.op in COMPUTE for action in row.actions)
        for row, time in zip(rows, lasted, strict=True)
    ]
    return max(0.0, typical(own))


def _lasted(windows: Sequence[TracedWindow], began: Sequence[float], ended: Sequence[float]) -> list[float]:
    """Return each window's duration, from the end of the one before if that is of the same epoch."""
    epochs = [window.epoch for window in windows]
    starts = [ended[n - 1] if n and epochs[n - 1] == epoch else began[n] for n, epoch in enumerate(epochs)]
    return [end - start for start, end in zip(starts, ended, strict=True)]


def refuse_other(plan: Plan, traced: Replay, path: str) -> None:
    """Refuse a plan for which a trace has no times. Raises ConfigError."""
    settings, about = plan.settings, traced.about
    cut = len(about["partition"]) + 1
    if cut != plan.stages and about["ranks"] == settings.ranks:  # which no other partition mends
        raise ConfigError(
            f"cost={path} is of {about['schedule']} with {cut} stages on {about['ranks']} ranks, and "
            f"{settings.schedule} has {plan.stages}: trace a run of {settings.schedule}"
        )
    here = {
        "model": settings.model,
        "stages": settings.ranks,
        "partition": plan.cuts,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "precision": settings.precision,
        "memory_format": plan.numerics.memory_format,
        "batch_size": settings.full * settings.microbatches,  # the size of a microbatch is what counts
        "codec.forward": str(settings.codecs.forward),
        "codec.backward": str(settings.codecs.backward),
    }
    there = dict(about) | {
        "stages": about["ranks"],
        "batch_size": full_of(about) * settings.microbatches,
        "codec.forward": about.get("codec_forward", "identity"),
        "codec.backward": about.get("codec_backward", "identity"),
    }
    if other := [f"{key}={there[key]}".replace(" ", "") for key in here if there[key] != here[key]]:
        raise ConfigError(
            f"cost={path} is of {about['model']} cut before layers {about['partition']}, {full_of(about)} "
            f"samples a microbatch: pass {' '.join(other)}, or trace a run of this plan"
        )
    if sum(layer.params for layer in plan.layers) != about["parameters"]:
        raise ConfigError(
            f"cost={path} is of another {about['model']}, with {about['parameters']:,} parameters: trace a "
            f"run of this plan"
        )
    for action in (action for actions in plan.window.program for action in actions):
        own = action.op not in COMMUNICATION | TOLD
        if own and (action.stage, action.op) not in traced.costs.seconds:
            raise ConfigError(
                f"cost={path} has no {action.op} of stage {action.stage}, which {settings.schedule} "
                f"needs: trace a run of {settings.schedule}, or of one with the same kinds of actions"
            )


def compare(plan: Plan, traced: Replay, path: str) -> str:
    """Return the times of the traced schedule, measured and simulated, and of this plan, as text."""
    settings, about = plan.settings, traced.about
    mine = traced.figures(
        plan.window.program,
        pieces(settings.batch_size, settings.microbatches) * max(plan.windows),
        batch_size=settings.batch_size,
        buffer_size=plan.cut.bounds,
        ties=plan.cut.ties,
        repeated=settings.window is not None,
    )
    rows = [["", "seconds a batch", "samples/s", "wait, by rank"]]
    measured_rate = about["batch_size"] / traced.measured.batch_s
    for name, figures, batch_size in (
        (f"{about['schedule']}, measured", traced.measured, about["batch_size"]),
        (f"{about['schedule']}, replayed", traced.again, about["batch_size"]),
        (f"{settings.schedule}, this plan", mine, settings.batch_size),
    ):
        rate = batch_size / figures.batch_s
        off = f" ({rate / measured_rate - 1:+.1%})" if rate != measured_rate else ""
        waits = " ".join(f"{wait:.1%}" for wait in figures.wait)
        rows.append([name, f"{figures.batch_s:.4f}", f"{rate:.1f}{off}", waits])
    windows = "1 window" if len(traced.windows) == 1 else f"{len(traced.windows)} windows"
    return f"by the durations of {windows} in {path}\n" + aligned(zip(*rows, strict=True))
