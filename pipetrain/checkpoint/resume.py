"""Which checkpoint a run resumes from, whether it may, and which settings it takes from it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.checkpoint.files import (
    CHECKPOINTS,
    MANIFEST,
    Manifest,
    folders,
    read_manifest,
    read_whole,
)
from pipetrain.checkpoint.tensor_reader import MODEL, Loaded, NamedTensors, open_plain, read_files
from pipetrain.errors import ChannelError, ConfigError, TrainingStopped, one_line
from pipetrain.model.requirements import state_names
from pipetrain.model.tensor_places import named_tensors
from pipetrain.typed_json import DamagedCheckpoint, read_as

AUTO = "auto"
PIPELINE = {"cuts", "placement", "recompute"}

log = logging.getLogger("pipetrain")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint, its files verified by rank 0."""

    folder: Path
    manifest: Manifest

    @classmethod
    def verified(cls, folder: Path) -> Source:
        """Read a checkpoint from anybody, and verify it. Raises DamagedCheckpoint and OtherFormat."""
        manifest, where = read_whole(folder), str(folder / MANIFEST)
        source = cls(folder, manifest)
        forms = read_as(dict[str, list[Any]], manifest.conditions.get("tensors"), f"{where}: its tensors")
        read_as(dict[str, str], manifest.conditions.get("state_dict"), f"{where}: its state_dict")
        with source.used():
            saved = _forms_of(source.model())
        for name, form in forms.items():
            if form != saved.get(name):
                raise DamagedCheckpoint(
                    f"{where} says that {name} is {form}, and its file has {saved.get(name, [])}"
                )
        position = all(0 <= number < 2**63 for number in astuple(manifest.position))
        if not (position and manifest.pipeline.keys() >= PIPELINE):
            raise DamagedCheckpoint(f"{where} has no pipeline and position of ours")
        return source

    @contextmanager
    def used(self) -> Iterator[None]:
        """Name the checkpoint in errors of a state that cannot be used. Raises DamagedCheckpoint."""
        try:
            yield
        except (ConfigError, ChannelError, TrainingStopped):
            raise
        except (LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            why = f"{type(error).__name__}: {one_line(error)}"
            raise DamagedCheckpoint(f"{self.folder} holds a state that cannot be used: {why}") from error

    def tensors(self) -> NamedTensors:
        return read_files(self.folder, self.manifest.parts)

    def model(self, prefix: str = MODEL) -> dict[str, Tensor]:
        """Return the model's tensors by name, complex ones as complex."""
        forms, tensors = self.manifest.conditions["tensors"], self.tensors()
        by_name = {name: tensors[prefix + name] for name in forms if prefix + name in tensors}
        pairs = [name for name in by_name if forms[name][0].startswith("complex")]
        return by_name | {name: torch.view_as_complex(by_name[name].clone()) for name in pairs}


def saved_by(run_dir: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, newest first. Raises ConfigError if that fails."""
    try:
        return folders(run_dir / CHECKPOINTS)
    except OSError as error:
        why = f"{run_dir / CHECKPOINTS} cannot be listed: {error.strerror}; mend that first"
        raise ConfigError(why) from None


def find_source(resume: str | Path, run_dir: Path) -> Source | None:
    """Find and verify the checkpoint that `resume` names, for a run in `run_dir`. Raises ConfigError.

    "auto" means the newest whole one in `run_dir`; None if there is none yet.
    """
    if resume == AUTO:
        return _newest(run_dir)
    folder, later = Path(resume).expanduser().absolute(), saved_by(run_dir)
    if later and folder.parent.resolve() == later[0].parent.resolve() and folder.name != later[0].name:
        raise ConfigError(
            f"{folder} is older than {later[0].name} in the same run_dir, from which resume='auto' would go "
            f"on later: choose another run_dir, or remove the newer ones"
        )
    source = saved_in(folder)
    if source is None:
        raise ConfigError(f"{resume} is the folder of a run that has saved no checkpoint")
    return source


def saved_in(folder: Path) -> Source | None:
    """Return this checkpoint, or the newest whole one of a run, verified, if any. Raises ConfigError."""
    folder = folder.expanduser().absolute()
    if (folder / CHECKPOINTS).is_dir():
        return _newest(folder)
    if not (folder / MANIFEST).exists() and not folder.name.startswith("update-"):
        raise ConfigError(
            f"{folder} is no checkpoint: give the folder of a run, or one of its {CHECKPOINTS}/update-..."
        )
    try:
        return Source.verified(folder)
    except DamagedCheckpoint as damage:
        raise ConfigError(f"{folder} is damaged: {damage}; choose another checkpoint") from damage


def _newest(run_dir: Path) -> Source | None:
    damaged = False
    for folder in saved_by(run_dir):
        try:
            return Source.verified(folder)
        except DamagedCheckpoint as damage:
            damaged = True
            log.warning("pipetrain: checkpoint %s is damaged: %s; trying the one before", folder.name, damage)
    if damaged:
        raise ConfigError(
            f"no checkpoint of {run_dir} is whole: train anew in another run_dir, or give resume= another "
            f"run's checkpoint"
        )
    return None


def read_source(folder: Path) -> Source:
    """Read a checkpoint that rank 0 has verified. Raises ConfigError if this rank cannot."""
    try:
        return Source(folder, read_manifest(folder))
    except DamagedCheckpoint as damage:
        raise ConfigError(
            f"the checkpoint that rank 0 reads cannot be read: {damage}; give run_dir (or resume) a folder "
            f"that all machines share"
        ) from damage


def tensors_of(model: nn.Module) -> dict[str, Any]:
    """Return each tensor's dtype and shape, and the tensor of each entry of the state_dict."""
    return {
        "tensors": _forms_of(named_tensors(model)),
        "state_dict": state_names(model),
    }


def _forms_of(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in sorted(tensors.items())}


def transformers_config(model: nn.Module) -> dict[str, Any]:
    """Return what `from_pretrained` needs to build the model again, if it is a model of transformers."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    options = json.loads(config.to_json_string())
    return {"transformers": options | {"architectures": [type(model).__name__]}}


def refuse_other(source: Source, current: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another model, data set or order of samples. Raises ConfigError."""
    saved = source.manifest.conditions
    shared = sorted(saved.keys() & current.keys())  # Pipeline.save has conditions of the model only
    differences = (_difference(key, saved[key], current[key]) for key in shared)
    if difference := next(filter(None, differences), ""):
        raise ConfigError(
            f"this run cannot go on from {source.folder}: {difference}; give the values that it was trained "
            f"with, or train anew"
        )


def refuse_finished(source: Source, done: int, updates: int, ending: bool) -> None:
    """Refuse a checkpoint with all `updates` done, unless only this run's records are missing."""
    if done > updates or (done == updates and not ending):
        raise ConfigError(
            f"{source.folder} has {done} updates done, and this training is of {updates}: give epochs= (or "
            f"max_updates=) more to go on"
        )


def _difference(key: str, saved: Any, current: Any) -> str:
    """Return a phrase about the first difference between two values of a key; empty if there is none."""
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        inner = (
            _difference(f"{key}.{name}".lstrip("."), saved.get(name), current.get(name))
            for name in sorted(saved.keys() | current.keys())
        )
        return next(filter(None, inner), "")
    return "" if saved == current else f"it has {key}={saved}, and this run has {key}={current}"


def open_weights(path: Path, model: nn.Module) -> Loaded:
    """Open initial weights, of plain PyTorch or of a checkpoint. Raises ConfigError."""
    path = path.expanduser().absolute()
    is_run = (path / CHECKPOINTS).is_dir() or (path / MANIFEST).exists()
    source = find_source(path, path) if is_run else None
    return weights_of(source, model) if source else open_plain(path, model)


def weights_of(source: Source, model: nn.Module) -> Loaded:
    """Return the weights of a checkpoint, which has all of them."""
    return Loaded(source.folder, source.model(), model, {name: name for name in named_tensors(model)})
