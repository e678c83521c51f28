"""A traced run as a file for Perfetto and chrome://tracing: the Trace Event Format, one process a rank.

Four tracks a rank, on one clock:

- compute: each F, B, I, W, REDUCE and STEP, while the device ran it;
- wait: each time in which the rank was blocked, under the name of the message or `drain`;
- send: the handing over of each message to the transport, without the wait for room before it;
- receive: each message from when it was sent, or was next in line, until its rank had it. A rank takes its
  messages one by one, in the program's order, so these spans do not overlap; one that is long while nothing
  waits lay ready before it was needed.

An arrow goes from each send to its receive. Two counters a stage: microbatches in flight, and the staleness,
in updates, of each forward. A message's `args` say its bytes on the wire and, where a codec had work, the
milliseconds of that. `otherData` says what ran, and when each window began and ended on each rank; `read`
makes of the file again what `write` was given, but for the moments after a message was received.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipetrain.schedule.actions import COMMUNICATION, UPDATE, Action, Op, parse_action
from pipetrain.schedule.measured import Carried, RankWindow, TracedWindow

FORMAT = "pipetrain trace 1"
TRACKS = ["compute", "wait", "send", "receive"]
_COMPUTE, _WAIT, _SEND, _RECEIVE = range(len(TRACKS))
SENT_BY = {Op.RECV_F: (Op.SEND_F, -1), Op.RECV_B: (Op.SEND_B, 1)}  # the sender's op, and its stage from here
Event = dict[str, Any]
Message = tuple[int, Op, int]
"""The stage, op and microbatch of its SEND."""


def write(path: Path, about: Mapping[str, Any], windows: Sequence[TracedWindow]) -> None:
    """Write a trace; `about` says what it is of: `placement`, `microbatches`, and whatever a reader needs."""
    origin = min(window.began for window in windows[0].ranks)
    times = [
        {
            "epoch": window.epoch,
            "samples": window.samples,
            "began": [_us(rank.began - origin) for rank in window.ranks],
            "ended": [_us(rank.ended - origin) for rank in window.ranks],
        }
        for window in windows
    ]
    other = {"format": FORMAT, **about, "windows": times}
    with path.open("w") as file:
        file.write(f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(other)},\n"traceEvents": [\n')
        for number, event in enumerate(events(windows, about["placement"], about["microbatches"], origin)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def read(path: Path) -> tuple[dict[str, Any], list[TracedWindow]]:
    """Read a trace that `write` wrote: what it is about, and its windows.

    Raises OSError, and LookupError, TypeError or ValueError for a file that is no such trace.
    """
    content = json.loads(path.read_text())
    about = content["otherData"]
    if about["format"] != FORMAT:
        raise ValueError(f"its format is {about['format']}, not {FORMAT}")
    windows = [
        TracedWindow(
            window["epoch"],
            window["samples"],
            [
                RankWindow(began / 1e6, [], (ended / 1e6, ended / 1e6), ended / 1e6)
                for began, ended in zip(window["began"], window["ended"], strict=True)
            ],
        )
        for window in about["windows"]
    ]
    waited: dict[int, float] = {}  # of each rank, since when, if the event before was a wait
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            rank, args = event["pid"], event["args"]
            start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            window = windows[args["window"]].ranks[rank]
            if event["name"] == "drain":
                window.drain = start, end
            elif event["cat"] == TRACKS[_WAIT]:
                waited[rank] = start
            else:
                ready = end if event["cat"] == TRACKS[_RECEIVE] else start
                since = waited.pop(rank, ready)
                window.timed.append((parse_action(event["name"]), since, end, ready - since))
                if "bytes" in args:
                    window.messages.append((args["bytes"], args.get("codec_ms", 0.0) / 1e3))
    return about, windows


def events(
    windows: Sequence[TracedWindow], placement: Sequence[int], m: int, origin: float
) -> Iterator[Event]:
    """Give all events: of each track in the order of time.

    `placement[stage]` is a stage's rank, `m` the microbatches of a batch, `origin` the trace's first moment.
    """
    for rank in range(len(windows[0].ranks)):
        yield from _names(rank, [stage for stage, on in enumerate(placement) if on == rank])
    flow = 0
    last_received = [origin] * len(windows[0].ranks)
    in_flight = [0] * len(placement)
    for number, window in enumerate(windows):
        left_at = sent(window)
        flows = {message: flow + index for index, message in enumerate(left_at)}
        flow += len(left_at)
        for rank, ran in enumerate(window.ranks):
            messages = iter(ran.messages)
            for action, start, end, blocked in ran.timed:
                ready = start + blocked
                carried = next(messages, None) if action.op in COMMUNICATION else None
                args = _args(action, number, window.samples, carried)
                if blocked > 0:
                    yield _span(rank, _WAIT, action, start - origin, blocked, args)
                if action.op not in COMMUNICATION:
                    yield _span(rank, _COMPUTE, action, start - origin, end - start, args)
                    yield from _counters(rank, action, start - origin, end - origin, m, in_flight)
                elif action.op in SENT_BY:
                    message = message_of(action)
                    left = min(max(left_at[message], last_received[rank]), ready)
                    last_received[rank] = ready
                    yield _span(rank, _RECEIVE, action, left - origin, ready - left, args)
                    yield {"ph": "f", "bp": "e", **_arrow(rank, _RECEIVE, left - origin, flows[message])}
                else:
                    yield _span(rank, _SEND, action, ready - origin, end - ready, args)
                    yield {"ph": "s", **_arrow(rank, _SEND, ready - origin, flows[message_of(action)])}
            if ran.drain[1] > ran.drain[0]:
                drained = (ran.drain[0] - origin, ran.drain[1] - ran.drain[0])
                yield _span(rank, _WAIT, "drain", *drained, {"window": number})


def _names(rank: int, stages: list[int]) -> Iterator[Event]:
    of = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank} ({of})"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for track, name in enumerate(TRACKS):
        where = {"ph": "M", "pid": rank, "tid": track}
        yield {**where, "name": "thread_name", "args": {"name": name}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": track}}


def sent(window: TracedWindow) -> dict[Message, float]:
    """Say when each message of a window was on its way: the end of its SEND."""
    return {
        message_of(action): end
        for ran in window.ranks
        for action, _, end, _ in ran.timed
        if action.op in (Op.SEND_F, Op.SEND_B)
    }


def message_of(action: Action) -> Message:
    """Return what a SEND and its RECV have in common."""
    op, stage = SENT_BY.get(action.op, (action.op, 0))
    return action.stage + stage, op, action.mb


def _args(action: Action, window: int, samples: list[int], carried: Carried | None) -> dict[str, Any]:
    args: dict[str, Any] = {"stage": action.stage, "op": action.op, "window": window}
    if action.op not in UPDATE:
        args |= {"mb": action.mb, "samples": samples[action.mb]}
    if action.op not in COMMUNICATION:
        args |= {"version": action.version}
    if carried is not None:
        args |= {"bytes": carried[0]} | ({"codec_ms": round(1e3 * carried[1], 6)} if carried[1] else {})
    return args


def _span(
    rank: int, track: int, name: Action | str, start: float, seconds: float, args: dict[str, Any]
) -> Event:
    return {
        "ph": "X",
        "name": str(name),
        "cat": TRACKS[track],
        "pid": rank,
        "tid": track,
        "ts": _us(start),
        "dur": round(_us(start + seconds) - _us(start), 3),
        "args": args,
    }


def _arrow(rank: int, track: int, at: float, flow: int) -> Event:
    return {"name": "message", "cat": "message", "id": flow, "pid": rank, "tid": track, "ts": _us(at)}


def _counters(
    rank: int, action: Action, start: float, end: float, m: int, in_flight: list[int]
) -> Iterator[Event]:
    """Count what a forward adds when it starts, and what a backward takes away at its end."""
    stage = action.stage
    where = {"ph": "C", "cat": "counter", "pid": rank, "tid": _COMPUTE}
    flying = f"in flight, stage {stage}"
    if action.op is Op.F:
        in_flight[stage] += 1
        late = action.mb // m - action.version
        yield {**where, "name": flying, "ts": _us(start), "args": {"microbatches": in_flight[stage]}}
        yield {**where, "name": f"staleness, stage {stage}", "ts": _us(start), "args": {"updates": late}}
    elif action.op in (Op.B, Op.W):
        in_flight[stage] -= 1
        yield {**where, "name": flying, "ts": _us(end), "args": {"microbatches": in_flight[stage]}}


def _us(seconds: float) -> float:
    """Give a time as the format has it: microseconds, here to the nanosecond."""
    return round(seconds * 1e6, 3)
