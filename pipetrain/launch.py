"""How the processes of one run agree on what to do: rank 0 decides, the others follow.

Only rank 0 composes a configuration with Hydra. It refuses what is wrong, once and in one sentence, and tells
the others through torchrun's key-value store what to run. So there is one run folder and one opinion about
every value, `--help`, `--cfg job` and `--multirun` work under torchrun as they do without it, and all this
happens before a process group exists.

Whoever reaches that store could speak in rank 0's place, so all that it says is sealed: see pipetrain.seal.
"""

from __future__ import annotations

import atexit
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
from typing import Any, Literal

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipetrain.errors import FAILED as FAILED
from pipetrain.errors import INTERRUPTED as INTERRUPTED
from pipetrain.errors import REFUSED as REFUSED
from pipetrain.errors import ChannelError, ConfigError, TrainingStopped
from pipetrain.errors import guarded as guarded
from pipetrain.runtime.mesh import World
from pipetrain.seal import MAC_BYTES, SECRET, Seal, SealedStore
from pipetrain.training.folder import LOCK, read_key

ENDED = "PIPETRAIN_ENDED"  # a folder into which each rank writes how it ended, for pipetrain.launcher
_RUN_DIR = "pipetrain/run_dir"
_ASKING = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i"}
START_S, MOST_S = 300.0, 3600.0  # how long the others wait for rank 0 to start, and for anything at most
LATE_S = 15.0  # how long a file may take to be seen on another machine
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks do next, as rank 0 has decided it: one training run, or the profiling before it."""

    config: dict[str, Any]  # resolved; `data` is the data set really used
    schedule: str
    run_dir: str
    fingerprint: str  # of the data set
    task: Literal["train", "profile"] = "train"
    profile: dict[str, Any] | None = None  # what to cut by: other machines cannot read rank 0's file
    run: str = ""  # its own name
    resume: str | None = None  # the folder of the checkpoint to go on from
    saves: bool = True  # whether all ranks need the run's folder


Run = Callable[[Job, World, SealedStore | None], None]


class Leader:
    """Rank 0's side: tells the others what to run. Without others it tells nobody."""

    def __init__(self, world: World) -> None:
        self._store = _store(world)
        self._size = world.size
        self._others = world.size > 1
        self._met = [_nonce()]
        self._jobs = 0
        self._words = sys.argv[1:]  # as typed
        self._folder, self._key = "", ""
        self.phase("start", START_S)

    def phase(self, doing: str, limit_s: float) -> None:
        """Say what the others wait for, and how many seconds they shall."""
        if self._others and self._store is not None:
            self._store.set("phase", json.dumps([doing, limit_s]))

    def trust(self, folder: Path, key: str) -> None:
        """Seal with the key of the run's folder from now on. Raises ConfigError where there is none."""
        if self._others and not (key or os.environ.get(SECRET)):
            raise ConfigError(
                f"run_dir={folder} is on a file system that keeps no file from others, so ranks cannot prove "
                f"who they are: choose another, or set {SECRET} to the same random words for every rank"
            )
        self._folder, self._key = str(folder), key

    def announce(self, job: Job) -> SealedStore | None:
        """Start a job on all ranks; return what they talk through."""
        self._folder = job.run_dir
        self._say({"job": asdict(job), "code": code_fingerprint(), "words": self._words})
        if self._store is None or not self._others:
            return None
        return _store_of(self._jobs, self._store, self._key, self._met)

    def end(self, status: int) -> None:
        """Let the others exit with a status."""
        if status and len(self._met) < self._size:  # some may never start; to give up needs no proof
            self._folder = ""
        self._say({"end": status})

    def remember(self, run_dir: Path) -> None:
        """Keep the run's folder for whoever leads after a restart by the same torchrun."""
        if self._store is not None and (self._key or os.environ.get(SECRET)):
            sealed = Seal(self._key, _agent()).close(_RUN_DIR, str(run_dir).encode())
            _across_restarts(self._store).set(_RUN_DIR, sealed)  # type: ignore[arg-type]

    def remembered(self) -> str | None:
        """Return the folder of the run that torchrun has restarted, if it has.

        Raises TrainingStopped where another torchrun, or somebody else, has said it, and none was typed.
        """
        if self._store is None or not restarts():
            return None
        store = _across_restarts(self._store)
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

    def _say(self, word: dict[str, Any]) -> None:
        if self._store is None or not self._others:
            return
        name, content = f"word/{self._jobs}", json.dumps(word).encode()
        if self._folder:
            self._meet(self._store)
        sealed = Seal(self._key, _scope(self._met)).close(name, content).decode("latin-1")
        said = {"folder": self._folder, "key": _digest(self._key), "met": self._met, "word": sealed}
        self._store.set(name, json.dumps(said))
        self._jobs += 1

    def _meet(self, store: Store) -> None:
        """Wait for every rank's random number. Raises ChannelError."""
        end = time.monotonic() + START_S
        for rank in range(len(self._met), self._size):
            while not store.check([f"met/{rank}"]):
                if time.monotonic() > end:
                    raise ChannelError(f"rank 0 waited {START_S:g} s for rank {rank} to start")
                time.sleep(POLL_S)
            self._met.append(store.get(f"met/{rank}").decode("latin-1"))


def follow(world: World, run: Run) -> int:
    """Do what rank 0 says until it ends; return the exit status."""
    store = _store(world)
    assert store is not None
    done, nonce, keys = 0, _nonce(), dict[str, str]()
    store.set(f"met/{world.rank}", nonce)
    importlib.import_module("torch._dynamo")  # planning will, and takes a second, while rank 0 has work to do
    while True:
        said = _awaited(f"word/{done}", store, world)
        word, key, met, shared = _believed(f"word/{done}", said, world, nonce, keys)
        if "end" in word:
            return int(word["end"])
        done += 1
        if (theirs := word["code"]) != code_fingerprint():
            raise ConfigError(
                f"rank {world.rank} runs another pipetrain than rank 0 ({code_fingerprint()}, not {theirs}); "
                f"install the same version on every machine"
            )
        if (difference := _difference(word["words"], sys.argv[1:])) is not None:
            raise ConfigError(
                f"rank {world.rank} was started with another command line than rank 0: {difference}; give "
                f"all ranks the same words"
            )
        job = Job(**word["job"])
        if job.saves and not shared:
            raise _not_shared(world, job.run_dir)
        run(job, world, _store_of(done, store, key, met))


def _awaited(key: str, store: Store, world: World) -> bytes:
    """Wait for a word of rank 0's, and look meanwhile what it is doing. Raises ChannelError."""
    doing: list[Any] = ["start", START_S]
    since = time.monotonic()
    try:
        while not store.check([key]):
            if store.check(["phase"]) and (now := json.loads(store.get("phase"))) != doing:
                doing, since = now, time.monotonic()
            waited, limit = time.monotonic() - since, min(float(doing[1]), MOST_S)
            if waited > limit:
                raise ChannelError(
                    f"rank {world.rank} waited {limit:g} s for rank 0 to {doing[0]!s:.80}; look at what it "
                    f"says, or give it longer with timeout="
                )
            time.sleep(min(POLL_S, limit / 4))
        return store.get(key)
    except ChannelError:
        raise
    except Exception as error:  # of the connection, or of words that are none
        cause = str(error).strip().splitlines()[:1]
        raise ChannelError(f"rank {world.rank} lost rank 0 in its start: {' '.join(cause)}") from error


def _believed(
    name: str, said: bytes, world: World, nonce: str, keys: dict[str, str]
) -> tuple[dict[str, Any], str, list[str], bool]:
    """Prove a word; return it with the run's key, whom rank 0 has met, and whether we see the run's folder.

    It was said in this start of the run if rank 0 has met this rank's `nonce`. `keys` of folders are read
    once. Before rank 0 has a folder it can only end, and nobody has to be believed in order to give up.
    """
    try:
        outer = json.loads(said)
        folder, digest, word = str(outer["folder"]), outer["key"], outer["word"].encode("latin-1")
        met = [str(other) for other in outer["met"]]
        end = None if folder else json.loads(word[MAC_BYTES:])["end"]
    except (LookupError, AttributeError, TypeError, ValueError):
        folder, digest, word, met, end = "", "", b"", [], None
    if not folder and (end in (FAILED, REFUSED, INTERRUPTED) or (end == 0 and _only_asks())):
        return {"end": end}, "", met, False
    if folder not in keys:
        keys[folder] = _key_of(Path(folder), digest) if folder else ""
    key = keys[folder]
    shared = bool(key) and _digest(key) == digest
    if folder and not (shared or os.environ.get(SECRET)):
        raise _not_shared(world, folder)
    if met[world.rank : world.rank + 1] != [nonce]:
        word = b""  # it is of another start
    return json.loads(Seal(key, _scope(met)).open(name, word)), key, met, shared


def _only_asks() -> bool:
    """Whether the command line has a flag, such as --help or --cfg, with which nothing is run."""
    return not _ASKING.isdisjoint(sys.argv[1:])


def _key_of(folder: Path, digest: str) -> str:
    """Read the key in the run's folder. Network file systems show what others write some seconds late."""
    end = time.monotonic() + LATE_S
    while _digest(key := read_key(folder)) != digest and time.monotonic() < end:
        time.sleep(POLL_S)
    return key


def _not_shared(world: World, folder: str) -> ConfigError:
    return ConfigError(
        f"rank {world.rank} on {socket.gethostname()} does not see {Path(folder) / LOCK}, which rank 0 has "
        f"written: give run_dir a folder that all machines share; without checkpoints "
        f"(checkpoint.every=null) it is enough to set {SECRET} to the same random words on every machine"
    )


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _store_of(job: int, store: Store, key: str, met: list[str]) -> SealedStore:
    return SealedStore(store, Seal(key, _scope(met))).under(f"job/{job}")


def _scope(met: list[str]) -> str:
    """Name this start of the run, by a random number of each rank: nothing sealed before has this name."""
    return f"attempt {restarts()} of {' '.join(met)}"


def _nonce() -> str:
    return secrets.token_hex(16)


def _agent() -> str:
    """Name the torchrun that has started this process: its process, and when that began."""
    with suppress(OSError, IndexError):
        began = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{os.getppid()} since {began}"
    return str(os.getppid())


def _difference(theirs: list[str], mine: list[str]) -> str | None:
    """Say in which words rank 0's command line and this rank's differ, if they do."""
    if theirs == mine:
        return None
    only = [("here", Counter(mine) - Counter(theirs)), ("at rank 0", Counter(theirs) - Counter(mine))]
    said = [f"{' '.join(words.elements())} only {where}" for where, words in only if words]
    return ", ".join(said) or f"{' '.join(mine)} here, {' '.join(theirs)} at rank 0"


def code_fingerprint() -> str:
    """Return what tells one version of this package's code from another."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def names_folder() -> bool:
    """Whether the command line names the run's folder."""
    return any(word.startswith("run_dir=") for word in sys.argv)


def _across_restarts(store: Store) -> Store:
    """Return the store without torchrun's prefix, which changes with every restart."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _store(world: World) -> Store | None:
    """Connect to torchrun's store; one process without torchrun has none."""
    if world.size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    store: Store = next(rendezvous("env://", timeout=timedelta(seconds=START_S)))[0]
    # torchrun's store lives on when it restarts the ranks: what they said before must not be heard again.
    return PrefixStore(f"attempt/{restarts()}", store)


def restarts() -> int:
    """How often torchrun has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def leave(status: int) -> None:
    """Exit at once: a half-dead process group may hang in its destructors, and a whole one takes long."""
    if (folder := os.environ.get(ENDED)) is not None:
        with suppress(OSError):
            Path(folder, str(_rank())).write_text(str(status))
    if not status:
        atexit._run_exitfuncs()  # those of a model's own libraries too
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
