"""How the ranks of the command line start: rank 0 reads it and sends the others its options, as JSON.

What one rank alone can know (its GPU, its files) it brings along when they meet: then rank 0 says it for all,
and all end with the same status. Nothing here imports Hydra, which the other ranks do without.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from pipetrain import models
from pipetrain.config.build import build
from pipetrain.config.choices import conf_dir
from pipetrain.errors import ChannelError, ConfigError, Refused, one_line
from pipetrain.model.specs import named_layers
from pipetrain.plan.partition import require_layers
from pipetrain.runtime.comm.collective_guard import compare_ranks
from pipetrain.runtime.comm.collectives import Ranks, World
from pipetrain.runtime.comm.rendezvous import SILENCE_S, START_S, make_group, this_attempt
from pipetrain.schedule.actions import ScheduleError
from pipetrain.signals import Signals

REFUSED_S = 5.0  # for the others to receive rank 0's refusal; torchrun ends those that come later
_RUN_DIR = "pipetrain_run_dir"
_PRINTING = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i"}
_PAIRS = "_pairs_"

log = logging.getLogger("pipetrain")


class Start:
    """One rank's way to the training of each job. `words`: its command line.

    `doing`: what it does, for `remind`; `trains`: set when training begins, which logs its own progress.
    """

    def __init__(self, world: World, words: Sequence[str], signals: Signals) -> None:
        self.world = world
        self.words = list(words)
        self.signals = signals
        self.doing = "start"
        self.trains = Event()
        self.attempt = this_attempt(world)
        self._ranks: Ranks | None = None

    @property
    def prints(self) -> bool:
        """Whether the command line is for something to be printed by rank 0, and nothing runs."""
        return any(word.partition("=")[0] in _PRINTING for word in self.words)

    def remind(self) -> None:
        """Log what takes long every SILENCE_S seconds until training begins; for a thread of its own."""
        while not self.trains.wait(SILENCE_S):
            if self.doing:
                log.info("pipetrain: it takes time to %s", self.doing)

    @property
    def run_dir(self) -> str | None:
        """The folder of the run that torchrun has restarted, if it has."""
        file = _outliving(_RUN_DIR)
        return os.fsdecode(file.read_bytes()) if file and file.exists() else None

    def remember(self, run_dir: Path) -> None:
        """Keep the run's folder for a restart by the same torchrun."""
        with suppress(OSError):  # without room it would be another folder
            if file := _outliving(_RUN_DIR):
                file.write_bytes(os.fsencode(run_dir))

    def exchange(self, job: Mapping[str, Any] | None, limit_s: float) -> Any:
        """Return the job, of JSON, that rank 0 sends to ranks that run the same; None if none is left.

        Raises Refused and ChannelError.
        """
        self.doing = "let all ranks start" if job else self.doing
        ranks = self._meet(limit_s)
        ranks.barrier_or_raise("start", limit_s=limit_s)
        job = ranks.broadcast("what they need to start", job)
        if job is not None:
            same = {"pipetrain": code_fingerprint(), "command line": self.words}
            compare_ranks(ranks, "what they have to start", same)
        return job

    def end(self, limit_s: float = START_S) -> None:
        """On rank 0: send that no job is left, if the others wait for one. Raises ChannelError."""
        if not (self.prints or self.trains.is_set()):  # after a training that is no sweep's they leave
            self.exchange(None, limit_s)

    def synchronize(self, doing: str, same: Mapping[str, Any] | None = None) -> None:
        """Wait until all ranks have come with the `same`. Raises Refused, ChannelError."""
        self.doing = f"let all ranks {doing}"
        ranks = self._meet(START_S)
        ranks.barrier_or_raise(doing)
        compare_ranks(ranks, f"what they have to {doing}", same or {})

    def refuse(self, error: ConfigError | ScheduleError) -> NoReturn:
        """On rank 0: end all ranks by an error before they train. Raises Refused, or the error."""
        error = self.as_refused(error, REFUSED_S)
        if isinstance(error, Refused):
            # When a rank has left torchrun ends the others, and rank 0 is to say why.
            self.signals.drained.set()
            with suppress(ChannelError):
                self.end(REFUSED_S)
        raise error

    def as_refused(self, error: ConfigError | ScheduleError, limit_s: float) -> ConfigError | ScheduleError:
        """Return an error of this rank as Refused, if all ranks receive it, as they do before they train."""
        self.doing = ""  # the folder with the log is gone
        if self.world.size > 1 and not self.trains.is_set() and not isinstance(error, Refused):
            try:
                self._meet(limit_s).barrier_or_raise("start", refusal=one_line(error), limit_s=limit_s)
            except ChannelError:
                pass
            except Refused as refused:
                return refused
        return error

    def _meet(self, limit_s: float) -> Ranks:
        """Return the ranks once all have come for the first time. Raises ChannelError."""
        if self._ranks is None:
            store, group = self.attempt.meet(limit_s), None
            if self.world.size > 1:
                make_group(self.world, store, timedelta(seconds=limit_s))
                group = dist.group.WORLD
            self._ranks = Ranks(self.world, limit_s, group)
        return self._ranks


def _outliving(name: str) -> Path | None:
    """Return the path of a file that outlives the ranks of this torchrun, and that nobody else can write.

    It lies beside torchrun's folders of each attempt: TORCHELASTIC_ERROR_FILE is attempt_N/RANK/error.json.
    """
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return attempt.with_name(name) if attempt.name.startswith("attempt_") else None


def as_json(value: Any) -> Any:
    """Return the values of a configuration as JSON can hold them, with keys that are no texts."""
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: as_json(item) for key, item in value.items()}
    return {_PAIRS: [[key, as_json(item)] for key, item in value.items()]}


def from_json(value: Any) -> Any:
    """Return the values that `as_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {key: from_json(item) for key, item in value.get(_PAIRS, value.items())}


def refuse_unnamed(options: Any, words: Sequence[str]) -> None:
    """Refuse a `_target_` that neither a command line names nor a file of conf/. Raises ConfigError.

    The options have come over the network: what they may call is this rank's to say.
    """
    folders = [conf_dir()]
    for word, after in zip(words, [*words[1:], ""], strict=False):
        flag, _, value = word.partition("=")
        folders += [Path(value or after)] if flag in ("--config-dir", "-cd") else []
    files = [path for folder in folders for path in (*folder.glob("*.yaml"), *folder.glob("*/*.yaml"))]
    texts = *words, *(file.read_text() for file in files)
    named = {name for text in texts for name in re.findall(r"[\w.]+", text)}
    for target in _targets(options):
        if target not in named:
            raise ConfigError(
                f"rank 0 has {target} as a _target_, which neither the command line nor the files of "
                f"{' and '.join(map(str, folders))} name on this rank: write it out there"
            )


def _targets(options: Any) -> Iterator[str]:
    if isinstance(options, Mapping):
        if "_target_" in options:
            yield str(options["_target_"])
        options = list(options.values())
    for item in options if isinstance(options, list) else ():
        yield from _targets(item)


def refuse_few_layers(cfg: Mapping[str, Any], stages: int) -> None:
    """Refuse more stages than one of our own models has layers, which is known without its numbers."""
    model = cfg["model"]
    if isinstance(model, Mapping) and str(model.get("_target_")).startswith(f"{models.__name__}."):
        with torch.device("meta"):
            require_layers(stages, [name for name, _ in named_layers(build(cfg, "model"))])


def code_fingerprint() -> str:
    """Return a digest of this package's source code."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
