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
from typing import Any

from pipetrain.errors import ConfigError
from pipetrain.plan.plan import Plan
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import COMMUNICATION, COMPUTE, RECEIVES, TOLD, UPDATE, Action, Op
from pipetrain.schedule.draw import aligned
from pipetrain.schedule.timeline import Costs, Kind, TracedWindow

CONDITIONS = {
    "model", "parameters", "schedule", "ranks", "placement", "partition", "dtype", "precision",
    "memory_format", "epoch_batches", "batch_size", "microbatches",
}  # fmt: skip
"""The keys that a trace must have."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A traced run: its conditions, the costs of its actions, and the seconds that a batch took."""

    about: Mapping[str, Any]
    costs: Costs
    batch_s: float


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
    except (OSError, LookupError, AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"cost={path} cannot be read as a trace.json of this version ({type(error).__name__}: {error}); "
            f"write one with trace=true"
        ) from error


def replay(about: Mapping[str, Any], windows: Sequence[TracedWindow]) -> Replay:
    """Find the costs of a traced run's actions. Raises KeyError for keys missing in `about`."""
    if missing := CONDITIONS - about.keys():
        raise KeyError(", ".join(sorted(missing)))
    ranks, whole = range(about["ranks"]), full_of(about)
    rows = [window.timeline.rows for window in windows]
    own = [_own_time(windows, rank) for rank in ranks]
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
            elif _is_own(action) and (action.op in UPDATE or window.samples[action.mb] == whole):
                overhead = own[about["placement"][action.stage]] if action.op in COMPUTE else 0.0
                times[action.stage, action.op].append(span.end - span.start - span.waited + overhead)
    lasted = _lasted(
        windows, [min(r.began for r in of) for of in rows], [max(r.ended for r in of) for of in rows]
    )
    batches = [sum(window.samples) / about["batch_size"] for window in windows]
    batch_s = typical(s / n for s, n in zip(lasted, batches, strict=True))
    return Replay(about, Costs({kind: typical(of) for kind, of in times.items()}), batch_s)


def _is_own(action: Action) -> bool:
    """Return whether a rank does an action by itself."""
    return action.op not in COMMUNICATION | TOLD


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
    m = settings.microbatches
    pairs = {  # here and there
        "model": (settings.model, about["model"]),
        "stages": (settings.ranks, about["ranks"]),
        "partition": (plan.cuts, about["partition"]),
        "dtype": (str(settings.dtype).removeprefix("torch."), about["dtype"]),
        "precision": (settings.precision, about["precision"]),
        "memory_format": (plan.numerics.memory_format, about["memory_format"]),
        "batch_size": (settings.full * m, full_of(about) * m),  # the size of a microbatch is what counts
        "codec.forward": (str(settings.codecs.forward), about.get("codec_forward", "identity")),
        "codec.backward": (str(settings.codecs.backward), about.get("codec_backward", "identity")),
    }
    other = [f"{key}={there}".replace(" ", "") for key, (here, there) in pairs.items() if here != there]
    used = {(a.stage, a.op) for actions in plan.window.program for a in actions if _is_own(a)}
    if other:
        way = f"pass {' '.join(other)}, or trace a run of this plan"
    elif used - traced.costs.seconds.keys() or sum(of.params for of in plan.layers) != about["parameters"]:
        way = f"trace a run of this model by {settings.schedule}, or one with the same kinds of actions"
    else:
        return
    raise ConfigError(
        f"cost={path} is of {about['model']} by {about['schedule']} with {about['parameters']:,} parameters, "
        f"cut before layers {about['partition']}, {full_of(about)} samples a microbatch: {way}"
    )


def compare(plan: Plan, traced: Replay, path: str) -> str:
    """Return the measured time of the traced schedule, and that of a plan at its costs, as text."""
    batch_s, settings = plan.timeline().makespan / max(plan.windows), plan.settings
    rate, measured = settings.batch_size / batch_s, traced.about["batch_size"] / traced.batch_s
    rows = [
        [f"by the durations in {path}", "seconds a batch", "samples/s"],
        [f"{traced.about['schedule']}, measured", f"{traced.batch_s:.4f}", f"{measured:.1f}"],
        [f"{settings.schedule}, this plan", f"{batch_s:.4f}", f"{rate:.1f} ({rate / measured - 1:+.1%})"],
    ]
    return aligned(rows)
