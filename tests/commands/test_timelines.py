"""`python -m pipetrain.timelines`: a picture of what traced runs did."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipetrain.commands import timelines
from pipetrain.schedule.actions import Op, Program
from pipetrain.schedule.chrome import write
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import one_f_one_b, pipedream
from pipetrain.schedule.timeline import Costs
from tests.support.run_files import about, as_measured

COSTS = Costs({(stage, op): n for stage in (0, 1) for op, n in ((Op.F, 0.1), (Op.B, 0.2))})


def traced(folder: Path, schedule: str, program: Program, windows: int) -> Path:
    """A run's folder with a trace of so many windows; F takes 0.1 s, B 0.2 s, nothing else."""
    folder.mkdir()
    said = {**about(program, 4, 16), "schedule": schedule, "device": "cpu"}
    write(folder / "trace.json", said, as_measured(program, COSTS, 4, windows=windows, microbatch=16))
    return folder


def test_runs_stand_one_above_the_other_by_their_time_for_a_batch(tmp_path, capsys):
    first = traced(tmp_path / "a", "1f1b", lower(one_f_one_b(2, 1, 4)), 3)
    second = traced(tmp_path / "b", "pipedream", lower(pipedream(2, 5, 4)), 1)
    out = tmp_path / "runs.svg"
    assert timelines.main([str(first), str(second / "trace.json"), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"written to {out}\n"
    texts = re.findall(r"<!-- (.*?) -->", out.read_text())
    above, below = (next(i for i, t in enumerate(texts) if name in t) for name in ("1f1b", "pipedream"))
    assert above < below
    facts = "\n".join(texts)
    assert "1.500 s for 1 batch  ·  1.00 times" in facts  # (m + S - 1) (F + B)
    assert "6.300 s for 5 batches  ·  1.19 times the first one's speed  ·  bubble 4.8%" in facts
    bars = [int(text) for text in texts if text.isdecimal()]
    assert max(bars) in (8, 9)  # of a third batch what was begun within two


@pytest.mark.parametrize(
    ("name", "says"), [("none", "cannot be read: No such file"), ("x", "is not a whole trace")]
)
def test_what_is_no_trace_is_refused_in_a_sentence(tmp_path, capsys, name, says):
    (tmp_path / "x").write_text("{}")
    assert timelines.main([str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"pipetrain: {tmp_path / name} {says}")
    assert err.count("\n") == 1
