"""SIGTERM while the main thread of a rank is in C++: compiling, say, or waiting for another rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from queue import Queue
from unittest.mock import Mock, patch

import pytest

from pipetrain import signals as module
from pipetrain.errors import ChannelError
from pipetrain.signals import LIMIT, Signals
from tests.support import DEADLINE_S
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


SAVED, TERM, INT = "update-6 is saved", signal.SIGTERM, signal.SIGINT


def training(rank: int, updated: bool = True) -> Signals:
    signals = Signals(rank, lambda: SAVED)
    signals.updated = updated
    return signals


def drained(rank: int = 0) -> Signals:
    signals = Signals(rank)
    signals.drained.set()
    return signals


class Left(Exception):
    """In place of the end of the process."""


@pytest.fixture
def limits(monkeypatch) -> Queue[float]:
    """Nobody ends this process; the seconds after which somebody would."""

    def leaves(sentence: str, status: int = 143) -> None:
        raise Left(f"{status}: {sentence}")

    given: Queue[float] = Queue()
    monkeypatch.setattr(module, "terminate", leaves)
    monkeypatch.setattr(module, "leave", lambda status: leaves("", status))
    monkeypatch.setattr(module, "DEBOUNCE_S", -1.0)
    monkeypatch.setattr(Signals, "outlast", lambda _, number, limit_s: given.put(limit_s))
    return given


@pytest.mark.parametrize(("number", "name", "status"), [(TERM, "SIGTERM", 143), (INT, "Ctrl-C", 130)])
def test_what_is_not_drained_in_time_is_left(monkeypatch, number, name, status):
    end = Mock()
    monkeypatch.setattr(module, "terminate", end)
    training(3).outlast(number, 0.1)
    sentence, with_status = end.call_args.args
    assert re.fullmatch(f"rank 3 leaves without saving: .* {name}, 0.1 s ago, .*; {SAVED}", sentence)
    assert with_status == status


@pytest.mark.parametrize(("limit", "left_s"), [({LIMIT: "8"}, 3.0), ({}, 25.0)])
def test_a_rank_that_is_to_save_has_so_long_and_is_told_which_signal_it_was(
    limits, monkeypatch, limit, left_s
):
    """At once: it may save and end before more is done here, and its status is that of the signal."""
    rank, known = training(0), []
    monkeypatch.delenv(LIMIT, raising=False)
    for name, value in limit.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "say", lambda said: known.append((rank.request, rank.stopped_by, said)))
    for number in (signal.SIGUSR1, TERM):
        rank.on_signal(number)
    assert limits.get(timeout=DEADLINE_S) == left_s
    assert limits.empty()
    save, stop = "saving at the end of this window, then", "saving when the pipeline is drained, then"
    assert known == [
        ("save", 0, f"rank 0 got SIGUSR1: {save} going on"),
        ("stop", TERM, f"rank 0 got SIGTERM: {stop} stopping"),
    ]


TERMINATED = "143: rank 0 got SIGTERM with no update to save, so it ends now"


@pytest.mark.parametrize(
    ("rank", "numbers", "says"),
    [
        (Signals(0), [TERM], TERMINATED),
        (Signals(1), [TERM], "143: "),
        (Signals(0), [INT], "130: interrupted"),
        (training(0, updated=False), [TERM], TERMINATED),
        (training(0, updated=False), [INT], f"130: interrupted; {SAVED}"),
        (training(0), [INT, INT], f"130: interrupted; {SAVED}"),
        (training(1), [INT, TERM], "130: "),  # as torchrun passes it on
        (drained(), [TERM, signal.SIGUSR1, TERM, INT, INT], "130: interrupted"),  # trackers may take long
    ],
)
def test_what_has_nothing_to_save_or_is_interrupted_twice_ends_at_once(limits, rank, numbers, says):
    *first, last = numbers
    for number in first:
        rank.on_signal(number)
        with patch.object(module, "DEBOUNCE_S", DEADLINE_S):  # torchrun passes the same one on
            rank.on_signal(number)
    if first:  # and it saves
        rank.drained.set()
    with pytest.raises(Left, match=f"^{says}$"):
        rank.on_signal(last)


@pytest.mark.parametrize(
    ("rank", "comes", "says"),
    [
        (training(0, updated=False), [TERM, INT], f"Left 130: interrupted; {SAVED}"),
        (training(0, updated=False), [TERM], "ChannelError lost rank 1"),  # torchrun's, of which rank 1 died
        (training(0), [], "ChannelError lost rank 1"),
        (drained(), [], "ChannelError lost rank 1"),
    ],
)
def test_before_the_first_update_a_ctrl_c_that_another_rank_got_first_says_why_it_is_lost(
    limits, monkeypatch, rank, comes, says
):
    """Rank 1 has left; this rank sees the connection closed before it hears the signal."""

    def sleep(_: float) -> None:
        for number in comes or [INT]:
            rank.on_signal(number)

    monkeypatch.setattr(module.time, "sleep", sleep)
    with pytest.raises((Left, ChannelError)) as end, rank.losing():
        raise ChannelError("lost rank 1")
    assert f"{end.type.__name__} {end.value}" == says


@processes
@pytest.mark.parametrize(("name", "end"), [("SIGUSR1", (0, "imported\n")), ("SIGINT", (-signal.SIGINT, ""))])
def test_while_it_imports_sigusr1_ends_no_process_and_ctrl_c_shows_no_traceback(name, end, tmp_path):
    code = f"""
import os, runpy, signal, sys, types
train = sys.modules["pipetrain.commands.train"] = types.ModuleType("pipetrain.commands.train")
train.__getattr__ = lambda _: os.kill(os.getpid(), signal.{name}) or (lambda: print("imported"))
runpy.run_module("pipetrain", run_name="__main__")
"""
    done = finished(tmp_path, ["-c", code])
    assert (done.status, done.out) == end


@processes
def test_a_signal_is_heard_while_the_main_thread_is_in_c(tmp_path):
    """It waits in C++ for the thread that hears the signal."""
    heard = f"""
import os, signal
from datetime import timedelta
from torch.distributed import HashStore
from pipetrain.signals import listening
store = HashStore()
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
with listening(lambda number: store.set(f"heard {{number}}", "")):
    os.kill(os.getpid(), signal.SIGTERM)
    store.wait(["heard {int(signal.SIGTERM)}"], timedelta(seconds={DEADLINE_S}))
"""
    done = finished(tmp_path, ["-c", heard])
    assert (done.status, done.out) == (0, "handled\n")


def test_a_forked_process_is_ended_by_its_parent_s_sigterm_alone_and_the_parent_hears_nothing():
    """A service manager sends it to every process, and the parent still needs its data workers."""
    parent, heard = Signals(0), []
    parent.on_signal = heard.append
    (waits, begun), (request, asks) = os.pipe(), os.pipe()
    with parent.handled():
        if not (child := os.fork()):
            for _ in range(2):
                os.write(begun, b"!")
                os.read(request, 1)
            time.sleep(DEADLINE_S)
            os._exit(1)
        os.read(waits, 1)
        subprocess.run(["kill", "-TERM", str(child)], check=True)
        os.write(asks, b"?")
        assert os.read(waits, 1) == b"!"
        ended, status = 0, 0
        while not ended:  # one that is still pending would swallow the next
            os.kill(child, signal.SIGTERM)
            time.sleep(0.01)
            ended, status = os.waitpid(child, os.WNOHANG)
    assert os.waitstatus_to_exitcode(status) == 0
    assert signal.SIGTERM not in heard
