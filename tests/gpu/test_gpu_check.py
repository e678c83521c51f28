"""The check of a GPU, where there is none: a rehearsal, and what becomes of checks that go wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmark.worlds import share_gpu
from comparison.runs import git_tree
from pipetrain.runtime.engine import Engine
from pipetrain.runtime.rehearsal import LoopbackChannel
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import parse_action
from pipetrain.schedule.timeline import Row as Ran
from pipetrain.schedule.timeline import Span, Timeline, TracedWindow
from tests.gpu import cli, front, memory, strict, traces, training
from tests.gpu.rows import (
    FAIL,
    MIB,
    PASS,
    SKIPPED,
    Check,
    Row,
    Setting,
    earlier,
    judged,
    markdown,
)
from tests.support import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
ALONE = ["nccl-2", "trace", "nan"]  # in a program of its own
REHEARSED = ["large", "error", "start", "replicas", "corrections", "exact", "codecs", "bf16"]
REHEARSED += ["held", "no-waits", "tight", "float64", "race"]
OPTIONS = ["--device", "cpu", "--quick", "--out", "found", "--only"]
NOT_NEEDED = ["safetensors", "tqdm", "tensorboard", "matplotlib", "scipy"]


def names_of(table: str) -> list[str]:
    """Return the checks of a table in which all passed."""
    assert "REHEARSAL" in table
    rows = re.findall(r"^\| (\S+) .*\| (\S*) +\| +[\d.]+ \|$", table, re.MULTILINE)
    assert {outcome for _, outcome in rows} == {PASS}, table
    return list(dict.fromkeys(name for name, _ in rows))


@pytest.mark.processes
def test_a_rehearsal_passes_with_torch_and_hydra_alone(tmp_path):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in NOT_NEEDED:
        (blocked / f"{name}.py").write_text(f"raise ImportError('{name} is not needed')")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/gpu_check.py", *OPTIONS, *ALONE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(blocked)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "found" / cli.REPORT).read_text()
    assert done.stdout == table
    assert names_of(table) == ALONE
    assert len(chrome.read(tmp_path / "found/trace.json")[1]) == 8


@pytest.mark.processes
def test_the_other_checks_pass_in_a_rehearsal(tmp_path, monkeypatch, capsys):
    """Their ranks are forked from the server of the tests, which has imported what they need."""
    monkeypatch.chdir(tmp_path)
    assert cli.main([*OPTIONS, *REHEARSED]) == 0
    assert names_of(capsys.readouterr().out) == REHEARSED


def test_without_a_gpu_it_is_refused_in_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["--quick"]) == cli.REFUSED
    said = "gpu_check: there is no GPU that torch can use; --device cpu --quick rehearses\n"
    assert capsys.readouterr() == ("", said)


def good(setting):
    yield judged("all", "1", "1", True)


def bad(setting):
    assert "| one " in (setting.out / cli.REPORT).read_text()  # the table is there after every row
    yield judged("a | b", "0", "1", False)


def broken(setting):
    yield judged("first", "1", "1", True)
    raise ValueError("many lines\nthe last")


def interrupted(setting):
    yield judged("first", "1", "1", True)
    raise KeyboardInterrupt


def hang(groups, say, *given):
    if groups.world.rank == 1:
        time.sleep(DEADLINE_S)


def count(groups, item):
    """Fail at an item, or stay at it, on the last rank."""
    if item == "bad" and groups.world.rank == groups.world.size - 1:
        raise ValueError("no more")
    if item == "hangs" and groups.world.rank == groups.world.size - 1:
        time.sleep(DEADLINE_S)
    return groups.gather("the items", item)


@pytest.fixture
def setting(tmp_path) -> Setting:
    return Setting("cpu", True, tmp_path, lambda text: None, end=time.monotonic() + DEADLINE_S)


@pytest.mark.processes
def test_what_goes_wrong_is_a_row_and_the_next_goes_on(setting):
    hanging = Check("group", "hanging", lambda setting: setting.world(hang, 2), 1)
    checks = [Check("group", "broken", broken, 60), hanging, Check("group", "good", good, 60)]
    first, error, (_, late, _), last = cli.run(checks, setting)
    assert first[:2] == ("broken", Row("first", "1", "1", PASS))
    assert error[:2] == ("broken", Row("runs to its end", "the last", "no error", FAIL))
    assert late.outcome == FAIL
    assert re.fullmatch(r"ranks \[(0, )?1\] were still running after 1 s", late.figure)
    assert last[:2] == ("good", Row("all", "1", "1", PASS))
    rows = setting.each(count, 2, ["one", "bad", "three", "hangs"], within=5)  # after "bad" in a new world
    one, bad, three, hangs = rows
    assert (one, three) == (("one", ["one"] * 2, ""), ("three", ["three"] * 2, ""))
    assert bad[:2] == ("bad", None)
    assert "ValueError: no more (rank 1)" in bad[2]
    assert hangs == ("hangs", None, "it was still running after 5 s")


@pytest.mark.parametrize(
    ("second", "status", "count"),
    [
        (bad, cli.FAILED, "1 passed, 1 failed."),
        (broken, cli.FAILED, "2 passed, 1 failed."),
        (interrupted, cli.INTERRUPTED, "2 passed, 0 failed."),
    ],
)
def test_the_status_and_the_table_that_is_left(second, status, count, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "CHECKS", [Check("a", "one", good, 60), Check("a", "two", second, 60)])
    assert cli.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == status
    table = (tmp_path / cli.REPORT).read_text()
    assert table == capsys.readouterr().out
    assert table.endswith(f"{count}\n")
    assert ("INTERRUPTED" in table) == (status == cli.INTERRUPTED)
    assert second is not bad or "a \\| b" in table


def test_a_difference_is_seen():
    weight = torch.zeros(3, dtype=torch.float64)
    for change, apart in [(0.0, 0.1), (1.0, 1.0), (float("nan"), float("inf"))]:
        found = training.Trained({"w": weight + change}, [(2.0, 2.0, 0.5)])
        assert training.difference(found, {"w": weight}, [(2.0, 2.1, 0.5)]) == pytest.approx(apart)
        assert training.difference(found, {"v": weight}, [(2.0, 2.0, 0.5)]) == float("inf")


def test_a_receive_before_its_send_and_computing_twice_at_once_are_seen():
    def ran(*timed):
        return Ran(0.0, 9.0, [Span(parse_action(text), *times) for text, *times in timed])

    first = ran(("0F0@0", 0.0, 1.0, 0.0), ("0SEND_F0", 1.0, 3.0, 1.0))
    for received, early in [(2.5, -0.5), (1.75, 0.25)]:
        window = TracedWindow(0, [1], Timeline([first, ran(("1RECV_F0", 0.0, received, received))], 1))
        assert traces.early_s(window) == early
        assert traces.overlap_s(window) == 0.0
    twice = Timeline([ran(("0F0@0", 0, 2.0, 0), ("0F1@0", 1.5, 3.0, 0))], 1)
    assert traces.overlap_s(TracedWindow(0, [1], twice)) == 0.5


@pytest.mark.processes
def test_a_pipeline_is_held_against_a_plain_loop_and_goes_on_from_what_it_saved(setting):
    checks = front.pipeline, front.lengths, front.kept, front.bf16_weights
    rows = [row for check in checks for row in check(setting)]
    assert [row.outcome for row in rows] == [PASS] * 5


def test_a_wait_raises_in_windows_of_training_alone(monkeypatch):
    """And not in a rehearsal, in which kernels are loaded."""
    modes, seen = ["default"], []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(Engine, "_run", lambda engine, window: seen.append(modes[-1]))
    loopback, groups = (
        LoopbackChannel({}, 2, 60, torch.device("cpu")),
        SimpleNamespace(device=torch.device("cuda")),
    )

    def train(groups, case):
        for trains, channel in [
            (True, loopback),
            (False, loopback),
            (True, None),
            (False, None),
            (True, None),
        ]:
            Engine._run(None, SimpleNamespace(trains=trains, mail=SimpleNamespace(channel=channel)))

    monkeypatch.setattr(strict, "train", train)
    strict.without_waits(groups, None)
    assert seen == ["default", "default", "error", "default", "error"]
    assert modes[-1] == "default"


def test_a_lease_of_nine_minutes_has_time_for_all_that_decides():
    limits = {check.name: check.most for check in cli.CHECKS}
    assert sum(limits[name] for name in cli.LEASE) <= 9 * 60
    chosen = cli.choose(cli.parser().parse_args(["--minutes", "9"]))
    assert [check.name for check in chosen] == [*cli.LEASE, *cli.IF_TIME_IS_LEFT]


def test_of_a_lease_what_has_no_time_left_is_a_row_and_no_check_takes_another_ones_time(setting):
    ends = []

    def look(setting):
        ends.append(setting.left)
        yield judged("all", "1", "1", True)

    checks = [Check("group", name, look, most) for name, most in (("short", 20), ("long", 10**6))]
    rows = [*cli.run(checks, setting, time.monotonic() + 30)]
    assert [row.outcome for _, row, _ in rows] == [PASS, PASS]
    assert ends[0] <= 20 < ends[1] <= 30
    ((_, row, _),) = cli.run(checks[:1], setting, time.monotonic() + 1)
    assert (row.figure, row.outcome) == ("no time was left", SKIPPED)


def test_memory_is_held_between_what_is_predicted_and_what_actions_need_beside_it():
    rank = memory.Held([(2, 1)], [(2, 1)], 110 * MIB, 100 * MIB, 20 * MIB)
    less, more = replace(rank, measured=89 * MIB), replace(rank, measured=133 * MIB)
    target = "90 to 132 (100 + 20), 90 to 132 (100 + 20)"
    for other, outcome in ((rank, PASS), (less, FAIL), (more, FAIL)):
        counted, measured = memory.make_rows("1f1b", [rank, other], True)
        assert counted == Row("1f1b: microbatches and versions", "2+1, 2+1", "2+1, 2+1", PASS)
        assert measured == Row("1f1b: MiB", f"110, {other.measured // MIB}", target, outcome)
    (counted,) = memory.make_rows("1f1b", [replace(rank, counted=[(3, 1)])], False)
    assert (counted.figure, counted.outcome) == ("3+1", FAIL)


def test_the_peak_of_a_window_and_what_an_action_needs_are_seen_action_by_action(monkeypatch):
    """Of two actions: one from 100 to 140 with a peak of 200, one from 140 to 120 with a peak of 170."""
    held, peaks = iter([0, 100, 140, 140, 120]), iter([200, 170])
    fakes = {"memory_allocated": lambda: next(held), "max_memory_allocated": lambda *device: next(peaks)}
    for name, fake in {**fakes, "reset_peak_memory_stats": lambda *device: None}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert memory.allocated() == 0
    meter = memory.ByAction({}, torch.device("cpu"))
    for text in ("0F0@0", "0B0@0"):
        with meter.during(parse_action(text)):
            pass
        meter.after([])
    assert (meter.peak, meter.needed) == (200, 60)


def test_rows_of_other_checks_are_kept_where_software_and_gpu_are_the_same(tmp_path):
    about = {"software": "torch 2", "GPU": "A", "libraries": "NCCL 2"}
    lines = [("large", Row("a | b", "1", "2", FAIL), 1.5), ("nan", Row("c", "", "", SKIPPED), 0.0)]
    path = tmp_path / cli.REPORT
    assert earlier(path, about) == []
    path.write_text(markdown(about, lines))
    assert earlier(path, about) == lines
    assert earlier(path, {**about, "GPU": "B"}) == []
    assert cli.in_order([lines[1], lines[0]]) == lines


def test_without_git_the_commit_is_known_by_what_the_package_holds(tmp_path):
    (tmp_path / "b" / "__pycache__").mkdir(parents=True)
    (tmp_path / "b" / "one.py").write_text("1\n")
    (tmp_path / "b.sh").write_text("exit\n")
    (tmp_path / "b.sh").chmod(0o755)
    (tmp_path / "b" / "__pycache__" / "one.pyc").write_text("x")
    # of git add b b.sh; git write-tree
    assert git_tree(tmp_path) == "485074eb98a3747b4a81b50930f18a7e390ab9f7"


def test_ranks_that_share_a_gpu_say_that_they_are_different_machines(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "eth7"})
    share_gpu(3)
    assert os.environ == {"NCCL_HOSTID": "rank3", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "eth7"}
