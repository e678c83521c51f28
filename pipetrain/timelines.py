"""`python -m pipetrain.timelines RUN ...`: what traced runs really did, one above the other, as an HTML page.

RUN is the folder of a run that had trace=true, or its trace.json. Of each the window that took the median
time is drawn, all on one axis of time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipetrain.ending import guarded
from pipetrain.errors import ConfigError
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import Op
from pipetrain.schedule.page import Shown, page
from pipetrain.schedule.timeline import Timeline, TracedWindow

TRACE = "trace.json"


def main(words: Sequence[str] | None = None) -> int:
    """Write the page; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pipetrain.timelines", description="Draw what traced runs really did as an HTML page."
    )
    out = Path("timelines.html")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or its trace.json")
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help="%(default)s")
    parser.add_argument("--batches", type=int, default=2, metavar="N", help="drawn of a window; %(default)s")
    given = parser.parse_args(words)
    return guarded(lambda: _write(given.runs, given.out, given.batches))


def _write(runs: Sequence[Path], out: Path, batches: int) -> int:
    if batches < 1:
        raise ConfigError(f"--batches {batches} must be a whole number of batches, 1 or more")
    drawn = [shown(run / TRACE if run.is_dir() else run, batches) for run in runs]
    names = dict.fromkeys(one.name for one in drawn)
    text = page(
        f"Timelines, measured: {'; '.join(names)}",
        f"Drawn from the spans that the engine recorded, all on the same axis of time: of each run the "
        f"window that took the median time, and of that the first {batches} batches at most.",
        drawn,
    )
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from error
    print(f"written to {out}")
    return 0


def shown(path: Path, batches: int) -> Shown:
    """Return what is to be drawn of a trace. Raises ConfigError."""
    try:
        about, windows = chrome.read(path)
        whole = [window for window in windows if _batches(window) == max(map(_batches, windows))]
        window = sorted(whole, key=lambda one: one.timeline.makespan)[len(whole) // 2]
        length = _batches(window)
        return Shown(
            name=f"{about['model']}, {about['schedule']}",
            says=f"{about['ranks']} ranks on {about['device']}, a batch of {about['batch_size']} in "
            f"{about['microbatches']} microbatches, window {1 + windows.index(window)} of {len(windows)}, in "
            f"epoch {1 + window.epoch}.",
            timeline=window.timeline,
            note=f" for {length} batch{'es' * (length > 1)}",
            batches=length,
            until=_end(window.timeline, batches),
        )
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; give the folder of a run that had trace=true"
        ) from error
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a whole trace.json of this version ({type(error).__name__}: {error}); write one "
            f"with trace=true"
        ) from error


def _batches(window: TracedWindow) -> int:
    return -(-len(window.samples) // window.timeline.microbatches)


def _end(timeline: Timeline, batches: int) -> float:
    """Return when the last stage has made the step of the first `batches`, in seconds from the start."""
    steps = (
        span.end
        for row in timeline.rows
        for span in row.spans
        if span.action is not None and span.action.op is Op.STEP and span.action.version <= batches
    )
    return max(steps) - min(row.began for row in timeline.rows)


if __name__ == "__main__":
    sys.exit(main())
