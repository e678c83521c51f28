"""How a run that was started by `pipetrain` ends: its status, and that nobody shows a traceback."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import pipetrain
from pipetrain.checkpoint.files import CHECKPOINTS
from pipetrain.commands import launcher
from pipetrain.config import settings
from pipetrain.schedule import chrome
from pipetrain.signals import DEBOUNCE_S
from tests.support import DEADLINE_S
from tests.support.processes import (
    FAULTY,
    LAUNCHER,
    Ended,
    Started,
    await_epoch,
    await_line,
    checkpoints,
    finished,
    lines_of,
    living,
    rank_of,
    said,
    started,
)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up as Linux shows them"),
]

# A window of 48 batches, at least 24 seconds long: it would outlive what torchrun gives a rank.
SLOW = [*FAULTY, "+model.kind=sleep", "+model.rank=1", "+model.at=500", "batch_size=8", "schedule=pipedream"]
WORDS = {
    "stopped": [*SLOW, "trace=true", "data.workers=1"],
    "in its start": [],
    "refused": ["microbatches=65"],
    "interrupted": ["epochs=99", *FAULTY, "+model.kind=sleep", "+model.rank=1", "+model.at=50"],
    "interrupted twice": SLOW,
}


N, OWN = "--nproc_per_node=", "--master_addr=127.0.0.1 --master_port=PORT -m pipetrain"
TWO_NODES = "--nnodes=2 --rdzv_endpoint=a:1 --nproc-per-node=2"


@pytest.mark.parametrize(
    ("words", "environment", "gpus", "arguments", "threads"),
    [
        ("", {}, 0, f"{N}2 {OWN} experiment=quickstart", 2),
        ("", {"NPROC": "4"}, 0, f"{N}4 {OWN} experiment=quickstart", 1),
        ("epochs=3", {}, 0, f"{N}2 {OWN} epochs=3", 2),
        ("epochs=3", {}, 4, f"{N}4 {OWN} epochs=3", 1),
        ("device=cpu", {}, 4, f"{N}2 {OWN} device=cpu", 2),
        ("stages=4 ++stages=3", {}, 0, f"{N}3 {OWN} stages=4 ++stages=3", 1),
        ("stages=4", {"NPROC": "1"}, 4, f"{N}1 {OWN} stages=4", 4),
        ("x=1", {"OMP_NUM_THREADS": "3"}, 0, f"{N}2 {OWN} x=1", 3),
        ("--max-restarts=3 x=1", {}, 0, f"--max-restarts=3 {N}2 {OWN} x=1", 2),
        (f"x=1 {TWO_NODES}", {}, 8, f"{TWO_NODES} -m pipetrain x=1", 1),
        ("seed=0,1 -m", {}, 0, f"{N}2 {OWN} seed=0,1 --multirun", 2),
        ("-m seed=0,1", {}, 0, f"{N}2 {OWN} --multirun seed=0,1", 2),
        ("--standalone -m pipetrain x=1", {}, 4, "--standalone -m pipetrain x=1", None),
    ],
)
def test_processes_and_threads(monkeypatch, words, environment, gpus, arguments, threads):
    started = []
    monkeypatch.setattr(launcher, "start", lambda given: started.append(" ".join(given)) or 7)
    for module in (settings, launcher):
        monkeypatch.setattr(module, "cores", lambda: 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "environ", dict(environment))
    assert launcher.main(words.split()) == 7
    (given,) = started
    assert re.sub(r"(master_port)=\d+", r"\1=PORT", given) == arguments
    assert os.environ.get("OMP_NUM_THREADS") == (None if threads is None else str(threads))


def test_only_this_machine_reaches_its_store(monkeypatch):
    def start(given: list[str]) -> int:
        (port,) = (int(word.partition("=")[2]) for word in given if word.startswith("--master_port"))
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):  # it listens on one address, and this is another
            socket.create_connection(("127.0.0.2", port))
        return 7

    monkeypatch.setattr(launcher, "start", start)
    assert launcher.main(["model=mlp"]) == 7


def test_more_processes_than_the_model_has_layers_are_not_started(monkeypatch, capfd):
    monkeypatch.setattr(launcher, "start", lambda given: 7)
    monkeypatch.setattr(launcher, "cores", lambda: 4)
    assert launcher.main(["stages=12", "model=mlp"]) == 2
    assert capfd.readouterr().err.startswith(
        "pipetrain: stages=12 needs at least as many layers, but the model has 6"
    )
    assert launcher.main(["stages=4", "model=mlp", "model.depth=3"]) == 7  # its ranks refuse as fast
    assert launcher.main(["replicas=[6,6]", "model=mlp"]) == 7
    assert launcher.main(["--cfg", "job", "stages=12", "model=mlp"]) == 7


def test_what_is_no_option_is_refused_before_a_process_starts(monkeypatch, capfd):
    monkeypatch.setattr(launcher, "start", lambda given: pytest.fail("it starts"))
    assert launcher.main(["model=mlp", "--epochs", "3"]) == 2
    assert capfd.readouterr().err.startswith(
        "pipetrain: --epochs cannot be read: options are written as epochs=3,"
    )


def test_the_command_leaves_threads_of_torchruns_in_cpp_alone(monkeypatch):
    left: list[int] = []
    monkeypatch.setattr("sys.argv", ["pipetrain", "model=mlp"])
    monkeypatch.setattr(launcher, "start", lambda given: 7)
    monkeypatch.setattr(launcher, "leave", left.append)
    launcher.main()
    assert left == [7]


def test_it_says_its_version(capsys):
    assert launcher.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pipetrain {pipetrain.__version__}\n"


def test_a_wrong_nproc_is_refused(monkeypatch, capsys):
    for number in ("abc", "0", "99999"):
        monkeypatch.setenv("NPROC", number)
        assert launcher.main([]) == 2
        assert f"NPROC={number} must be a whole number" in capsys.readouterr().err.replace("'", "")


LOSES = """
import signal, subprocess
from pipetrain.config import settings
from pipetrain.commands import launcher

lost = []

def interrupted(options):
    lost.append(subprocess.Popen(["sleep", "60"]))
    raise launcher.SignalException("stop", signal.SIGTERM)

launcher.run = interrupted
print(launcher.main(["-m", "pipetrain"]), lost[0].wait(600))
"""


def test_a_process_that_torchrun_has_lost_is_ended(tmp_path):
    """As it loses one that it is just starting when a signal comes."""
    assert finished(tmp_path, ["-c", LOSES]).out.split() == [str(128 + signal.SIGTERM), str(-signal.SIGKILL)]


def test_sigusr1_is_passed_on_to_ranks_and_to_nothing_else_that_runs():
    """It saves on a rank, and would end another process."""
    another, rank = (
        subprocess.Popen(["sleep", "600"], env=env, start_new_session=True) for env in ({}, {"RANK": "0"})
    )
    try:
        while b"sleep" not in Path(f"/proc/{rank.pid}/cmdline").read_bytes():
            time.sleep(0.001)  # until it has its own environment
        launcher._pass_on(signal.SIGUSR1, None)
        assert rank.wait(DEADLINE_S) == -signal.SIGUSR1
        assert another.poll() is None
    finally:
        for process in (another, rank):
            process.kill()
            process.wait()


def stop(process: Started) -> None:
    await_line(process, "slept")  # so that an update has been made
    for pid in living(process):  # as a service manager does, to the data worker too
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.15)
    os.kill(process.pid, signal.SIGTERM)  # whoever sends it again does not want less


def stop_early(process: Started) -> None:
    while len(living(process)) < 2:  # until the launcher has started a rank
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)


def interrupt(process: Started) -> None:
    await_epoch(process, 1)
    for rank in range(2):
        os.kill(rank_of(process, rank), signal.SIGUSR1)
    for _ in range(2):  # each rank says it, and goes on
        await_line(process, "got SIGUSR1: saving at the end of this window, then going on")
    await_line(process, "epoch ")
    os.kill(process.pid, signal.SIGINT)


def interrupt_twice(process: Started) -> None:
    await_line(process, "slept")
    os.kill(process.pid, signal.SIGINT)
    for _ in range(2):  # each rank says it
        await_line(process, "Ctrl-C again ends it at once")
    time.sleep(DEBOUNCE_S + 0.1)
    os.kill(process.pid, signal.SIGINT)


DEEDS = {"in its start": stop_early, "interrupted twice": interrupt_twice, "stopped": stop}
DEEDS["interrupted"] = interrupt


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> dict[str, Ended]:
    """A run for each way to end; all at once, because most of their time is the start."""
    found = {}
    with ExitStack() as stack:
        runs = {}
        for name, words in WORDS.items():
            folder = tmp_path_factory.mktemp("run")
            run = started(folder, [*words, "run_dir=run"], launcher=LAUNCHER)
            runs[name] = folder / "run", stack.enter_context(run)
        for name, deed in DEEDS.items():
            deed(runs[name][1])
        for name, (run, process) in runs.items():
            found[name] = Ended.of(process, run)
    return found


@pytest.mark.parametrize("name", WORDS)
def test_no_process_is_left_and_no_traceback_shown(name, ends):
    assert ends[name].living == 0
    assert not re.search("Traceback|SignalException|ChildFailedError", ends[name].out)


def test_a_stop_within_a_window_is_saved_with_the_trace_and_ends_well(ends):
    end = ends["stopped"]
    assert end.status == 0, end.out
    assert "got SIGTERM: saving when the pipeline is drained, then stopping" in end.out
    assert "stopped after a checkpoint; go on with: run_dir=" in end.out
    (manifest,) = checkpoints(end.run).values()
    assert 1 <= manifest.position.batch < 47
    _, windows = chrome.read(end.run / "trace.json")
    assert [len(window.samples) for window in windows] == [manifest.position.batch]
    assert "where the run was stopped" in end.out
    assert not (end.run / "summary.json").exists()


def test_a_stop_before_there_is_anything_to_save_and_ctrl_c_again_end_it_at_once(ends):
    early, twice = ends["in its start"], ends["interrupted twice"]
    assert (early.status, twice.status) == (128 + signal.SIGTERM, 128 + signal.SIGINT)
    assert twice.out.splitlines()[-1] == "pipetrain: interrupted; there is no checkpoint yet"
    assert not [path for end in (early, twice) for path in end.run.glob(f"{CHECKPOINTS}/*")]


def test_a_refusal_is_one_sentence_and_its_status(ends):
    end = ends["refused"]
    assert end.status == 2
    sentence = "batch_size=64 cannot be cut into microbatches=65: choose fewer, or a larger batch_size"
    assert lines_of(end.out) == [f"pipetrain: {sentence}"]
    assert not end.run.exists()


def test_ctrl_c_saves_and_its_last_line_says_what_and_how_to_go_on(ends):
    end = ends["interrupted"]
    assert end.status == 128 + signal.SIGINT
    assert (
        "got Ctrl-C: saving when the pipeline is drained, then stopping; Ctrl-C again ends it at" in end.out
    )
    # A rank that the signal reaches late may say that it got it after the sentence.
    *_, last = (line for line in end.out.splitlines() if "got Ctrl-C" not in line)
    newest, *_ = end.checkpoints
    assert last == f"pipetrain: interrupted; {newest} is saved: go on with run_dir={end.run} resume=auto"
    assert said(end.out).count("interrupted") == 1
