"""What each layer of a model was measured to take: the figures, and their form as a file.

A profile says under which conditions it was taken. Those that change what is measured must be those of the
run that reads it; the machine it was taken on is only told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from pipetrain.checkpoint.untrusted import read_as
from pipetrain.errors import ConfigError
from pipetrain.partition.estimate import Layer

if TYPE_CHECKING:
    from pipetrain.config import Settings

PROFILE = "profile"  # what the strategy is called
VERSION = 1
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer, as measured for one microbatch; times in seconds.

    A parameter that layers share counts at the first of them. Bytes that autograd saves count once in the
    whole model, at the layer that made them.
    """

    name: str
    forward_s: float
    backward_s: float  # of its inputs' and its parameters' gradients
    step_s: float  # of the optimizer's step over its parameters, once a batch
    saved_bytes: int  # kept between forward and backward; parameters and what it was given not counted
    peak_bytes: int  # alive at most while it runs forward and backward, beyond what was alive before
    output_bytes: int  # of the message forward where a cut comes behind it
    gradient_bytes: int  # of the message back
    param_bytes: int  # of what it trains
    state_bytes: int  # of what the optimizer remembers for that
    fixed_bytes: int  # of frozen parameters and buffers


@dataclass(frozen=True, slots=True)
class Profile:
    """A whole model, as measured on all ranks at once; and what a message takes."""

    conditions: Facts  # must be those of the run
    machine: Facts  # where it was measured
    input_bytes: int  # of what enters the model
    latency_s: float  # of any message; 0 where none was measured
    s_per_byte: float
    layers: list[LayerTime]

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {"pipetrain_profile": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """Read what `to_json` made. Raises ValueError that says what is wrong with it."""
        if not isinstance(data, dict) or data.get("pipetrain_profile") != VERSION:
            raise ValueError(f"it is no profile of version {VERSION}")
        values = {key: value for key, value in data.items() if key != "pipetrain_profile"}
        profile: Profile = read_as(cls, values, "its content")
        records: list[tuple[str, Profile | LayerTime]] = [("it", profile)]
        for what, record in [*records, *((layer.name, layer) for layer in profile.layers)]:
            for key, value in asdict(record).items():
                if isinstance(value, float) and value < 0:
                    raise ValueError(f"{what} has {key}={value}")
        return profile


def conditions(cfg: DictConfig, settings: Settings) -> Facts:
    """Return what a profile must agree in with the run that reads it."""
    no_work = ("_target_", "_partial_", "lr")  # of an optimizer's options: what changes no work
    options = (f" {key}={value}" for key, value in cfg.optim.items() if key not in no_work)
    return {
        "model": settings.model,
        "microbatch": settings.batch_size // settings.microbatches,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "precision": settings.precision,
        "memory_format": settings.memory_format,
        "optimizer": str(cfg.optim._target_).rsplit(".", 1)[-1] + "".join(options),
    }


def read_profile(path: str, conditions: Facts) -> Profile:
    """Read a profile that was taken under `conditions`.

    Raises ConfigError where the file cannot be read or is something else, or was taken under others.
    """
    file = Path(path).expanduser()
    try:
        profile = Profile.from_json(json.loads(file.read_text()))
    except OSError as error:
        raise ConfigError(
            f"partition.profile={path} cannot be read: {error.strerror}; name the profile.json of a run "
            f"that had partition=profile"
        ) from error
    except ValueError as error:  # not JSON, not text, or not a profile
        raise ConfigError(
            f"partition.profile={path} holds no profile: {error}; make one anew with partition=profile"
        ) from error
    for key in sorted(conditions.keys() | profile.conditions.keys()):
        theirs, ours = profile.conditions.get(key), conditions.get(key)
        if theirs != ours:
            raise ConfigError(
                f"partition.profile={path} was taken with {key}={theirs}, and this run has {key}={ours}; "
                f"make one for it with partition=profile"
            )
    return profile


def refuse_other_layers(profile: Profile, layers: Sequence[Layer]) -> None:
    """Refuse a profile of a model whose layers have other names or return something else."""
    for index, (theirs, ours) in enumerate(zip(profile.layers, layers, strict=False)):
        if (theirs.name, theirs.output_bytes) != (ours.name, ours.output.nbytes):
            raise ConfigError(
                f"the profile is of another model: its layer {index} is {theirs.name} and returns "
                f"{theirs.output_bytes} bytes, and the model's is {ours.name} and returns "
                f"{ours.output.nbytes}; make one with partition=profile"
            )
    if len(profile.layers) != len(layers):
        raise ConfigError(
            f"the profile is of another model: it has {len(profile.layers)} layers, and the model "
            f"{len(layers)}; make one with partition=profile"
        )


def average(ranks: Sequence[Sequence[LayerTime]]) -> list[LayerTime]:
    """Return each layer with the medians of the times that all ranks measured."""
    return [
        replace(
            layers[0],
            forward_s=median(layer.forward_s for layer in layers),
            backward_s=median(layer.backward_s for layer in layers),
            step_s=median(layer.step_s for layer in layers),
        )
        for layers in zip(*ranks, strict=True)
    ]
