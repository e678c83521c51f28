"""A trace of two ranks: written, read again, and in the order that messages impose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from benchmark.worlds import Say, fitted
from pipetrain.records.tracer import about_trace
from pipetrain.runtime.clock import Clock
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import COMMUNICATION, RECEIVES, SENDS
from pipetrain.schedule.timeline import TracedWindow
from tests.gpu.rows import Row, Setting, judged
from tests.gpu.training import FLOAT32, MODELS
from tests.support.cases import Case, Listener, make_run, rank_run

CLOCKS_S = 1e-3  # by which a device's events may be off the host's clock, beside the error of the clocks
REHEARSAL_S = 1.0  # likewise where a busy host may stop between sending and looking at the clock


def trace(setting: Setting) -> Iterator[Row]:
    """A trace of two ranks: written, read again, and in the order that messages impose."""
    chosen = f"{MODELS}with_norm" if setting.quick else "model._target_=pipetrain.models.vgg11"
    case = Case("1f1b", 2, (chosen, *FLOAT32, "batch_size=64", "trace=true"), train_samples=256)
    path = setting.out / "trace.json"
    marks, error = setting.world(traced, 2, case, str(path))[0]
    wanted = "Event" if setting.cuda else "float"
    yield judged("moments are marked by", marks, wanted, marks == wanted)
    _, windows = chrome.read(path)
    actions = sum(len(row.actions) for window in windows for row in window.timeline.rows)
    planned = len(windows) * sum(map(len, make_run(case).plan.window.program))
    figure = f"{len(windows)} windows, {actions} actions"
    yield judged("trace.json", figure, str(planned), actions == planned > 0)
    early = max(early_s(window) for window in windows)
    most = error + (CLOCKS_S if setting.cuda else REHEARSAL_S)
    what = "a receive ends before its send begins by"
    yield judged(what, f"{1e3 * early:.3f} ms", f"<= {1e3 * most:.3f} ms", early <= most)
    overlap = max(overlap_s(window) for window in windows)
    yield judged("computing overlaps on a rank by", f"{1e6 * overlap:.1f} us", "<= 10 us", overlap <= 1e-5)


def traced(groups: ProcessGroups, say: Say, case: Case, path: str) -> tuple[str, float]:
    """Train with a trace; return what marks a moment, and the error of the clocks in seconds."""
    run = make_run(case)
    listener = Listener()
    rank_run(run, fitted(groups, run.plan), None if groups.world.rank else listener).run()  # type: ignore[arg-type]
    if groups.world.rank:
        return "", 0.0
    (found,) = listener.traces
    device = torch.cuda.get_device_name(groups.device) if groups.device.type == "cuda" else "cpu"
    chrome.write(Path(path), about_trace(replace(run.about, device=f"2 x {device}"), found), found.windows)
    return type(Clock(groups.device).mark()).__name__, found.clock_error_s


def early_s(window: TracedWindow) -> float:
    """By how much any receive ends before its send begins; below 0 where none does."""
    spans = [span for row in window.timeline.rows for span in row.spans if span.action is not None]
    began = {(s.action.edge, s.action.mb): s.start + s.waited for s in spans if s.action.op in SENDS}
    return max(began[s.action.edge, s.action.mb] - s.end for s in spans if s.action.op in RECEIVES)


def overlap_s(window: TracedWindow) -> float:
    """By how much any two actions of a rank are computed at once: a device does one after the other."""
    computed = [
        sorted((s.start, s.end) for s in row.spans if s.action and s.action.op not in COMMUNICATION)
        for row in window.timeline.rows
    ]
    overlaps = [a[1] - b[0] for row in computed for a, b in pairwise(row)]
    return max([0.0, *overlaps])
