"""How ranks agree: what rank 0 says is what the others do, and nobody else is believed."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread, current_thread, main_thread

import pytest
import torch.distributed as dist

from pipetrain import launch
from pipetrain.data import DataFacts
from pipetrain.errors import ConfigError, TrainingStopped
from pipetrain.launch import FAILED, INTERRUPTED, REFUSED, Job, Leader, Part, follow
from pipetrain.records.folder import claim, read_key
from pipetrain.runtime.channel import ChannelError
from pipetrain.runtime.mesh import World
from pipetrain.seal import SECRET, Seal, SealedStore
from tests.support.processes import DEADLINE_S

FACTS = DataFacts("digits", 9, 3, "digits 9+3 0", "", [True, [[3, 32, 32], "float32"]])

# Agreement


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """The run's, claimed by rank 0."""
    with claim(tmp_path / "run") as key:
        assert key
        yield tmp_path / "run"


@pytest.fixture
def job(folder) -> Job:
    config = {"seed": 1, "model": {"_target_": "a.b"}, "partition": [8], "window": None}
    return Job(config, "1f1b", str(folder), FACTS)


@pytest.fixture
def raw(monkeypatch) -> dist.Store:
    """What torchrun's store is to the ranks, and to whoever else reaches it."""
    store = dist.HashStore()
    monkeypatch.setattr(launch, "_store", lambda world: store if world.size > 1 else None)
    monkeypatch.setattr(launch, "POLL_S", 0.005)
    return store


@pytest.fixture
def ranks(raw, folder):
    """Give a function that leads from this thread and follows from others: (statuses, what they ran)."""

    def run(lead, size: int = 3, trusted: bool = True, unready: Collection[int] = ()):
        statuses: dict[int, object] = {}
        ran: dict[int, list] = {rank: [] for rank in range(1, size)}

        def work(rank: int) -> None:
            def join(job: Job, world: World) -> Part:
                if rank in unready:
                    raise ConfigError("not here")
                return partial(take_part, job)

            def take_part(job: Job, where: SealedStore) -> None:
                ran[rank].append((job, where))
                where.set(f"from {rank}", "here")

            try:
                statuses[rank] = follow(World(rank, size), join)
            except BaseException as error:
                statuses[rank] = error

        threads = [Thread(target=work, args=(rank,), daemon=True) for rank in range(1, size)]
        for thread in threads:
            thread.start()
        leader = Leader(World(0, size))
        if trusted:
            leader.trust(folder, read_key(folder))
        lead(leader)
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads)
        return statuses, ran

    return run


def test_others_run_what_rank_0_decided_and_end_with_it(ranks, job):
    places = []

    def lead(leader: Leader) -> None:
        places.append(leader.announce(job))
        leader.end(0)

    statuses, ran = ranks(lead)
    assert statuses == {1: 0, 2: 0}
    for rank in (1, 2):
        assert [said for said, _ in ran[rank]] == [job]
        assert places[0].get(f"from {rank}") == "here"  # they met under one prefix of the store


@pytest.mark.parametrize("status", [FAILED, REFUSED, INTERRUPTED])
@pytest.mark.parametrize("trusted", [False, True])
def test_a_refusal_ends_everybody_with_its_status_and_nothing_run(ranks, status, trusted):
    statuses, ran = ranks(lambda leader: leader.end(status), trusted=trusted)
    assert statuses == {1: status, 2: status}
    assert ran == {1: [], 2: []}


def test_a_sweep_is_a_job_after_another_each_with_a_store_of_its_own(ranks, job, tmp_path):
    with claim(tmp_path / "other") as other:
        second = Job({"seed": 2}, "gpipe", str(tmp_path / "other"), FACTS, "profile", {"layers": [0.1]})
        places = []

        def lead(leader: Leader) -> None:
            for said, key in ((job, read_key(Path(job.run_dir))), (second, other)):
                leader.trust(Path(said.run_dir), key)
                places.append(leader.announce(said))
                places[-1].raw.wait(["from 1"], timedelta(seconds=20))
            places[0].set("mark", "first")
            leader.end(0)

        statuses, ran = ranks(lead, size=2)
    assert statuses == {1: 0}
    assert [said for said, _ in ran[1]] == [job, second]
    assert places[0].check("mark")
    assert not places[1].check("mark")


def refused(job: Job):
    """Lead as rank 0 for whose job another rank cannot get ready: it hears of it at once."""

    def lead(leader: Leader) -> None:
        leader.announce(job)
        with pytest.raises(ConfigError, match=r"rank \d refuses this run; look at what it says"):
            leader.await_ready(20)
        leader.end(REFUSED)

    return lead


def test_a_rank_with_another_version_of_the_code_refuses(ranks, job, monkeypatch):
    monkeypatch.setattr(launch, "code_fingerprint", lambda: str(current_thread() is main_thread()))
    statuses, ran = ranks(refused(job))
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
def test_a_rank_with_another_command_line_refuses(ranks, job, monkeypatch, leader, followers, said):
    monkeypatch.setattr(sys, "argv", Argv(leader, followers))
    statuses, ran = ranks(refused(job))
    for rank in (1, 2):
        assert isinstance(statuses[rank], ConfigError)
        assert str(statuses[rank]) == (
            f"rank {rank} was started with another command line than rank 0: {said}; give all ranks the same "
            f"words"
        )
    assert ran == {1: [], 2: []}


def test_rank_0_hears_of_a_rank_that_cannot_get_ready_and_of_those_that_can(ranks, job):
    statuses, ran = ranks(refused(job), unready={2}, size=3)
    assert str(statuses[2]) == "not here"
    assert [said for said, _ in ran[1]] == [job]


def test_a_rank_that_never_starts_is_named(raw, folder, job, monkeypatch):
    monkeypatch.setattr(launch, "START_S", 0.1)
    leader = Leader(World(0, 3))
    leader.trust(folder, read_key(folder))
    raw.set("met/1", "here")
    with pytest.raises(ChannelError, match=r"rank 0 waited 0\.1 s for rank 2 to start"):
        leader.announce(job)
    leader.end(FAILED)  # and waits for nobody


def test_alone_there_is_nobody_to_tell(job):
    leader = Leader(World())
    assert leader.announce(job) is None
    leader.end(0)


# A leader that stands still


@pytest.mark.parametrize(
    ("phase", "says"),
    [
        (
            None,
            "rank 1 waited 0.2 s for rank 0 to start; look at what it says, or give it longer with timeout=",
        ),
        (
            ("read the data set", 0.3),
            "rank 1 waited 0.3 s for rank 0 to read the data set; look at what it says",
        ),
    ],
)
def test_a_silent_leader_is_named_with_what_it_does(ranks, monkeypatch, phase, says):
    monkeypatch.setattr(launch, "START_S", 0.2)
    statuses, _ = ranks(lambda leader: leader.phase(*phase) if phase else None, size=2)
    assert isinstance(statuses[1], ChannelError)
    assert str(statuses[1]).startswith(says)


def test_each_phase_has_its_own_time(ranks, monkeypatch):
    def lead(leader: Leader) -> None:
        for _ in range(4):
            leader.phase(f"be busy {time.monotonic()}", 5.0)
            time.sleep(0.1)
        leader.end(REFUSED)

    monkeypatch.setattr(launch, "START_S", 0.2)
    assert ranks(lead, size=2)[0] == {1: REFUSED}


def test_what_takes_long_is_said_until_the_training_begins(raw, monkeypatch, caplog):
    monkeypatch.setattr(launch, "SILENCE_S", 0.05)
    caplog.set_level(logging.INFO, logger="pipetrain")
    leader = Leader(World(0, 2))
    leader.phase("read the data set", 5.0)
    reminding = Thread(target=leader.remind, daemon=True)
    reminding.start()
    time.sleep(0.2)
    leader.trains.set()
    reminding.join(DEADLINE_S)
    assert not reminding.is_alive()
    assert {record.getMessage() for record in caplog.records} == {
        "pipetrain: it takes time to read the data set"
    }


# Whoever reaches the store


MET = ["theirs", "mine"]


def slipped_in(
    raw: dist.Store, word: dict, folder: str, key: str, sealed_for: list[str], met: list[str]
) -> None:
    """Speak in rank 0's place, with a key of one's own, or what was said before."""
    raw.set("proof/0", json.dumps({"folder": folder, "key": launch._digest(key), "met": met}))
    SealedStore(raw, Seal(key, launch._scope(sealed_for))).set("word/0", json.dumps(word))


TRAP = {"model": {"_target_": "os.system", "command": "true"}, "checkpoint": {"every": 1}}


@pytest.fixture
def hostile(raw, folder, monkeypatch):
    """Give a function that returns what rank 1 answers to words of somebody else's, which it must not run."""
    monkeypatch.setattr(launch, "LATE_S", 0.1)
    monkeypatch.setattr(launch, "_nonce", lambda: MET[1])
    monkeypatch.setattr(sys, "argv", ["pipetrain"])

    def answer(word: dict, folder: str, key: str, sealed_for=MET, met=MET) -> object:
        slipped_in(raw, word, folder, key, sealed_for, met)
        try:
            return follow(World(1, 2), lambda *_: pytest.fail("it was believed"))
        except (ConfigError, TrainingStopped) as error:
            return str(error)

    return answer


def trap(folder: Path) -> dict:
    job = asdict(Job(TRAP, "1f1b", str(folder), FACTS))
    return {"job": job, "code": launch.code_fingerprint(), "arguments": sys.argv[1:]}


FORGED = "what came as word/0 was not said by this run: somebody else has written into torchrun's store"


def test_a_job_of_somebody_else_is_not_run(hostile, folder, tmp_path, monkeypatch):
    key = read_key(folder)
    with monkeypatch.context() as context:
        context.setattr(launch, "_digest", lambda _, real=launch._digest: real(key))  # it is there to be read
        assert FORGED in hostile(trap(folder), str(folder), key[::-1])
        assert FORGED in hostile(trap(folder), "", key[::-1])
    mine = tmp_path / "theirs"  # a folder of their own, whose key they know
    mine.mkdir()
    (mine / ".lock").write_text("ab" * 32)
    assert "does not see" in hostile(trap(mine), str(mine), "ab" * 32)  # others may read it


def test_a_job_that_was_said_elsewhere_is_not_run_again(hostile, folder, monkeypatch):
    key, before = read_key(folder), ["theirs", "another's"]
    assert FORGED in hostile(trap(folder), str(folder), key, before, before)
    assert FORGED in hostile(trap(folder), str(folder), key, before, MET)
    assert FORGED in hostile(trap(folder), str(folder), key, ["theirs"], ["theirs"])
    monkeypatch.setenv(SECRET, "some random words")
    assert FORGED in hostile(trap(folder), str(folder), key, before, before)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    scope = launch._scope(MET)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert scope != launch._scope(MET)


@pytest.mark.parametrize("folder_of", ["", "/nowhere"])
def test_nobody_else_ends_a_run_well(hostile, folder_of):
    said = hostile({"ended": True}, folder_of, "ab" * 32)
    assert "was not said by this run" in said or "does not see" in said


@pytest.mark.parametrize(
    ("flag", "said", "status"),
    [("--help", "0", 0), ("seed=1", "1", 1), ("seed=1", "2", 2), ("seed=1", "0", None), ("--cfg", "7", None)],
)
def test_to_give_up_needs_no_proof(raw, monkeypatch, flag, said, status):
    monkeypatch.setattr(sys, "argv", ["pipetrain", flag])
    raw.set("ended", said)
    if status is None:
        with pytest.raises(TrainingStopped, match="what came as ended was not said by this run"):
            follow(World(1, 2), lambda *_: None)
    else:
        assert follow(World(1, 2), lambda *_: None) == status


@pytest.mark.parametrize(
    "said", [b"", b"{", b"[]", b"3", b'{"folder": 1}', b"\xff", b'{"folder": "", "key": "", "met": []}']
)
def test_words_that_are_none_are_a_sentence(raw, folder, monkeypatch, said):
    for key in ("proof/0", "word/0"):
        raw.set(key, said)
    with pytest.raises(TrainingStopped, match=FORGED):
        follow(World(1, 2), lambda *_: pytest.fail("it was believed"))


def test_a_phase_of_somebody_else_is_a_sentence(raw, monkeypatch):
    raw.set("phase", "[")
    with pytest.raises(ChannelError, match="rank 1 lost rank 0 in its start"):
        follow(World(1, 2), lambda *_: None)
    raw.set("phase", '["wait for ever", NaN]')
    monkeypatch.setattr(launch, "MOST_S", 0.2)
    with pytest.raises(ChannelError, match=r"rank 1 waited 0\.2 s for rank 0 to wait for ever"):
        follow(World(1, 2), lambda *_: None)


@pytest.fixture
def elsewhere(monkeypatch):
    """Let the other ranks see another file system than rank 0."""
    here = launch.read_key
    monkeypatch.setattr(launch, "LATE_S", 0.1)
    monkeypatch.setattr(
        launch, "read_key", lambda path: here(path) if current_thread() is main_thread() else ""
    )


@pytest.mark.parametrize("secret", ["", "some random words"])
def test_a_rank_that_does_not_see_the_folder_is_refused_where_it_is_to_save(
    ranks, job, elsewhere, monkeypatch, secret
):
    monkeypatch.setenv(SECRET, secret)
    statuses, ran = ranks(refused(job), size=2)
    assert isinstance(statuses[1], ConfigError)
    assert f"does not see {job.run_dir}/.lock, which rank 0 has written" in str(statuses[1])
    assert "give run_dir a folder that all machines share" in str(statuses[1])
    assert ran == {1: []}


def test_without_checkpoints_a_secret_is_enough(ranks, job, elsewhere, monkeypatch):
    monkeypatch.setenv(SECRET, "some random words")

    def lead(leader: Leader) -> None:
        leader.announce(replace(job, saves=False))
        leader.end(0)

    assert ranks(lead, size=2)[0] == {1: 0}


# A restart


@pytest.fixture
def restarted(raw, monkeypatch) -> None:
    monkeypatch.setattr(launch, "_store", lambda world: dist.PrefixStore("attempt/1", raw))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


@pytest.mark.parametrize("size", [1, 2])
def test_a_restart_finds_its_folder(restarted, folder, size, monkeypatch):
    """One process alone too: it began from nothing in a new folder."""
    leader = Leader(World(0, size))
    assert leader.remembered() is None
    leader.trust(folder, read_key(folder))
    leader.remember(folder)
    assert Leader(World(0, size)).remembered() == str(folder)
    with monkeypatch.context() as typed:
        typed.setattr(sys, "argv", ["pipetrain", "run_dir=here"])
        assert Leader(World(0, size)).remembered() == str(folder)  # it is finished, or goes on, as this run
        typed.setattr(launch, "_agent", lambda: "another torchrun")
        assert Leader(World(0, size)).remembered() is None
    monkeypatch.setattr(launch, "_agent", lambda: "another torchrun")
    with pytest.raises(TrainingStopped, match="was not said by this run"):
        Leader(World(0, size)).remembered()


@pytest.mark.parametrize("said", [b"", b"/etc", b"x" * 40 + b"/etc\0"])
def test_a_restart_goes_into_no_folder_that_somebody_else_names(restarted, raw, said):
    raw.set(launch._RUN_DIR, said)
    with pytest.raises(TrainingStopped, match="was not said by this run"):
        Leader(World(0, 2)).remembered()
