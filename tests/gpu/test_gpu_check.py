"""The check of a GPU, where there is none: a rehearsal, and what becomes of checks that go wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmark.tasks import Task, prepare
from benchmark.worlds import share_gpu
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import parse_action
from pipetrain.schedule.timeline import Row as Ran
from pipetrain.schedule.timeline import Span, Timeline, TracedWindow
from tests.gpu import cli, memory, speed, training
from tests.gpu.rows import FAIL, MIB, NOT_RUN, PASS, SKIPPED, Check, Row, Setting, head, judged
from tests.support.deadlines import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
REHEARSED = [check.name for check in cli.CHECKS if check.name != "nccl-4"]  # as nccl-2, and slow
OPTIONS = ["--device", "cpu", "--quick", "--out", "found", f"--budget={DEADLINE_S}", "--only"]
NOT_NEEDED = ["safetensors", "tqdm", "tensorboard", "matplotlib", "sklearn", "scipy"]


@pytest.mark.processes
def test_a_rehearsal_passes_with_torch_and_hydra_alone(tmp_path):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in NOT_NEEDED:
        (blocked / f"{name}.py").write_text(f"raise ImportError('{name} is not needed')")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/gpu_check.py", *OPTIONS, *REHEARSED],
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
    assert "REHEARSAL" in table
    rows = re.findall(r"^\| (\S+) .*\| (\S*) +\| +[\d.]+ \|$", table, re.MULTILINE)
    assert list(dict.fromkeys(name for name, _ in rows)) == REHEARSED
    assert {name for name, outcome in rows if outcome == PASS} == {*REHEARSED} - {"options"}
    assert len(chrome.read(tmp_path / "found/trace.json")[1]) == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--quick", "gpu_check: there is no GPU that torch can use; --device cpu --quick rehearses\n"),
        ("--device cpu", "gpu_check: --device cpu is a rehearsal: give it --quick too\n"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(arguments.split()) == cli.REFUSED
    assert capsys.readouterr() == ("", said)


def good(setting):
    yield judged("all", "1", "1", True)


def bad(setting):
    assert "| one " in (setting.out / cli.REPORT).read_text()  # the table is there after every row
    yield judged("a | b", "0", "1", False)


def broken(setting):
    yield judged("first", "1", "1", True)
    raise ValueError("many lines\nthe last")


def hanging(setting):
    yield from setting.world(hang, 2)


def interrupted(setting):
    yield judged("first", "1", "1", True)
    raise KeyboardInterrupt


def hang(mesh, say):
    if mesh.world.rank == 1:
        time.sleep(DEADLINE_S)


@pytest.mark.processes
def test_what_goes_wrong_is_a_row_and_the_next_goes_on(tmp_path):
    setting = Setting("cpu", True, tmp_path, lambda text: None)
    checks = [
        Check("broken", broken, 0, 60),
        Check("hanging", hanging, 0, 1),
        Check("large", good, 10 * DEADLINE_S, 10 * DEADLINE_S),
        Check("good", good, 0, 60),
    ]
    found = [(name, row) for name, row, _ in cli.run(checks, setting, DEADLINE_S)]
    late, unfit = found.pop(2)[1], found.pop(2)[1]
    assert (late.outcome, unfit.outcome) == (FAIL, NOT_RUN)
    assert re.fullmatch(r"ranks \[(0, )?1\] were still running after 1 s", late.figure)
    assert found == [
        ("broken", Row("first", "1", "1", PASS)),
        ("broken", Row("runs to its end", "the last", "no error", FAIL)),
        ("good", Row("all", "1", "1", PASS)),
    ]


@pytest.mark.parametrize(
    ("second", "status", "count"),
    [
        (bad, cli.FAILED, "1 passed, 1 failed, 0 not run."),
        (broken, cli.FAILED, "2 passed, 1 failed, 0 not run."),
        (interrupted, cli.INTERRUPTED, "2 passed, 0 failed, 0 not run."),
    ],
)
def test_the_status_and_the_table_that_is_left(second, status, count, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "CHECKS", [Check("one", good, 0, 60), Check("two", second, 0, 60)])
    assert cli.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == status
    table = (tmp_path / cli.REPORT).read_text()
    assert table == capsys.readouterr().out
    assert table.endswith(f"{count}\n")
    assert ("INTERRUPTED" in table) == (status == cli.INTERRUPTED)
    assert second is not bad or "a \\| b" in table


@pytest.mark.parametrize(("change", "apart"), [(0.0, 0.0), (1e-6, 1e-6), (float("nan"), float("inf"))])
def test_a_difference_is_seen(change, apart):
    weight = torch.zeros(3, dtype=torch.float64)
    found = training.Trained({"w": weight + change}, [(2.0, 2.0, 0.5)], 0)
    assert training.difference(found, {"w": weight}, [(2.0, 2.0, 0.5)]) == apart
    assert training.difference(found, {"v": weight}, [(2.0, 2.0, 0.5)]) == float("inf")
    if not change:
        assert training.difference(found, {"w": weight}, [(2.0, 2.1, 0.5)]) == pytest.approx(0.1)


def test_a_receive_before_its_send_and_computing_twice_at_once_are_seen():
    def ran(*timed):
        return Ran(0.0, 9.0, [Span(parse_action(text), *times) for text, *times in timed])

    first = ran(("0F0@0", 0.0, 1.0, 0.0), ("0SEND_F0", 1.0, 3.0, 1.0))
    for received, early in [(2.5, -0.5), (1.75, 0.25)]:
        window = TracedWindow(0, [1], Timeline([first, ran(("1RECV_F0", 0.0, received, received))], 1))
        assert training.early_s(window) == early
        assert training.overlap_s(window) == 0.0
    twice = Timeline([ran(("0F0@0", 0, 2.0, 0), ("0F1@0", 1.5, 3.0, 0))], 1)
    assert training.overlap_s(TracedWindow(0, [1], twice)) == 0.5


@pytest.mark.slow
def test_a_microbatch_alone(monkeypatch):
    """The stage is real; its memory is not: 100 more at every look, and a peak of 1000."""
    looks = iter(range(0, 10_000, 100))
    fakes = {"synchronize": int, "reset_peak_memory_stats": int, "max_memory_allocated": lambda: 1000}
    for name, fake in {**fakes, "memory_allocated": lambda: next(looks)}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    job = prepare(Task(("model=mlp", "microbatches=4", "batch_size=8")), "1f1b", 2, 1)
    mesh = SimpleNamespace(world=SimpleNamespace(rank=1), device=torch.device("cpu"))
    entered = sum(spec.nbytes for spec in job.plan.boundaries[2][1].specs)
    # The second batch is the sixth look, and keeps 100 between its forward and its backward.
    assert memory.alone(job, mesh) == (100 + entered, 1000 - 500 - 100)
    assert [memory.messages(job, rank) for rank in (0, 1)] == [3 * entered, 4 * entered]


class Gpu(Setting):
    """A setting with a GPU, whose worlds find what they are told to."""

    def world(self, work, ranks, *arguments, staged=False, timeout=60.0):
        return self.kept["found"]


@pytest.fixture
def gpu(tmp_path):
    return Gpu("cuda", False, tmp_path, lambda text: None)


def test_memory_is_held_against_what_is_predicted(gpu):
    held = memory.Held((2, 1), (2, 1), 110 * MIB, 100 * MIB)
    gpu.kept["found"] = [dict.fromkeys(memory.SCHEDULES, held), dict.fromkeys(memory.SCHEDULES, held)]
    gpu.kept["found"][1] = {**gpu.kept["found"][1], "gpipe": memory.Held((2, 1), (1, 1), 70 * MIB, 100 * MIB)}
    rows = list(memory.memory(gpu))
    assert len(rows) == 2 * 2 * len(memory.SCHEDULES)
    assert rows[:4] == [
        Row("2 ranks, gpipe: microbatches and versions", "2+1, 2+1", "2+1, 1+1", FAIL),
        Row("2 ranks, gpipe: MiB measured/predicted", "110/100, 70/100: 1.10 0.70", "0.75 to 1.25", FAIL),
        Row("2 ranks, 1f1b: microbatches and versions", "2+1, 2+1", "2+1, 2+1", PASS),
        Row("2 ranks, 1f1b: MiB measured/predicted", "110/100, 110/100: 1.10 1.10", "0.75 to 1.25", PASS),
    ]


def test_options_are_given_without_a_target_and_no_compiler_is_a_reason(gpu, monkeypatch):
    monkeypatch.setattr(speed, "find_spec", lambda name: None)
    names = ["plain loop", *speed.OPTIONS]
    gpu.kept["found"] = [{("vgg16", 512): {name: [0.004, 0.002, 0.003] for name in names}}]
    *given, compiled = speed.options(gpu)
    assert given[0] == Row("vgg16, batch 512, fp32", "3.00 ms a batch, plain 3.00: 1.000")
    assert (compiled.outcome, "no triton" in compiled.figure) == (SKIPPED, True)


def test_the_head_names_the_gpu(monkeypatch):
    fakes = {
        "get_device_name": "NVIDIA A",
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(total_memory=80 * 2**30),
    }
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    about = head(["--only", "nan"], "cuda")
    assert about["command"] == "python scripts/gpu_check.py --only nan"
    assert about["GPU"] == "NVIDIA A, 80 GiB, compute capability 9.0"
    assert "NCCL 2.27.5" in about["libraries"]


def test_ranks_that_share_a_gpu_say_that_they_are_different_machines(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "eth7"})
    share_gpu(3)
    assert os.environ == {"NCCL_HOSTID": "rank3", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "eth7"}
