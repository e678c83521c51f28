"""How the ranks of the command line start: each composes its own configuration, and they refuse together.

What is the same for all is refused by each of them alike. What one alone can know (its GPU, its files, the
run's folder) it brings along when they meet: then rank 0 says it for all, and all end with the same status.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from pipetrain import models
from pipetrain.config.build import build
from pipetrain.errors import ChannelError, ConfigError, Refused, one_line
from pipetrain.model.specs import named_layers
from pipetrain.plan.partition import require_layers
from pipetrain.runtime.comm.collective_guard import compare_ranks
from pipetrain.runtime.comm.ranks import Ranks, World
from pipetrain.runtime.comm.rendezvous import SILENCE_S, START_S, make_group, this_attempt
from pipetrain.schedule.actions import ScheduleError
from pipetrain.signals import Signals

REFUSED_S = 5.0  # for the others to hear that rank 0 refuses; torchrun ends those that come later
_RUN_DIR = "pipetrain_run_dir"

log = logging.getLogger("pipetrain")


class Start:
    """One rank's way to the training of each job. `words`: its command line.

    `doing`: what it does, for `remind`; `trains`: set when training begins, which logs its own progress.
    """

    def __init__(self, world: World, words: Sequence[str], signals: Signals) -> None:
        self.world = world
        self.signals = signals
        self.doing = "start"
        self.trains = Event()
        self._words = list(words)
        self._attempt = this_attempt(world)
        self._ranks: Ranks | None = None

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

    def begin(self, cfg: DictConfig, word: Mapping[str, Any] | None = None) -> Any:
        """Return rank 0's `word` (JSON) on all ranks, if they run the same. Raises Refused, ChannelError.

        `cfg`: the composed configuration, by which the others know how long rank 0 may read its data.
        """
        content: Any = OmegaConf.to_container(cfg, resolve=False)
        content.pop("run_dir", None)  # which rank 0 is told in a restart
        keys = ["timeout", "data.source.total_timeout"] if self.world.rank else ["timeout"]
        times = (OmegaConf.select(cfg, key) for key in keys)  # rank 0 refuses what is no number
        limit_s = START_S + sum(time for time in times if isinstance(time, int | float))
        self.doing = "let all ranks start"
        self._meet(limit_s)
        return self.broadcast_word(
            "start", word, {"pipetrain": code_fingerprint(), "command line": self._words, **content}
        )

    def broadcast_word(self, doing: str, item: Any = None, same: Mapping[str, Any] | None = None) -> Any:
        """Return rank 0's `item` once all ranks have come with the `same`. Raises Refused, ChannelError."""
        self.doing = f"let all ranks {doing}"
        ranks = self._meet(START_S)
        ranks.barrier_or_raise(doing)
        compare_ranks(ranks, f"what they have to {doing}", same or {})
        return ranks.broadcast(f"what they need to {doing}", item)

    def refuse(self, error: ConfigError | ScheduleError) -> NoReturn:
        """End all ranks by an error of this one, before they train. Raises Refused, or the error."""
        error = self.as_refused(error, START_S if self.world.rank else REFUSED_S)
        if isinstance(error, Refused):
            # When a rank has left torchrun ends the others, and rank 0 is to say why.
            self.signals.drained.set()
            with suppress(ChannelError):
                self._meet(REFUSED_S).broadcast("the end")
        raise error

    def as_refused(self, error: ConfigError | ScheduleError, limit_s: float) -> ConfigError | ScheduleError:
        """Return an error of this rank as Refused, if all ranks hear it, which they do before they train."""
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
            store, several = self._attempt.meet(limit_s), self.world.size > 1
            if several:
                make_group(self.world, store, timedelta(seconds=limit_s))
            self._ranks = Ranks(self.world, limit_s, dist.group.WORLD if several else None)
        return self._ranks


def _outliving(name: str) -> Path | None:
    """Return the path of a file that outlives the ranks of this torchrun, and that nobody else can write.

    It lies beside torchrun's folders of each attempt: TORCHELASTIC_ERROR_FILE is attempt_N/RANK/error.json.
    """
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return attempt.with_name(name) if attempt.name.startswith("attempt_") else None


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
