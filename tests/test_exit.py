"""Each error that a person can meet is one sentence and a status; a mistake of ours is not hidden."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from pipetrain import errors
from pipetrain.errors import ChannelError, ConfigError, NotRecorded, Refused, TrainingStopped, unsaid
from pipetrain.exit import guarded
from pipetrain.records.files import LogFile
from pipetrain.schedule.actions import ScheduleError
from pipetrain.schedule.simulate import Deadlock
from tests.support.processes import DEADLINE_S


@pytest.fixture
def log(tmp_path) -> Iterator[Path]:
    """The run's log, as conf/config.yaml makes it."""
    handler = LogFile(str(tmp_path / "run.log"))
    logging.getLogger().addHandler(handler)
    yield tmp_path / "run.log"
    logging.getLogger().removeHandler(handler)
    handler.close()


@pytest.mark.parametrize(
    ("error", "status", "rank", "said"),
    [
        (ConfigError("no\n  such\tkey"), 2, 1, "no such key"),
        (Refused("no such key"), 2, 0, "no such key"),
        (unsaid(Refused("no such key")), 2, 1, ""),  # rank 0 says it for all
        (unsaid(TrainingStopped("no such key")), 1, 1, ""),
        (ScheduleError("no such key"), 2, 1, "no such key"),
        (Deadlock("no such key"), 2, 1, "no such key"),
        (ChannelError("no such key"), 1, 1, "no such key"),
        (TrainingStopped("no such key"), 1, 1, "no such key"),
        (NotRecorded("no such key"), 1, 1, "no such key"),
        (KeyboardInterrupt(), 130, 0, "interrupted"),
        (KeyboardInterrupt(), 130, 1, ""),
    ],
)
def test_an_error_that_a_person_can_meet_is_one_sentence_and_a_status(
    capsys, monkeypatch, log, error, status, rank, said
):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(errors, "SPEAKING_S", 0)
    assert guarded(Mock(side_effect=error)) == status
    assert capsys.readouterr() == ("", said and f"pipetrain: {said}\n")
    written = said or str(error)  # also of what another rank says
    assert (log.read_text() if written else "") == (written and f"pipetrain: {written}\n")


def test_a_status_passes_through_and_a_mistake_of_ours_is_not_hidden():
    assert [guarded(lambda status=status: status) for status in (0, 3)] == [0, 3]
    with pytest.raises(ZeroDivisionError):
        guarded(Mock(side_effect=ZeroDivisionError))


def test_an_error_that_another_rank_says_is_of_its_kind_and_ends_a_program_without_a_word():
    with pytest.raises(ConfigError, match="no such key"):
        raise unsaid(Refused("no such key"))
    code = "from pipetrain import errors as e; e.SPEAKING_S = 0; raise e.unsaid(e.Refused('no such key'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize("status", [0, 2])
def test_leave_ends_the_process_with_the_status_and_all_that_was_printed_without_torch_or_the_runtime(status):
    code = f"""if 1:
        import atexit, sys
        from pipetrain.exit import leave
        atexit.register(lambda: print(' at exit', end=''))
        print({{'torch', 'pipetrain.runtime'}} & sys.modules.keys(), end='')
        leave({status})
        print('never')
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (status, "set()" + " at exit" * (not status), "")
