"""Whether a run may resume from a checkpoint, and which settings it takes from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn

from pipetrain.checkpoint.files import CHECKPOINTS, folders
from pipetrain.checkpoint.source import Source
from pipetrain.errors import ConfigError
from pipetrain.network.model import state_names
from pipetrain.records.folder import SUMMARY, is_of
from pipetrain.settings import PROFILE, Mode, Settings
from pipetrain.training.run import Run


def lengthens(run_dir: Path, cfg: DictConfig, settings: Settings) -> bool:
    """Return whether more epochs would continue the finished run in `run_dir`.

    Raises ConfigError if the learning rates of its finished updates would have been different.
    """
    if not (folders(run_dir / CHECKPOINTS) and is_of(run_dir, cfg, {"resume", "epochs"})):
        return False
    try:
        summary = json.loads((run_dir / SUMMARY).read_text())
        updates, epochs = int(summary["updates"]), int(summary["epochs"])
        rate, other = settings.rate(updates), settings.rate(updates // epochs * settings.epochs)
    except (OSError, LookupError, TypeError, ValueError, ZeroDivisionError):
        return False
    if settings.epochs > epochs and any(rate(update) != other(update) for update in range(updates)):
        raise ConfigError(
            f"run_dir={run_dir} holds a run that finished after {epochs} epochs, and with "
            f"lr_schedule={cfg.lr_schedule} warmup={cfg.warmup:g} the rates of {settings.epochs} epochs "
            f"differ from the start: train anew in another run_dir, or go on there from its last weights "
            f"with resume={run_dir}"
        )
    return settings.epochs > epochs


def done_batches(source: Source | None) -> int:
    """Return the number of batches already done in the epoch that the run resumes."""
    return source.manifest.position.batch if source else 0


def with_cuts_of(cfg: DictConfig, source: Source, ranks: int) -> DictConfig:
    """Return the configuration with the checkpoint's cuts where it would otherwise be profiled again."""
    pipeline = source.manifest.pipeline
    if cfg.partition != PROFILE or ranks != len(set(pipeline["placement"])) or "cuts" not in pipeline:
        return cfg
    cfg = cfg.copy()
    cfg.partition = pipeline["cuts"]
    if cfg.memory_limit is not None and "recompute" in pipeline:  # it cannot be chosen without a profile
        cfg.recompute = [[*Mode][number % len(Mode)].value for number in pipeline["recompute"]]
    cfg.memory_limit = None
    return cfg


def conditions(cfg: DictConfig, run: Run) -> dict[str, Any]:
    """Return the settings in which a run and its checkpoint must agree."""
    return {
        "model": OmegaConf.to_container(cfg.model, resolve=True),
        **tensors_of(run.see_model()),
        "data": run.facts.name,
        "data's fingerprint": run.facts.fingerprint,
        "task": str(run.task),
        "optim": str(cfg.optim._target_),
        "batch_size": run.settings.batch_size,
        "data.drop_last": run.settings.drop_last,
        "seed": run.settings.seed,
        "dtype": str(run.settings.dtype).removeprefix("torch."),
    }


def tensors_of(model: nn.Module) -> dict[str, Any]:
    """Return each tensor's dtype and shape, and which of them each entry of the state_dict is."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "tensors": {
            name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in sorted(tensors.items())
        },
        "state_dict": state_names(model),
    }


def refuse_other(source: Source, mine: Mapping[str, Any], epochs: int, ending: bool = False) -> None:
    """Refuse a checkpoint of another model, data set or order of samples. Raises ConfigError.

    With all `epochs` done it is refused too, unless this run is `ending`: only its records are missing.
    """
    theirs = source.manifest.conditions
    for key in {**theirs, **mine}:
        if mine.get(key) != theirs.get(key):
            raise ConfigError(
                f"this run cannot go on from {source.folder}: "
                f"{difference(key, theirs.get(key), mine.get(key))}; give the values that it was trained "
                f"with, or train anew"
            )
    done = source.manifest.position.epoch
    if done > epochs or (done == epochs and not ending):
        raise ConfigError(f"{source.folder} has all of its {done} epochs done; give epochs= more to go on")


def difference(key: str, theirs: Any, mine: Any) -> str:
    """Return a phrase about the first difference of two values under a key."""
    if isinstance(theirs, Mapping) and isinstance(mine, Mapping):
        for name in sorted(theirs.keys() | mine.keys()):
            if theirs.get(name) != mine.get(name):
                return difference(f"{key}.{name}", theirs.get(name), mine.get(name))
    return f"it has {key}={theirs}, and this run has {key}={mine}"
