"""The trace file: what the Trace Event Format asks of it, what is in it, and that it can be read back."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from pipetrain.schedule.actions import Op, tied_stages
from pipetrain.schedule.chrome import TRACKS, read, write
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import gpipe, interleaved_1f1b, one_f_one_b, pipedream, pipedream_2bw
from pipetrain.schedule.timeline import Costs
from pipetrain.schedule.transforms import with_norms, with_ties
from tests.support.traces import about, as_measured

UNEVEN = Costs(
    {
        **{(stage, Op.F): 0.1 + 0.02 * stage for stage in range(4)},
        **{(stage, Op.B): 0.25 - 0.01 * stage for stage in range(4)},
        **{(stage, Op.STEP): 0.03 for stage in range(4)},
        **{(stage, op): 0.005 for stage in range(4) for op in (Op.SEND_F, Op.SEND_B)},
    }
)
PROGRAMS = {
    "gpipe": (gpipe(2, 1, 4), 4),
    "1f1b": (one_f_one_b(4, 2, 4), 4),
    "interleaved_1f1b": (interleaved_1f1b(2, 1, 4, virtual=2), 4),
    "pipedream": (pipedream(4, 6, 1), 1),
    "pipedream_2bw": (pipedream_2bw(3, 4, 3), 3),
    "clipped by the norm of the model": (with_norms(pipedream_2bw(3, 4, 3)), 3),
    "tied": (with_norms(with_ties(one_f_one_b(3, 2, 3), [(0, 2)])), 3),
}


def ties_of(program):
    return [(0, 2)] if tied_stages(program) else ()


@pytest.fixture(params=PROGRAMS)
def traced(request, tmp_path):
    """(lowered program, microbatches, windows, the file's path)."""
    compute, m = PROGRAMS[request.param]
    program = lower(compute)
    windows = as_measured(program, UNEVEN, m, windows=2, ties=ties_of(program))
    write(tmp_path / "trace.json", about(program, m), windows)
    return program, m, windows, tmp_path / "trace.json"


def events(path: Path) -> list[dict]:
    return json.loads(path.read_text())["traceEvents"]


def test_every_event_has_what_its_kind_needs(traced):
    content = json.loads(traced[3].read_text())
    assert content["displayTimeUnit"] == "ms"
    assert content["otherData"]["schedule"] == "1f1b"
    needs = {"X": {"ts", "dur", "cat"}, "M": {"args"}, "s": {"ts", "id", "cat"}}
    needs["f"] = {*needs["s"], "bp"}
    for event in content["traceEvents"]:
        assert event.keys() >= {"name", "ph", "pid", "tid", *needs[event["ph"]]}, event
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0


def test_ranks_and_tracks_have_names(traced):
    names = defaultdict(list)
    for event in events(traced[3]):
        if event["ph"] == "M" and event["name"].endswith("_name"):
            names[event["pid"]].append(event["args"]["name"])
    assert list(names) == list(range(len(traced[0])))
    assert all(tracks == TRACKS for _, *tracks in names.values())
    stages = {0: "stages 0, 2"} if len(about(traced[0], 1)["placement"]) > len(traced[0]) else {0: "stage 0"}
    assert names[0][0] == f"rank 0 ({stages[0]})"


def test_every_action_is_there_once_under_its_own_name(traced):
    program, _, windows, path = traced
    named = Counter(
        (event["pid"], event["args"]["window"], event["cat"], event["name"])
        for event in events(path)
        if event["ph"] == "X" and event["cat"] != "wait"
    )
    track = {Op.SEND_F: "send", Op.SEND_B: "send", Op.RECV_F: "receive", Op.RECV_B: "receive"}
    assert named == {
        (rank, window, track.get(action.op, "compute"), str(action)): 1
        for window in range(len(windows))
        for rank, actions in enumerate(program)
        for action in actions
    }


def test_an_action_says_what_it_is(traced):
    for event in events(traced[3]):
        if event["ph"] == "X" and event["cat"] == "compute" and event["args"]["op"] in ("F", "B"):
            args = event["args"]
            assert event["name"] == f"{args['stage']}{args['op']}{args['mb']}@{args['version']}"
            assert args["samples"] == 4


def test_the_spans_of_a_track_follow_each_other(traced):
    tracks = defaultdict(list)
    for event in events(traced[3]):
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) > 2 * len(traced[0])
    for spans in tracks.values():
        assert all(end <= start + 1e-2 for (_, end), (start, _) in pairwise(spans))  # a hundredth of a us


def test_an_arrow_goes_from_each_send_to_its_receive(traced):
    spans = {(e["pid"], e["tid"], e["ts"]): e for e in events(traced[3]) if e["ph"] == "X"}
    arrows = defaultdict(dict)
    for event in events(traced[3]):
        if event["ph"] in "sf":
            assert event["ph"] not in arrows[event["id"]]
            arrows[event["id"]][event["ph"]] = event
    sends = sum(e["ph"] == "X" and e["cat"] == "send" for e in events(traced[3]))
    assert len(arrows) == sends > 0
    for arrow in arrows.values():
        send, receive = (spans[arrow[ph]["pid"], arrow[ph]["tid"], arrow[ph]["ts"]] for ph in "sf")
        assert arrow["s"]["ts"] <= arrow["f"]["ts"]
        assert send["args"]["op"] == receive["args"]["op"].replace("RECV", "SEND")
        assert [send["args"][key] for key in ("mb", "window")] == [
            receive["args"][key] for key in ("mb", "window")
        ]
        up = send["args"]["op"] == "SEND_F"
        assert receive["args"]["stage"] - send["args"]["stage"] == (1 if up else -1)


def test_what_was_written_can_be_read_back(traced):
    program, m, windows, path = traced
    said, again = read(path)
    assert said.items() >= about(program, m).items()
    assert len(again) == len(windows)
    for window, copy in zip(windows, again, strict=True):
        assert (copy.epoch, copy.samples) == (window.epoch, window.samples)
        for row, other in zip(window.timeline.rows, copy.timeline.rows, strict=True):
            assert other.actions == row.actions
            assert (other.began, other.ended) == pytest.approx((row.began, row.ended), abs=1e-8)
            waits = row.spans if row.spans[-1].waited else row.spans[:-1]  # none of no length is written
            for mine, theirs in zip(waits, other.spans, strict=True):
                assert theirs[1:4] == pytest.approx(mine[1:4], abs=1e-8)


def test_a_message_is_received_from_its_sending_on_and_waited_for_under_its_name(tmp_path):
    """Rank 1 waits for its first activation; the second lies ready from 2 s on, until F0 is done at 4 s."""
    program = lower(gpipe(2, 1, 2))
    costs = Costs({(0, Op.F): 1.0, (1, Op.F): 3.0, (0, Op.B): 1.0, (1, Op.B): 1.0})
    write(tmp_path / "trace.json", about(program, 2), as_measured(program, costs, 2))
    spans = {
        (e["cat"], e["name"]): (e["ts"] / 1e6, e["dur"] / 1e6)
        for e in events(tmp_path / "trace.json")
        if e["ph"] == "X"
    }
    assert spans["wait", "1RECV_F0"] == (0.0, 1.0)
    assert spans["receive", "1RECV_F0"] == (1.0, 0.0)
    assert spans["receive", "1RECV_F1"] == (2.0, 2.0)
    assert ("wait", "1RECV_F1") not in spans
    assert spans["compute", "1F1@0"] == (4.0, 3.0)


def test_messages_say_their_bytes_and_what_their_codec_took(tmp_path):
    program = lower(gpipe(2, 1, 2))
    (window,) = as_measured(program, Costs({(0, Op.F): 1.0, (1, Op.F): 3.0}), 2)
    coded = {"0SEND_F0": (100, 0.0), "0SEND_F1": (200, 0.0), "0RECV_B0": (7, 0.25), "0RECV_B1": (8, 0.125)}
    spans = window.timeline.rows[0].spans
    for index, span in enumerate(spans):
        nbytes, codec_s = coded.get(str(span.action), (0, 0.0))
        spans[index] = span._replace(nbytes=nbytes, codec_s=codec_s)
    write(tmp_path / "trace.json", about(program, 2), [window])
    said = {
        e["name"]: {key: e["args"][key] for key in ("bytes", "codec_ms") if key in e["args"]}
        for e in events(tmp_path / "trace.json")
        if e["ph"] == "X"
    }
    assert [said[name] for name in ("0SEND_F0", "0SEND_F1")] == [{"bytes": 100}, {"bytes": 200}]
    backs = [said[name] for name in ("0RECV_B0", "0RECV_B1")]
    assert backs == [{"bytes": 7, "codec_ms": 250.0}, {"bytes": 8, "codec_ms": 125.0}]
    assert said["0F0@0"] == {}
    _, (again,) = read(tmp_path / "trace.json")
    read_back = {str(span.action): (span.nbytes, span.codec_s) for span in again.timeline.rows[0].spans}
    assert {name: read_back[name] for name in coded} == coded


def test_a_file_of_another_format_is_a_value_error(tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps({"otherData": {"format": "2"}, "traceEvents": []}))
    with pytest.raises(ValueError, match="format is 2"):
        read(tmp_path / "trace.json")
