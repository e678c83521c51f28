"""How the processes of a run start: rank 0 decides what to run, and the other ranks follow.

Only rank 0 composes the configuration with Hydra. It refuses an invalid one with one message, or sends the
others a job through torchrun's key-value store, before any process group exists.

Anyone who can reach the store could pose as rank 0, so its messages are sealed (see pipetrain.seal); without
the key one can only make a run fail. The keys of the store:

    phase            what rank 0 is doing, and how many seconds the others wait for it
    met/RANK         a random number of each other rank; together they identify this start of the run
    word/N           rank 0's N-th message, sealed: a job, or that the run has ended well
    proof/N          what is needed to verify it
    answer/N/RANK    whether a rank is ready for job N
    ended            the exit status of a run that rank 0 has given up
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any, Literal

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipetrain.data.sets import DataFacts
from pipetrain.ending import FAILED, INTERRUPTED, REFUSED
from pipetrain.errors import ChannelError, ConfigError, TrainingStopped
from pipetrain.records.folder import LOCK, read_key
from pipetrain.runtime.mesh import World
from pipetrain.schedule.actions import ScheduleError
from pipetrain.seal import MAC_BYTES, SECRET, Seal, SealedStore, forged
from pipetrain.untrusted import read_as

_RUN_DIR = "pipetrain/run_dir"
_ASKING = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i"}
_READY, _REFUSED = "ready", "refused"
START_S, MOST_S = 300.0, 3600.0  # the others' waits for rank 0 to start, and for any phase at most
LATE_S = 15.0  # until a file is visible on another machine
SILENCE_S = 10.0  # between log lines during a long phase
POLL_S = 0.02

log = logging.getLogger("pipetrain")


@dataclass(frozen=True, slots=True)
class Job:
    """One training run, or the profiling before it, as decided by rank 0."""

    config: dict[str, Any]  # resolved; `data` is the data set really used
    schedule: str
    run_dir: str
    data: DataFacts
    task: Literal["train", "profile"] = "train"
    profile: dict[str, Any] | None = None  # the profile itself: other machines cannot read rank 0's file
    run: str = ""  # the run's unique name
    resume: str | None = None  # the folder of the checkpoint to go on from
    saves: bool = True  # whether all ranks need the run's folder


Part = Callable[[SealedStore | None], object]
"""A rank's part of a job, called once all ranks are ready; they communicate through the store."""
Join = Callable[[Job, World], Part]  # prepares a rank for a job; raises ConfigError


@dataclass(frozen=True, slots=True)
class _Proof:
    """What is needed to verify a message of rank 0."""

    folder: str  # the run's folder, which holds the key
    key: str  # the key's digest: a rank that finds another key does not see the same folder
    met: list[str]  # the random number of each rank


class Leader:
    """Rank 0's side: sends the other ranks their jobs."""

    def __init__(self, world: World) -> None:
        self._own = _store(world)  # torchrun's store, also with a single process
        self._store = self._own if world.size > 1 else None
        self._others = range(1, world.size)
        self._met = [_nonce()]
        self._words = 0
        self._arguments = sys.argv[1:]  # before run_dir= is appended
        self._folder, self._key = "", ""
        self.trains = Event()  # set when training begins, which logs its own progress, and at the end
        self.phase("start", START_S)

    def phase(self, doing: str, limit_s: float) -> None:
        """Tell the others what rank 0 is doing, and for how many seconds to wait for it."""
        if self._store is not None:
            self._store.set("phase", json.dumps([doing, limit_s]))
        self._doing = doing

    def remind(self) -> None:
        """Log the current phase every SILENCE_S seconds until training begins; for a thread of its own."""
        while not self.trains.wait(SILENCE_S):
            log.info("pipetrain: it takes time to %s", self._doing)

    def trust(self, folder: Path, key: str) -> None:
        """Seal with the key of the run's folder from now on. Raises ConfigError if there is no key."""
        if self._store is not None and not (key or os.environ.get(SECRET)):
            raise ConfigError(
                f"run_dir={folder} is on a file system that hides no file from other users, so ranks "
                f"cannot authenticate each other: choose another, or set {SECRET} to the same random words "
                f"on every rank"
            )
        self._folder, self._key = str(folder), key

    def announce(self, job: Job) -> SealedStore | None:
        """Send all ranks a job; return the store for it. Raises ChannelError."""
        if self._store is None:
            return None
        number = self._words
        store = self._send({"job": asdict(job), "code": code_fingerprint(), "arguments": self._arguments})
        return store.under(f"job/{number}")

    def await_ready(self, limit_s: float) -> None:
        """Wait until all ranks are ready; raises ChannelError if one is silent, ConfigError if it refuses."""
        for rank in self._others:
            key = f"answer/{self._words - 1}/{rank}"
            if self._await(key, f"rank {rank} to get ready", max(START_S, limit_s)) != _READY:
                raise ConfigError(f"rank {rank} refuses this run; look at what it says")

    def end(self, status: int) -> None:
        self.trains.set()
        if self._store is None:
            return
        if status == 0 and self._folder:
            self._send({"ended": True})
        else:  # a failure needs no proof
            self._store.set("ended", str(status))

    def remember(self, run_dir: Path) -> None:
        """Store the run's folder for rank 0 after a restart by the same torchrun."""
        if self._own is not None and (self._key or os.environ.get(SECRET)):
            sealed = Seal(self._key, _agent()).close(_RUN_DIR, str(run_dir).encode())
            _across_restarts(self._own).set(_RUN_DIR, sealed)  # type: ignore[arg-type]

    def remembered(self) -> str | None:
        """Return the folder of the run that torchrun has restarted, if any.

        Raises TrainingStopped if the stored folder is not from this torchrun and the command line names none.
        """
        if self._own is None or not restarts():
            return None
        store = _across_restarts(self._own)
        if not store.check([_RUN_DIR]):
            return None
        sealed = store.get(_RUN_DIR)
        key = read_key(Path(sealed[MAC_BYTES:].decode("utf-8", "replace")))
        try:
            return Seal(key, _agent()).open(_RUN_DIR, sealed).decode()
        except TrainingStopped:
            if names_folder():
                return None
            raise

    def _send(self, word: dict[str, Any]) -> SealedStore:
        """Send a message to all ranks that have started; return the store. Raises ChannelError."""
        assert self._store is not None
        for rank in self._others[len(self._met) - 1 :]:
            self._met.append(self._await(f"met/{rank}", f"rank {rank} to start", START_S))
        proof = _Proof(self._folder, _digest(self._key), self._met)
        self._store.set(f"proof/{self._words}", json.dumps(asdict(proof)))
        sealed = SealedStore(self._store, Seal(self._key, _scope(self._met)))
        sealed.set(f"word/{self._words}", json.dumps(word))
        self._words += 1
        return sealed

    def _await(self, key: str, what: str, limit_s: float) -> str:
        assert self._store is not None
        end = time.monotonic() + limit_s
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise ChannelError(f"rank 0 waited {limit_s:g} s for {what}")
            time.sleep(POLL_S)
        return self._store.get(key).decode("latin-1")


def follow(world: World, join: Join) -> int:
    """Do the jobs that rank 0 announces until it ends; return the exit status."""
    follower = _Follower(world)
    importlib.import_module("torch._dynamo")  # needed for planning; takes a second while rank 0 works
    while follower.takes_part(join):
        pass
    return follower.status


class _Follower:
    """The side of the other ranks: receives and verifies rank 0's messages."""

    def __init__(self, world: World) -> None:
        store = _store(world)
        assert store is not None
        self._store = store
        self._world = world
        self._nonce = _nonce()
        self._keys: dict[str, str] = {}  # folder -> key
        self._words = 0
        self.status = 0
        store.set(f"met/{world.rank}", self._nonce)

    def takes_part(self, join: Join) -> bool:
        """Wait for a job and do it; return False when the run has ended, with `status` set.

        Raises ChannelError, ConfigError if this rank cannot take part, TrainingStopped for a forged message.
        """
        number = self._words
        name, answer = f"word/{number}", f"answer/{number}/{self._world.rank}"
        if self._gave_up(name):
            return False
        try:
            store, key = self._proved(number)
            word = json.loads(store.get(name))
            if "ended" in word:
                return False
            part = join(self._accepted(word, key), self._world)
        except (ConfigError, ScheduleError, TrainingStopped):
            self._store.set(answer, _REFUSED)
            raise
        self._store.set(answer, _READY)
        self._words += 1
        part(store.under(f"job/{number}"))
        return True

    def _gave_up(self, key: str) -> bool:
        """Wait for a message, within the limit of rank 0's phase; return whether rank 0 gave up instead."""
        rank = self._world.rank
        said, doing, limit = b"", "start", START_S
        since = time.monotonic()
        try:
            while not self._store.check([key]):
                if self._store.check(["ended"]):
                    self.status = _status(self._store.get("ended"))
                    return True
                if self._store.check(["phase"]) and (now := self._store.get("phase")) != said:
                    said, (doing, seconds), since = now, json.loads(now), time.monotonic()
                    limit = float(seconds) if seconds < MOST_S else MOST_S
                if time.monotonic() - since > limit:
                    raise ChannelError(
                        f"rank {rank} waited {limit:g} s for rank 0 to {doing!s:.80}; look at what it "
                        f"says, or give it longer with timeout="
                    )
                time.sleep(min(POLL_S, limit / 4))
        except (ChannelError, TrainingStopped):
            raise
        except Exception as error:  # a lost connection, or a value that cannot be parsed
            cause = str(error).strip().splitlines()[:1]
            raise ChannelError(f"rank {rank} lost rank 0 in its start: {' '.join(cause)}") from error
        return False

    def _proved(self, number: int) -> tuple[SealedStore, str]:
        """Return the store for messages of a rank 0 that has the folder's key and has met this rank.

        Also returns the key, empty if this rank does not see the folder. Raises ConfigError, TrainingStopped.
        """
        try:
            proof: _Proof = read_as(_Proof, json.loads(self._store.get(f"proof/{number}")), "the proof")
        except ValueError:  # not written by rank 0
            raise forged(f"word/{number}") from None
        if proof.folder not in self._keys:
            self._keys[proof.folder] = _key_of(Path(proof.folder), proof.key) if proof.folder else ""
        key = self._keys[proof.folder]
        if _digest(key) != proof.key:
            key = ""
        if proof.folder and not (key or os.environ.get(SECRET)):
            raise self._not_shared(proof.folder)
        if proof.met[self._world.rank : self._world.rank + 1] != [self._nonce]:  # from another start
            raise forged(f"word/{number}")
        return SealedStore(self._store, Seal(key, _scope(proof.met))), key

    def _accepted(self, word: dict[str, Any], key: str) -> Job:
        """Return a job after checking this rank's code and command line. Raises ConfigError."""
        rank = self._world.rank
        if (theirs := word["code"]) != code_fingerprint():
            raise ConfigError(
                f"rank {rank} runs another pipetrain than rank 0 ({code_fingerprint()}, not {theirs}); "
                f"install the same version on every machine"
            )
        if (words := word["arguments"]) != sys.argv[1:]:
            raise ConfigError(
                f"rank {rank} was started with another command line than rank 0: "
                f"{_difference(words, sys.argv[1:])}; give all ranks the same words"
            )
        job = Job(**word["job"] | {"data": DataFacts(**word["job"]["data"])})
        if job.saves and not key:
            raise self._not_shared(job.run_dir)
        return job

    def _not_shared(self, folder: str) -> ConfigError:
        return ConfigError(
            f"rank {self._world.rank} on {socket.gethostname()} does not see {Path(folder) / LOCK}, which "
            f"rank 0 has written: give run_dir a folder that all machines share; without checkpoints "
            f"(checkpoint.every=null) it is enough to set {SECRET} to the same random words on every machine"
        )


def _status(ended: bytes) -> int:
    """Return the exit status of a run that rank 0 has given up. Raises TrainingStopped for an invalid one.

    A failure needs no proof; success is accepted only where the command line runs nothing, as with --help.
    """
    known = {str(status).encode(): status for status in (FAILED, REFUSED, INTERRUPTED)}
    if not _ASKING.isdisjoint(sys.argv[1:]):
        known[b"0"] = 0
    if ended not in known:
        raise forged("ended")
    return known[ended]


def _key_of(folder: Path, digest: str) -> str:
    """Read the key in the run's folder; network file systems show other machines' files some seconds late."""
    end = time.monotonic() + LATE_S
    while _digest(key := read_key(folder)) != digest and time.monotonic() < end:
        time.sleep(POLL_S)
    return key


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _scope(met: list[str]) -> str:
    """Name this start of the run by a random number of each rank, so that no earlier message is valid."""
    return f"attempt {restarts()} of {' '.join(met)}"


def _nonce() -> str:
    return secrets.token_hex(16)


def _agent() -> str:
    """Identify the torchrun that started this process by its process id and start time."""
    with suppress(OSError, IndexError):
        began = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{os.getppid()} since {began}"
    return str(os.getppid())


def _difference(theirs: list[str], mine: list[str]) -> str:
    """Return the words in which rank 0's command line and this rank's differ."""
    only = [("here", Counter(mine) - Counter(theirs)), ("at rank 0", Counter(theirs) - Counter(mine))]
    parts = [f"{' '.join(words.elements())} only {where}" for where, words in only if words]
    return ", ".join(parts) or f"{' '.join(mine)} here, {' '.join(theirs)} at rank 0"


def code_fingerprint() -> str:
    """Return a digest of this package's source code."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def names_folder() -> bool:
    """Return whether the command line names the run's folder."""
    return any(word.startswith("run_dir=") for word in sys.argv)


def _across_restarts(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _store(world: World) -> Store | None:
    """Connect to torchrun's store; one process without torchrun has none."""
    if world.size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    store: Store = next(rendezvous("env://", timeout=timedelta(seconds=START_S)))[0]
    # torchrun's store survives a restart of the ranks: a new prefix hides their earlier messages.
    return PrefixStore(f"attempt/{restarts()}", store)


def restarts() -> int:
    """Return how often torchrun has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
