"""`python -m pipetrain.timelines RUN ...`: what traced runs really did, one above the other, as one picture.

RUN is the folder of a run that had trace=true, or its trace.json. Of each the window that took the median
time is drawn, all on one axis of time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipetrain.errors import ConfigError
from pipetrain.exit import guarded
from pipetrain.rules import COUNT
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import Op
from pipetrain.schedule.plot import as_stack
from pipetrain.schedule.text import counted
from pipetrain.schedule.timeline import Timeline, TracedWindow

TRACE = "trace.json"


def main(words: Sequence[str] | None = None) -> int:
    """Draw the picture; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pipetrain.timelines", description="Draw what traced runs really did, as one picture."
    )
    out = Path("timelines.svg")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or its trace.json")
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help=".svg or .png; %(default)s")
    parser.add_argument("--batches", type=int, default=2, metavar="N", help="drawn of a window; %(default)s")
    options = parser.parse_args(words)
    return guarded(lambda: _write(options.runs, options.out, options.batches))


def _write(runs: Sequence[Path], out: Path, batches: int) -> int:
    COUNT.read("--batches", batches)
    traced = [_median_window(run / TRACE if run.is_dir() else run, batches) for run in runs]
    first_s = _batch_s(traced[0][1])
    titled = [(_title(name, window, first_s), window.timeline, end) for name, window, end in traced]
    try:
        as_stack(titled, out)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from error
    print(f"written to {out}")
    return 0


def _median_window(path: Path, batches: int) -> tuple[str, TracedWindow, float]:
    """Return what a trace is of, of its longest windows that of median time, and when to end its drawing."""
    try:
        about, windows = chrome.read(path)
        whole = [window for window in windows if _batches(window) == max(map(_batches, windows))]
        window = sorted(whole, key=lambda window: window.timeline.makespan)[len(whole) // 2]
        name = (
            f"{about['model']}, {about['schedule']}  ·  {counted(about['ranks'], 'rank')} on "
            f"{about['device']}  ·  batch {about['batch_size']} in "
            f"{counted(about['microbatches'], 'microbatch')}"
        )
        return name, window, _end(window.timeline, batches)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; give the folder of a run that had trace=true"
        ) from error
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a whole trace.json of this version ({type(error).__name__}: {error}); write one "
            f"with trace=true"
        ) from error


def _title(name: str, window: TracedWindow, first_s: float) -> str:
    """Say what is drawn, and how fast it is; `first_s`: seconds of a batch of the first run."""
    batches, gain = _batches(window), first_s / _batch_s(window)
    return (
        f"{name}  ·  epoch {1 + window.epoch}\n"
        f"{window.timeline.makespan:.3f} s for {counted(batches, 'batch')}  ·  "
        f"{gain:.2f} times the first one's speed  ·  bubble {window.timeline.bubble:.1%}"
    )


def _batches(window: TracedWindow) -> int:
    return -(-len(window.samples) // window.timeline.microbatches)


def _batch_s(window: TracedWindow) -> float:
    return window.timeline.makespan / _batches(window)


def _end(timeline: Timeline, batches: int) -> float:
    """Return when the last stage has made the step of the first `batches`, in seconds from the start."""
    steps = (
        span.end
        for row in timeline.rows
        for span in row.spans
        if span.action is not None and span.action.op is Op.STEP and span.action.version <= batches
    )
    return max(steps) - min(row.began for row in timeline.rows)
