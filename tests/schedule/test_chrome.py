"""The trace file: what the Trace Event Format asks of it, what is in it, and that it can be read back."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from pipetrain.schedule.actions import RECEIVES, SENDS, Op, Program, tied_stages
from pipetrain.schedule.chrome import TRACKS, read, write
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import gpipe, interleaved_1f1b, one_f_one_b, pipedream
from pipetrain.schedule.timeline import Costs, TracedWindow
from pipetrain.schedule.transforms import with_norms, with_ties
from tests.support.run_files import about, as_measured

TABLE = {(stage, Op.F): 0.1 + 0.02 * stage for stage in range(4)}
TABLE |= {(stage, Op.B): 0.25 - 0.01 * stage for stage in range(4)}
UNEVEN = Costs(TABLE | {(s, op): 0.005 for s in range(4) for op in (Op.STEP, Op.SEND_F, Op.SEND_B)})
PROGRAMS = {
    "interleaved_1f1b": (interleaved_1f1b(2, 1, 4, virtual=2), 4),
    "pipedream": (pipedream(4, 6, 1), 1),
    "tied and clipped": (with_norms(with_ties(one_f_one_b(3, 2, 3), [(0, 2)])), 3),
}
NEEDS = {"X": {"ts", "dur", "cat"}, "M": {"args"}, "s": {"ts", "id", "cat"}, "f": {"ts", "id", "bp"}}

Traced = tuple[Program, int, list[TracedWindow], Path]


@pytest.fixture(params=PROGRAMS)
def traced(request: pytest.FixtureRequest, tmp_path: Path) -> Traced:
    """(lowered program, microbatches, windows, the file's path)."""
    compute, m = PROGRAMS[request.param]
    program = lower(compute)
    ties = [(0, 2)] if tied_stages(program) else ()
    windows = as_measured(program, UNEVEN, m, windows=2, ties=ties)
    write(tmp_path / "trace.json", about(program, m), windows)
    return program, m, windows, tmp_path / "trace.json"


def events(path: Path, *kinds: str) -> list[dict]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] in kinds]


def test_every_action_is_there_once_on_its_track_and_an_arrow_goes_from_send_to_receive(
    traced: Traced,
) -> None:
    program, _, windows, path = traced
    for event in (every := json.loads(path.read_text())["traceEvents"]):
        assert event.keys() >= {"name", "ph", "pid", "tid", *NEEDS[event["ph"]]}, event
        assert min(event.get("ts", 0), event.get("dur", 0)) >= 0
    of = "stages 0, 2" if len(about(program, 1)["placement"]) > len(program) else "stage 0"
    named = [e["args"]["name"] for e in every if e["pid"] == 0 and e["name"].endswith("_name")]
    assert named == [f"rank 0 ({of})", *TRACKS]

    spans = {(e["pid"], e["tid"], e["ts"]): e for e in events(path, "X") if e["cat"] != "wait"}
    track = {op: "send" if op in SENDS else "receive" for op in SENDS | RECEIVES}
    found = [(e["pid"], e["args"]["window"], e["cat"], e["name"]) for e in events(path, "X")]
    assert Counter(each for each in found if each[2] != "wait") == {
        (rank, window, track.get(action.op, "compute"), str(action)): 1
        for window in range(len(windows))
        for rank, actions in enumerate(program)
        for action in actions
    }
    times = defaultdict(list)
    for event in events(path, "X"):
        times[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["name"].startswith("0F"):
            args = event["args"]
            assert (args["op"], args["samples"]) == ("F", 4)
            assert event["name"] == f"{args['stage']}F{args['mb']}@{args['version']}"
    assert len(times) > 2 * len(program)
    for one_by_one in times.values():
        assert all(end <= start + 1e-2 for (_, end), (start, _) in pairwise(one_by_one))  # 0.01 us

    starts, ends = ({e["id"]: e for e in events(path, kind)} for kind in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == len(events(path, "s")) == sum(e["cat"] == "send" for e in spans.values()) > 0
    for number, start in starts.items():
        send, receive = (spans[e["pid"], e["tid"], e["ts"]]["args"] for e in (start, ends[number]))
        assert start["ts"] <= ends[number]["ts"]
        assert send["op"] == receive["op"].replace("RECV", "SEND")
        assert [send[key] for key in ("mb", "window")] == [receive[key] for key in ("mb", "window")]
        assert receive["stage"] - send["stage"] == (1 if send["op"] == "SEND_F" else -1)


def test_what_was_written_can_be_read_back(traced: Traced) -> None:
    program, m, windows, path = traced
    said, again = read(path)
    assert said.items() >= about(program, m).items()
    assert len(again) == len(windows)
    for window, copy in zip(windows, again, strict=True):
        assert (copy.epoch, copy.samples) == (window.epoch, window.samples)
        for row, other in zip(window.timeline.rows, copy.timeline.rows, strict=True):
            assert other.actions == row.actions
            assert (other.began, other.ended) == pytest.approx((row.began, row.ended), abs=1e-8)
            for mine, theirs in zip(row.spans, other.spans, strict=False):  # without the wait at the end
                assert theirs[1:4] == pytest.approx(mine[1:4], abs=1e-8)


def test_a_message_is_received_from_its_sending_on_and_says_its_bytes_and_its_codecs_time(
    tmp_path: Path,
) -> None:
    """Rank 1 waits for its first activation; the second lies ready from 2 s on, until F0 is done at 4 s."""
    program, path = lower(gpipe(2, 1, 2)), tmp_path / "trace.json"
    costs = Costs({(0, Op.F): 1.0, (1, Op.F): 3.0, (0, Op.B): 1.0, (1, Op.B): 1.0})
    (window,) = as_measured(program, costs, 2)
    coded = {"0SEND_F1": (200, 0.0), "0RECV_B0": (7, 0.25)}
    spans = window.timeline.rows[0].spans
    for index, span in enumerate(spans):
        nbytes, codec_s = coded.get(str(span.action), (0, 0.0))
        spans[index] = span._replace(nbytes=nbytes, codec_s=codec_s)
    write(path, about(program, 2), [window])
    found = {(e["cat"], e["name"]): e for e in events(path, "X")}
    times = {key: (event["ts"] / 1e6, event["dur"] / 1e6) for key, event in found.items()}
    assert times["wait", "1RECV_F0"] == (0.0, 1.0)
    assert times["receive", "1RECV_F0"] == (1.0, 0.0)
    assert times["receive", "1RECV_F1"] == (2.0, 2.0)
    assert ("wait", "1RECV_F1") not in times
    assert times["compute", "1F1@0"] == (4.0, 3.0)
    assert found["send", "0SEND_F1"]["args"]["bytes"] == 200
    assert not {"bytes", "codec_ms"} & found["compute", "0F0@0"]["args"].keys()
    assert found["receive", "0RECV_B0"]["args"]["codec_ms"] == 250.0


def test_a_file_of_another_format_is_a_value_error(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps({"otherData": {"format": "2"}, "traceEvents": []}))
    with pytest.raises(ValueError, match="format is 2"):
        read(tmp_path / "trace.json")
