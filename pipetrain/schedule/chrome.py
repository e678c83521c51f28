"""Traces in the Trace Event Format of Perfetto and chrome://tracing, one process per rank.

Each rank has four tracks, on one clock:

- compute: each F, B, I, W, REDUCE, TIE, NORM and STEP, while the device ran it;
- wait: each time in which the rank was blocked, named after the message, or `wait` without one;
- send: handing each message to the transport, without the wait for room before it;
- receive: each message from its send, or from when it was next in line, until its arrival. A rank receives
  its messages one by one, so these spans do not overlap; a long one without a wait means an early message.

An arrow goes from each send to its receive. A message's `args` hold its bytes on the wire and the
milliseconds of its codec. `otherData` has the conditions, and the start and end of each window on each rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipetrain.schedule.actions import COMMUNICATION, RECEIVES, SENDS, UPDATE, Action, parse_action
from pipetrain.schedule.text import named
from pipetrain.schedule.timeline import Row, Span, Timeline, TracedWindow

FORMAT = "pipetrain trace 2"
TRACKS = ["compute", "wait", "send", "receive"]
_COMPUTE, _WAIT, _SEND, _RECEIVE = range(len(TRACKS))
Event = dict[str, Any]


def write(path: Path, about: Mapping[str, Any], windows: Sequence[TracedWindow]) -> None:
    """Write a trace; `about` has its conditions, at least `microbatches`."""
    origin = min(row.began for row in windows[0].timeline.rows)
    times = [
        {
            "epoch": window.epoch,
            "samples": window.samples,
            "began": [_us(row.began - origin) for row in window.timeline.rows],
            "ended": [_us(row.ended - origin) for row in window.timeline.rows],
        }
        for window in windows
    ]
    other = {"format": FORMAT, **about, "windows": times}
    with path.open("w") as file:
        file.write(f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(other)},\n"traceEvents": [\n')
        for number, event in enumerate(_events(windows, origin)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def read(path: Path) -> tuple[dict[str, Any], list[TracedWindow]]:
    """Read conditions and windows of a trace. Raises OSError, LookupError, TypeError or ValueError."""
    content = json.loads(path.read_text())
    about = content["otherData"]
    if about["format"] != FORMAT:
        raise ValueError(f"its format is {about['format']}, not {FORMAT}")
    windows = []
    for window in about["windows"]:
        times = zip(window["began"], window["ended"], strict=True)
        rows = [Row(began / 1e6, ended / 1e6, []) for began, ended in times]
        timeline = Timeline(rows, about["microbatches"])
        windows.append(TracedWindow(window["epoch"], window["samples"], timeline))
    for event in content["traceEvents"]:
        if event["ph"] == "X" and event["cat"] != TRACKS[_WAIT]:
            rows = windows[event["args"]["window"]].timeline.rows
            rows[event["pid"]].spans.append(_span_of(event))
    return about, windows


def _span_of(event: Event) -> Span:
    action, waited = parse_action(event["name"]), event["args"].get("waited_us", 0.0)
    start, end = event["ts"], event["ts"] + event["dur"]
    if action.op in COMMUNICATION:  # its event begins after the wait, or is the travel of the message
        start = (end if action.op in RECEIVES else start) - waited
    return Span(action, start / 1e6, end / 1e6, waited / 1e6)


def _events(windows: Sequence[TracedWindow], origin: float) -> Iterator[Event]:
    """Yield the events, each track's in order of time, from `origin`."""
    ranks = range(len(windows[0].timeline.rows))
    for rank, row in enumerate(windows[0].timeline.rows):
        yield from _names(rank, sorted({action.stage for action in row.actions}))
    arrows = 0
    last_received = [origin for _ in ranks]
    for number, window in enumerate(windows):
        rows = window.timeline.rows
        sends = [s for row in rows for s in row.spans if s.action is not None and s.action.op in SENDS]
        sent = {_message(span.action): (arrows + n, span.end) for n, span in enumerate(sends) if span.action}
        arrows += len(sends)
        for rank, row in enumerate(rows):
            for span in row.spans:
                action, args = span.action, _args(span, number, window.samples)
                if span.waited > 0:
                    yield _event(rank, _WAIT, action, span.start - origin, span.waited, args)
                if action is None:
                    continue
                if action.op not in COMMUNICATION:
                    yield _event(rank, _COMPUTE, action, span.start - origin, span.end - span.start, args)
                    continue
                start, (arrow, sent_at) = span.start + span.waited, sent[_message(action)]
                track, end, kind = _SEND, span.end, {"ph": "s"}
                if action.op in RECEIVES:
                    track, end, kind = _RECEIVE, start, {"ph": "f", "bp": "e"}
                    start = min(max(sent_at, last_received[rank]), end)
                    last_received[rank] = end
                yield _event(rank, track, action, start - origin, end - start, args)
                about = {"name": "message", "cat": "message", "id": arrow}
                yield {**kind, **about, "pid": rank, "tid": track, "ts": _us(start - origin)}


def _message(action: Action) -> tuple[tuple[int, int], int]:
    return action.edge, action.mb


def _names(rank: int, stages: list[int]) -> Iterator[Event]:
    names = [("process", 0, f"rank {rank} ({named(stages)})", rank)]
    names += [("thread", track, name, track) for track, name in enumerate(TRACKS)]
    for kind, track, name, index in names:
        where = {"ph": "M", "pid": rank, "tid": track}
        yield {**where, "name": f"{kind}_name", "args": {"name": name}}
        yield {**where, "name": f"{kind}_sort_index", "args": {"sort_index": index}}


def _args(span: Span, window: int, samples: list[int]) -> dict[str, Any]:
    action = span.action
    if action is None:
        return {"window": window}
    args: dict[str, Any] = {"window": window, "stage": action.stage, "op": action.op}
    if action.op not in UPDATE:
        args |= {"mb": action.mb, "samples": samples[action.mb]}
    if action.op not in COMMUNICATION:
        args |= {"version": action.version} | ({"delay": action.delay} if action.delay else {})
    measured = {"bytes": span.nbytes, "waited_us": _us(span.waited), "codec_ms": round(1e3 * span.codec_s, 6)}
    return args | {name: value for name, value in measured.items() if value}


def _event(
    rank: int, track: int, action: Action | None, start: float, seconds: float, args: dict[str, Any]
) -> Event:
    return {
        "ph": "X",
        "name": "wait" if action is None else str(action),
        "cat": TRACKS[track],
        "pid": rank,
        "tid": track,
        "ts": _us(start),
        "dur": round(_us(start + seconds) - _us(start), 3),
        "args": args,
    }


def _us(seconds: float) -> float:
    """Return microseconds, rounded to nanoseconds."""
    return round(seconds * 1e6, 3)
