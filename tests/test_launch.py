"""How ranks agree: what rank 0 says is what the others do; and each error is one sentence and a status."""

from __future__ import annotations

import logging
import subprocess
import sys
from datetime import timedelta
from threading import Thread, current_thread, main_thread

import pytest
import torch.distributed as dist

from pipetrain import launch
from pipetrain.errors import ConfigError, NotRecorded, TrainingStopped
from pipetrain.launch import FAILED, INTERRUPTED, REFUSED, Job, Leader, follow, guarded
from pipetrain.runtime.channel import ChannelError
from pipetrain.runtime.mesh import World
from pipetrain.schedule.actions import ScheduleError
from pipetrain.schedule.simulate import Deadlock

JOB = Job(
    {"seed": 1, "model": {"_target_": "a.b"}, "partition": [8], "window": None},
    "1f1b",
    "/some/run",
    "digits 9+3 0",
)


def raising(error: BaseException):
    def action() -> int:
        raise error

    return action


# Errors


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("no such key"), 2),
        (ScheduleError("no such key"), 2),
        (Deadlock("no such key"), 2),
        (ChannelError("no such key"), 1),
        (TrainingStopped("no such key"), 1),
        (NotRecorded("no such key"), 1),
    ],
)
def test_an_error_that_a_person_can_meet_is_one_sentence_and_a_status(capsys, error, status):
    assert guarded(raising(error)) == status
    out, err = capsys.readouterr()
    assert (out, err) == ("", "pipetrain: no such key\n")


def test_statuses_are_three_kinds_of_failure():
    assert (FAILED, REFUSED, INTERRUPTED) == (1, 2, 130)


def test_a_sentence_of_several_lines_becomes_one(capsys):
    assert guarded(raising(ConfigError("one\n  two\tthree"))) == REFUSED
    assert capsys.readouterr().err == "pipetrain: one two three\n"


def test_an_interruption_is_no_traceback(capsys):
    assert guarded(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "pipetrain: interrupted\n"


@pytest.mark.parametrize("status", [0, 3])
def test_a_status_passes_through(status):
    assert guarded(lambda: status) == status


def test_a_mistake_of_ours_is_not_hidden():
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
def test_leave_ends_the_process_with_the_status_and_all_that_was_printed(status):
    code = f"from pipetrain.launch import leave; print('said', end=''); leave({status}); print('never')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (status, "said", "")


# Agreement


@pytest.fixture
def ranks(monkeypatch):
    """Give a function that leads from this thread and follows from others: (statuses, what they ran)."""
    store = dist.HashStore()
    monkeypatch.setattr(launch, "_store", lambda world: store if world.size > 1 else None)

    def run(lead, size: int = 3):
        statuses: dict[int, object] = {}
        ran: dict[int, list] = {rank: [] for rank in range(1, size)}

        def work(rank: int) -> None:
            def take_part(job: Job, world: World, where: dist.Store) -> None:
                ran[world.rank].append((job, where))
                where.set(f"from {rank}", "here")

            try:
                statuses[rank] = follow(World(rank, size), take_part)
            except BaseException as error:
                statuses[rank] = error

        threads = [Thread(target=work, args=(rank,), daemon=True) for rank in range(1, size)]
        for thread in threads:
            thread.start()
        lead(Leader(World(0, size)))
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        return statuses, ran

    return run


def test_others_run_what_rank_0_decided_and_end_with_it(ranks):
    places = []

    def lead(leader: Leader) -> None:
        places.append(leader.announce(JOB))
        leader.end(0)

    statuses, ran = ranks(lead)
    assert statuses == {1: 0, 2: 0}
    for rank in (1, 2):
        assert [job for job, _ in ran[rank]] == [JOB]
        assert places[0].get(f"from {rank}") == b"here"  # they met under one prefix of the store


def test_a_refusal_ends_everybody_with_its_status_and_nothing_run(ranks):
    statuses, ran = ranks(lambda leader: leader.end(REFUSED))
    assert statuses == {1: REFUSED, 2: REFUSED}
    assert ran == {1: [], 2: []}


def test_a_sweep_is_a_job_after_another_each_with_a_store_of_its_own(ranks):
    second = Job({"seed": 2}, "gpipe", "/another/run", "digits 9+3 0", "profile", {"layers": [0.1]})
    places = []

    def lead(leader: Leader) -> None:
        for job in (JOB, second):
            place = leader.announce(job)
            place.wait(["from 1"], timedelta(seconds=20))
            places.append(place)
        places[0].set("mark", "first")
        leader.end(0)

    statuses, ran = ranks(lead, size=2)
    assert statuses == {1: 0}
    assert [job for job, _ in ran[1]] == [JOB, second]
    assert places[0].check(["mark"])
    assert not places[1].check(["mark"])


def test_a_rank_with_another_version_of_the_code_refuses(ranks, monkeypatch):
    monkeypatch.setattr(launch, "code_fingerprint", lambda: str(current_thread() is main_thread()))
    statuses, ran = ranks(lambda leader: leader.announce(JOB))
    assert all("runs another pipetrain than rank 0 (False, not True)" in str(s) for s in statuses.values())
    assert ran == {1: [], 2: []}


class Argv(list):
    """A command line of rank 0's, another one for the others."""

    def __init__(self, leader: list[str], followers: list[str]) -> None:
        super().__init__(["pipetrain"])
        self.words = {True: leader, False: followers}

    def __getitem__(self, index):
        return self.words[current_thread() is main_thread()] if index == slice(1, None) else "pipetrain"


@pytest.mark.parametrize(
    ("leader", "followers", "said"),
    [
        (["seed=0", "epochs=1"], ["epochs=1", "seed=1"], "seed=1 only here, seed=0 only at rank 0"),
        (["epochs=1", "partition=[8]"], ["epochs=1"], "partition=[8] only at rank 0"),
        (["a=1"], ["a=1", "a=1"], "a=1 only here"),
        (["a=1", "a=2"], ["a=2", "a=1"], "a=2 a=1 here, a=1 a=2 at rank 0"),
    ],
)
def test_a_rank_with_another_command_line_refuses(ranks, monkeypatch, leader, followers, said):
    monkeypatch.setattr(sys, "argv", Argv(leader, followers))
    statuses, ran = ranks(lambda leader: leader.announce(JOB))
    for rank in (1, 2):
        assert isinstance(statuses[rank], ConfigError)
        assert str(statuses[rank]) == (
            f"rank {rank} was started with another command line than rank 0: {said}; give all ranks the same "
            f"words"
        )
    assert ran == {1: [], 2: []}


def test_a_silent_leader_is_named_at_the_deadline(ranks, monkeypatch):
    monkeypatch.setattr(launch, "PATIENCE_S", 0.2)
    statuses, _ = ranks(lambda leader: None, size=2)
    assert isinstance(statuses[1], ChannelError)
    assert str(statuses[1]) == "rank 1 waited up to 0.2 s for rank 0 to say what to run: Wait timeout"


def test_a_follower_s_error_is_its_own(ranks, monkeypatch):
    def refuse(job: Job, world: World, store: dist.Store) -> None:
        raise ConfigError("not here")

    store = dist.HashStore()
    monkeypatch.setattr(launch, "_store", lambda world: store)
    Leader(World(0, 2)).announce(JOB)
    with pytest.raises(ConfigError, match="not here"):
        follow(World(1, 2), refuse)


def test_alone_there_is_nobody_to_tell():
    leader = Leader(World())
    assert leader.announce(JOB) is None
    leader.end(0)
