"""SIGTERM while the main thread of a rank is in C++: compiling, say, or waiting for another rank."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from queue import Queue
from unittest.mock import patch

import pytest

from pipetrain import signals as module
from pipetrain.signals import LIMIT, Signals
from tests.support.deadlines import DEADLINE_S
from tests.support.processes import FAULTY, LAUNCHER, Ended, await_line, finished, rank_of, started

processes = pytest.mark.processes
AT_ONCE = r"^pipetrain: rank (\d) got SIGTERM with no update to save, so it ends now$"


def stopped(folder: Path, words: list[str], saves: int | None = None) -> Ended:
    """Start two ranks, and let the launcher hear SIGTERM when one is blocked.

    `saves`: a rank that hears SIGUSR1 before that, when there is nothing to save.
    """
    with started(folder, [*words, "run_dir=run"], launcher=LAUNCHER) as process:
        await_line(process, "blocked")
        time.sleep(0.5)  # for the others to be under way, too
        if saves is not None:
            os.kill(rank_of(process, saves), signal.SIGUSR1)
            await_line(process, f"pipetrain: rank {saves} got SIGUSR1 with no update to save, so it goes on")
        process.send_signal(signal.SIGTERM)
        return Ended.of(process, folder / "run")


@processes
def test_before_the_first_update_all_ranks_end_at_once(tmp_path):
    """While rank 0 traces, of which the others know nothing."""
    words = ["model._target_=tests.support.models.Blocked", "partition=even"]
    end = stopped(tmp_path, words, saves=0)
    assert re.findall(AT_ONCE, end.out, re.MULTILINE) == ["0"]
    assert (end.status, end.living, end.checkpoints) == (143, 0, [])
    assert "Traceback" not in end.out
    assert "saving" not in end.out


@processes
def test_a_window_that_does_not_end_is_left_in_time_and_what_is_saved_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv(LIMIT, "8")
    end = stopped(tmp_path, [*FAULTY, "+model.kind=block", "+model.rank=1", "+model.at=30", "epochs=3"])
    assert "rank 0 got SIGTERM: saving when the pipeline is drained, then stopping" in end.out
    left = re.findall(r"^pipetrain: rank \d (?:leaves without saving|lost rank \d).*$", end.out, re.MULTILINE)
    assert left
    assert all(
        re.search(r"SIGTERM.*; update-00000006 is saved: go on with run_dir=\S+ resume=auto$", line)
        for line in left
    )
    assert any("what was under way at SIGTERM, 3 s ago, has not ended" in line for line in left)
    assert (end.status, end.living, end.checkpoints) == (143, 0, ["update-00000006"])
    assert "Traceback" not in end.out


# The rule itself


SAVED = "update-6 is saved"


def training(rank: int, updated: bool = True) -> Signals:
    signals = Signals(rank, lambda: SAVED)
    signals.updated = updated
    return signals


class Left(Exception):
    """In place of the end of the process."""


@pytest.fixture
def quick(monkeypatch):
    """Nobody ends this process."""

    def leaves(sentence: str, status: int = 143) -> None:
        raise Left(f"{status}: {sentence}")

    monkeypatch.setattr(module, "terminate", leaves)
    monkeypatch.setattr(module, "leave", lambda status: leaves("", status))
    monkeypatch.setattr(module, "ONE_S", -1.0)


@pytest.mark.parametrize(
    ("number", "name", "status"), [(signal.SIGTERM, "SIGTERM", 143), (signal.SIGINT, "Ctrl-C", 130)]
)
def test_what_is_not_drained_in_time_is_left(quick, number, name, status):
    says = rf"^{status}: rank 3 leaves without saving: .* {name}, 0.1 s ago, .*; {SAVED}$"
    with pytest.raises(Left, match=says):
        training(3).outlast(number, 0.1)


@pytest.mark.parametrize(("limit", "left_s"), [("8", 3.0), ("soon", 25.0)])
def test_a_rank_that_is_drained_is_left_alone_and_so_is_one_that_is_to_save(
    quick, monkeypatch, capfd, limit, left_s
):
    limits = Queue()
    monkeypatch.setenv(LIMIT, limit)
    monkeypatch.setattr(Signals, "outlast", lambda _, number, limit_s: limits.put(limit_s))
    rank = training(0)
    rank.hear(signal.SIGUSR1)
    assert limits.empty()
    rank.hear(signal.SIGTERM)
    assert limits.get(timeout=DEADLINE_S) == left_s
    rank.drained.set()
    rank.hear(signal.SIGTERM)
    assert capfd.readouterr().err == (
        "pipetrain: rank 0 got SIGUSR1: saving at the end of this window, then going on\n"
        "pipetrain: rank 0 got SIGTERM: saving when the pipeline is drained, then stopping\n"
    )


def test_which_signal_it_was_is_known_as_soon_as_what_it_asks(quick, monkeypatch):
    """The main thread may save and end before more is done here, and its status is that of the signal."""
    rank, known = training(0), []
    monkeypatch.setattr(Signals, "outlast", lambda *_: None)
    monkeypatch.setattr(module, "say", lambda _: known.append((rank.asked, rank.stopped_by)))
    rank.hear(signal.SIGINT)
    assert known == [("stop", signal.SIGINT)]


TERMINATED = "143: rank 0 got SIGTERM with no update to save, so it ends now"


def test_a_rank_without_an_update_ends_at_once_and_rank_0_says_so(quick):
    for rank, number, says in (
        (Signals(0), signal.SIGTERM, TERMINATED),
        (Signals(1), signal.SIGTERM, "143: "),
        (Signals(0), signal.SIGINT, "130: interrupted"),
        (training(0, updated=False), signal.SIGTERM, TERMINATED),
        (training(0, updated=False), signal.SIGINT, f"130: interrupted; {SAVED}"),
    ):
        with pytest.raises(Left, match=f"^{says}$"):
            rank.hear(number)


@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_a_rank_at_once_also_as_torchrun_passes_it_on(quick, monkeypatch, again):
    monkeypatch.setattr(Signals, "outlast", lambda *_: None)
    for number, sentence in ((0, f"130: interrupted; {SAVED}"), (1, "130: ")):
        rank = training(number)
        rank.hear(signal.SIGINT)
        with patch.object(module, "ONE_S", DEADLINE_S):  # torchrun passes the same one on
            rank.hear(signal.SIGINT)
        rank.drained.set()  # and saves
        with pytest.raises(Left, match=f"^{sentence}$"):
            rank.hear(again)


def test_nothing_ends_what_has_trained_but_a_second_ctrl_c(quick, capfd):
    """The trackers may take long to close."""
    rank = Signals(0)
    rank.drained.set()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        rank.hear(number)
    assert capfd.readouterr().err == ""
    with pytest.raises(Left, match=r"^130: interrupted$"):
        rank.hear(signal.SIGINT)


@pytest.mark.parametrize(("name", "end"), [("SIGUSR1", (0, "imported\n")), ("SIGINT", (-signal.SIGINT, ""))])
def test_while_it_imports_sigusr1_ends_no_process_and_ctrl_c_shows_no_traceback(name, end, tmp_path):
    code = f"""
import os, runpy, signal, sys, types
train = sys.modules["pipetrain.train"] = types.ModuleType("pipetrain.train")
train.__getattr__ = lambda _: os.kill(os.getpid(), signal.{name}) or (lambda: print("imported"))
runpy.run_module("pipetrain", run_name="__main__")
"""
    done = finished(tmp_path, ["-c", code])
    assert (done.status, done.out) == end


def test_a_signal_is_heard_while_the_main_thread_is_in_c(tmp_path):
    """It waits in C++ for the thread that hears the signal."""
    heard = f"""
import os, signal
from datetime import timedelta
from torch.distributed import HashStore
from pipetrain.signals import hearing
store = HashStore()
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
with hearing(lambda number: store.set(f"heard {{number}}", "")):
    os.kill(os.getpid(), signal.SIGTERM)
    store.wait(["heard {int(signal.SIGTERM)}"], timedelta(seconds={DEADLINE_S}))
"""
    done = finished(tmp_path, ["-c", heard])
    assert (done.status, done.out) == (0, "handled\n")


def test_a_forked_process_is_ended_by_sigterm_and_its_parent_hears_nothing():
    parent, heard = Signals(0), []
    parent.hear = heard.append
    waits, begun = os.pipe()
    with parent.handled():
        if not (child := os.fork()):
            os.write(begun, b"!")
            time.sleep(DEADLINE_S)
            os._exit(0)
        os.read(waits, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert signal.SIGTERM not in heard
