"""Each error that a person can meet is one sentence and a status; a mistake of ours is not hidden."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from pipetrain.ending import FAILED, INTERRUPTED, REFUSED, guarded
from pipetrain.errors import ConfigError, NotRecorded, TrainingStopped
from pipetrain.runtime.channel import ChannelError
from pipetrain.schedule.actions import ScheduleError
from pipetrain.schedule.simulate import Deadlock
from tests.support.processes import DEADLINE_S


def raising(error: BaseException):
    def action() -> int:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("no\n  such\tkey"), 2),
        (ScheduleError("no such key"), 2),
        (Deadlock("no such key"), 2),
        (ChannelError("no such key"), 1),
        (TrainingStopped("no such key"), 1),
        (NotRecorded("no such key"), 1),
    ],
)
def test_an_error_that_a_person_can_meet_is_one_sentence_and_a_status(capsys, error, status):
    assert guarded(raising(error)) == status
    assert capsys.readouterr() == ("", "pipetrain: no such key\n")


def test_an_interruption_is_no_traceback(capsys, monkeypatch):
    assert guarded(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "pipetrain: interrupted\n"
    monkeypatch.setenv("RANK", "1")  # rank 0 says it for all
    assert guarded(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_a_status_passes_through_and_a_mistake_of_ours_is_not_hidden():
    assert (FAILED, REFUSED, INTERRUPTED) == (1, 2, 130)
    assert [guarded(lambda status=status: status) for status in (0, 3)] == [0, 3]
    with pytest.raises(ZeroDivisionError):
        guarded(raising(ZeroDivisionError()))


def test_the_sentence_is_in_the_run_s_log_too(tmp_path, capsys):
    handler = logging.FileHandler(tmp_path / "run.log")
    logging.getLogger().addHandler(handler)
    try:
        guarded(raising(TrainingStopped("the loss is nan")))
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    assert (tmp_path / "run.log").read_text() == "pipetrain: the loss is nan\n"
    assert capsys.readouterr().err.count("the loss is nan") == 1


@pytest.mark.parametrize("status", [0, 2])
def test_leave_ends_the_process_with_the_status_and_all_that_was_printed_without_torch_or_the_runtime(status):
    code = f"""if 1:
        import atexit, sys
        from pipetrain.ending import leave
        atexit.register(lambda: print(' at exit', end=''))
        print({{'torch', 'pipetrain.runtime'}} & sys.modules.keys(), end='')
        leave({status})
        print('never')
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (status, "set()" + " at exit" * (not status), "")
