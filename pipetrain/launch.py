"""How the processes of one run agree on what to do: rank 0 decides, the others follow.

Only rank 0 composes a configuration with Hydra. It refuses what is wrong, once and in one sentence, and tells
the others through torchrun's key-value store what to run. So there is one run folder and one opinion about
every value, `--help`, `--cfg job` and `--multirun` work under torchrun as they do without it, and all this
happens before a process group exists.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipetrain.errors import ActionFailed, ConfigError, NotRecorded, TrainingStopped
from pipetrain.runtime.channel import ChannelError
from pipetrain.runtime.mesh import World
from pipetrain.schedule.actions import ScheduleError

REFUSED, FAILED, INTERRUPTED = 2, 1, 130
_RUN_DIR = "pipetrain/run_dir"
PATIENCE_S = 3600.0  # how long the others wait for rank 0, which may have a data set to download


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


Run = Callable[[Job, World, Store | None], None]


class Leader:
    """Rank 0's side: tells the others what to run. Without others it tells nobody."""

    def __init__(self, world: World) -> None:
        self._store = _store(world)
        self._jobs = 0
        self._words = sys.argv[1:]  # as typed

    def announce(self, job: Job) -> Store | None:
        """Start a job on all ranks; return the store for its process groups."""
        return self._say({"job": asdict(job), "code": code_fingerprint(), "words": self._words})

    def end(self, status: int) -> None:
        """Let the others exit with a status."""
        self._say({"end": status})

    def remember(self, run_dir: Path) -> None:
        """Keep the run's folder for whoever leads after a restart."""
        if self._store is not None:
            _across_restarts(self._store).set(_RUN_DIR, str(run_dir))

    def remembered(self) -> str | None:
        """Return the folder of the run that torchrun has restarted, if it has."""
        if self._store is None or not _restarts():
            return None
        store = _across_restarts(self._store)
        return store.get(_RUN_DIR).decode() if store.check([_RUN_DIR]) else None

    def _say(self, word: dict[str, Any]) -> Store | None:
        if self._store is None:
            return None
        self._store.set(f"word/{self._jobs}", json.dumps(word))
        self._jobs += 1
        return PrefixStore(f"job/{self._jobs}", self._store)


def follow(world: World, run: Run) -> int:
    """Do what rank 0 says until it ends; return the exit status."""
    store = _store(world)
    assert store is not None
    done = 0
    while True:
        key = f"word/{done}"
        try:
            store.wait([key], timedelta(seconds=PATIENCE_S))
        except RuntimeError as error:
            cause = str(error).strip().splitlines()[0]
            raise ChannelError(
                f"rank {world.rank} waited up to {PATIENCE_S:g} s for rank 0 to say what to run: {cause}"
            ) from error
        word = json.loads(store.get(key))
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
        run(Job(**word["job"]), world, PrefixStore(f"job/{done}", store))


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


def _across_restarts(store: Store) -> Store:
    """Return the store without torchrun's prefix, which changes with every restart."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _store(world: World) -> Store | None:
    if world.size == 1:
        return None
    store: Store = next(rendezvous("env://", timeout=timedelta(seconds=PATIENCE_S)))[0]
    # torchrun's store lives on when it restarts the ranks: what they said before must not be heard again.
    return PrefixStore(f"attempt/{_restarts()}", store)


def _restarts() -> int:
    """How often torchrun has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def guarded(action: Callable[[], int]) -> int:
    """Run `action`; turn each error that a person can meet into one sentence and an exit status."""
    try:
        return action()
    except (ConfigError, ScheduleError) as error:
        return _complain(error, REFUSED)
    except ActionFailed as error:
        if error.__cause__ is not None:  # most likely of a model that is not ours
            traceback.print_exception(error.__cause__)
        return _complain(error, FAILED)
    except (ChannelError, NotRecorded, TrainingStopped) as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)


def _complain(error: object, status: int) -> int:
    text = "pipetrain: " + " ".join(str(error).split())
    print(text, file=sys.stderr, flush=True)
    record = logging.LogRecord("pipetrain", logging.ERROR, __file__, 0, text, None, None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
    return status


def leave(status: int) -> None:
    """Exit at once with a failure's status: a half-dead process group may hang in its destructors."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
    sys.exit(0)
