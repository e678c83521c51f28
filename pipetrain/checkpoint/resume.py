"""Whether a run may resume from a checkpoint, and which settings it takes from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig
from torch import nn

from pipetrain.checkpoint.source import Source
from pipetrain.errors import ConfigError
from pipetrain.network.model import state_names
from pipetrain.settings import PROFILE, Mode


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
    needed = dict.fromkeys(("tensors", "state_dict"))  # all there is of one that Pipeline.save has written
    for key in {key: None for key in theirs if key in mine} | needed:
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
