"""Which checkpoint a run goes on from, and whether it may."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from pipetrain.checkpoint.files import (
    CHECKPOINTS,
    MANIFEST,
    Manifest,
    Tensors,
    folders,
    read_manifest,
    read_whole,
)
from pipetrain.checkpoint.untrusted import DamagedCheckpoint
from pipetrain.config import Settings
from pipetrain.errors import ConfigError
from pipetrain.partition.profile import PROFILE
from pipetrain.runtime.memory import unpacked
from pipetrain.runtime.tally import numbers_of
from pipetrain.runtime.weights import OptimizerFactory
from pipetrain.training.figures import read_progress
from pipetrain.training.folder import SUMMARY, is_of
from pipetrain.training.run import Run

AUTO = "auto"

log = logging.getLogger("pipetrain")


@dataclass(frozen=True, slots=True)
class Source:
    """A whole checkpoint to go on from."""

    folder: Path
    manifest: Manifest


def find_source(resume: str, run_dir: Path) -> Source | None:
    """Find the checkpoint that `resume=` asks for, and prove it whole.

    Damaged ones are named and the one before is taken, unless one is asked for by name. Returns None for auto
    where the run's folder has none yet. Raises ConfigError.
    """
    if resume == AUTO:
        return _newest(run_dir)
    folder = Path(resume).expanduser().absolute()
    if (folder / CHECKPOINTS).is_dir():
        source = _newest(folder)
        if source is None:
            raise ConfigError(f"resume={resume} is the folder of a run that has saved no checkpoint")
        return source
    if not (folder / MANIFEST).exists() and not folder.name.startswith("update-"):
        raise ConfigError(
            f"resume={resume} is no checkpoint: give auto, the folder of a run, or one of its "
            f"{CHECKPOINTS}/update-... folders"
        )
    try:
        return _whole(folder)
    except DamagedCheckpoint as damage:
        raise ConfigError(f"resume={resume} is damaged: {damage}; choose another checkpoint") from damage


def _newest(run_dir: Path) -> Source | None:
    damaged: list[Path] = []
    for folder in folders(run_dir / CHECKPOINTS):
        try:
            return _whole(folder)
        except DamagedCheckpoint as damage:
            damaged.append(folder)
            log.warning("pipetrain: checkpoint %s is damaged: %s; trying the one before", folder.name, damage)
    if damaged:
        raise ConfigError(
            f"no checkpoint of {run_dir} is whole ({', '.join(path.name for path in damaged)}): train anew "
            f"in another run_dir, or give resume= another run's checkpoint"
        )
    return None


def _whole(folder: Path) -> Source:
    manifest = read_whole(folder)
    read_progress(manifest)
    return Source(folder, manifest)


def read_source(folder: Path, rank: int) -> Source:
    """Read a checkpoint that rank 0 has proved whole. Raises ConfigError where this rank cannot."""
    try:
        return Source(folder, read_manifest(folder))
    except DamagedCheckpoint as damage:
        raise ConfigError(
            f"rank {rank} cannot read the checkpoint that rank 0 reads: {damage}; give run_dir (or resume) a "
            f"folder that all machines share"
        ) from damage


def lengthens(run_dir: Path, cfg: DictConfig, settings: Settings) -> bool:
    """Whether a folder holds a finished run of this configuration that is to go on for more epochs.

    Raises ConfigError where that would be another run: where its rates would have been others.
    """
    if not (run_dir / SUMMARY).exists() or not is_of(run_dir, cfg, {"resume", "epochs"}):
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
            f"lr_schedule={settings.lr_schedule} warmup={cfg.warmup:g} the rates of {settings.epochs} epochs "
            f"are others from the start: train anew in another run_dir, or go on there from its last weights "
            f"with resume={run_dir}"
        )
    return settings.epochs > epochs


def done_batches(source: Source | None) -> int:
    """Return how many batches are done of the epoch that a run goes on with."""
    return source.manifest.position.batch if source else 0


def with_cuts_of(cfg: DictConfig, source: Source, ranks: int) -> DictConfig:
    """Return the configuration, cut as the checkpoint is where it would be profiled anew otherwise."""
    pipeline = source.manifest.pipeline
    if cfg.partition != PROFILE or ranks != len(set(pipeline["placement"])) or "cuts" not in pipeline:
        return cfg
    cfg = cfg.copy()
    cfg.partition = pipeline["cuts"]
    cfg.memory_limit = None
    return cfg


def conditions(cfg: DictConfig, run: Run) -> dict[str, Any]:
    """Return what a run and the checkpoint that it goes on from must agree in."""
    model = run.build_model()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "model": OmegaConf.to_container(cfg.model, resolve=True),
        "tensors": {
            name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in sorted(tensors.items())
        },
        "data": run.data.name,
        "data's fingerprint": run.data.fingerprint,
        "optim": str(cfg.optim._target_),
        "batch_size": run.settings.batch_size,
        "data.drop_last": run.settings.drop_last,
        "seed": run.settings.seed,
        "dtype": str(run.settings.dtype).removeprefix("torch."),
    }


def refuse_other(source: Source, mine: Mapping[str, Any], epochs: int, ending: bool = False) -> None:
    """Refuse a checkpoint of another model, data set or order of samples. Raises ConfigError.

    One with all `epochs` done is refused too, unless this run is `ending` that one, which lacks its records.
    """
    theirs = source.manifest.conditions
    for key in {**theirs, **mine}:
        if mine.get(key) != theirs.get(key):
            difference = _difference(key, theirs.get(key), mine.get(key))
            raise ConfigError(
                f"this run cannot go on from {source.folder}: {difference}; give the values that it was "
                f"trained with, or train anew"
            )
    done = source.manifest.position.epoch
    if done > epochs or (done == epochs and not ending):
        raise ConfigError(f"{source.folder} has all of its {done} epochs done; give epochs= more to go on")


def prove_tensors(tensors: Tensors, module: nn.Module, optimizer: OptimizerFactory) -> None:
    """Prove that a checkpoint has what some layers go on from, in the shapes and dtypes that they have here.

    What it remembers of a parameter is held against what its optimizer does after one update. Raises
    DamagedCheckpoint.
    """
    named = chain(module.named_parameters(), module.named_buffers())
    tensors.prove({f"model/{name}": numbers_of(tensor.detach()) for name, tensor in named})
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            state = _read_state(tensors, name)
            for key, like in _fresh_state(parameter, optimizer).items() if state else ():
                if not isinstance(like, Tensor):
                    continue
                mine = state.get(key)
                if not isinstance(mine, Tensor) or (mine.shape, mine.dtype) != (like.shape, like.dtype):
                    raise DamagedCheckpoint(f"what is remembered as {key} of {name} does not fit it")


def _read_state(tensors: Tensors, name: str) -> dict[str, Any]:
    count = len(tensors.names(f"optimizer/{name}/"))
    try:
        state, changed = unpacked([tensors[f"optimizer/{name}/{number}"] for number in range(count)])
        if not isinstance(state, dict) or not isinstance(changed, dict):
            raise TypeError("it is no pair of objects")
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise DamagedCheckpoint(f"what the optimizer remembers of {name} cannot be read: {error}") from error
    return state


def _fresh_state(parameter: Tensor, optimizer: OptimizerFactory) -> dict[str, Any]:
    """Return what an optimizer remembers of a parameter after one update."""
    twin = nn.Parameter(torch.zeros_like(parameter))
    twin.grad = torch.zeros_like(parameter)
    made = optimizer([twin])
    made.step()
    return dict(made.state.get(twin, {}))


def _difference(key: str, theirs: Any, mine: Any) -> str:
    if isinstance(theirs, Mapping) and isinstance(mine, Mapping):
        for name in sorted(theirs.keys() | mine.keys()):
            if theirs.get(name) != mine.get(name):
                return _difference(f"{key}.{name}", theirs.get(name), mine.get(name))
    return f"it has {key}={theirs}, and this run has {key}={mine}"
