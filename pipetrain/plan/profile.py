"""What was measured of each layer, and the file of it.

A profile records its conditions. Those that affect the measurement must match the run that reads it; the
machine is recorded for information only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from pipetrain.documents import read_as
from pipetrain.errors import ConfigError
from pipetrain.plan.estimate import Layer
from pipetrain.settings import Settings

VERSION = 3
ANEW = "make one with partition=profile"
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LayerTime:
    """The times of one layer for one microbatch: in seconds as measured, or by its work in units of it."""

    name: str
    output_bytes: int
    forward_s: float
    recorded_s: float  # a forward whose backward is split
    kept_s: float  # a forward that keeps dear results, and
    again_s: float  # the one that takes them, see runtime/recompute.py
    backward_s: float  # for the gradients of inputs and parameters
    input_s: (
        float  # its half for the inputs, and what of the parameters is not put off; 0 without such inputs
    )
    weight_s: float  # the other half
    step_s: float  # the optimizer's step, once a batch; of a shared parameter at the first layer that has it


SECONDS = tuple(field.name for field in fields(LayerTime) if field.name.endswith("_s"))


@dataclass(frozen=True, slots=True)
class Profile:
    """A whole model, as measured on all ranks at the same time, and the time of a message."""

    conditions: Facts  # must match the run's
    machine: Facts
    latency_s: float  # per message; 0 if not measured
    s_per_byte: float
    state_ratio: float  # the optimizer's state, in bytes for each byte of the parameters
    layers: list[LayerTime]

    def to_json(self) -> dict[str, Any]:
        return {"pipetrain_profile": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """Read what `to_json` returned. Raises ValueError."""
        if not isinstance(data, dict) or data.get("pipetrain_profile") != VERSION:
            raise ValueError(f"it is no profile of version {VERSION}")
        values = {key: value for key, value in data.items() if key != "pipetrain_profile"}
        profile: Profile = read_as(cls, values, "its content")
        times = [profile.latency_s, profile.s_per_byte, profile.state_ratio]
        times += [getattr(layer, name) for layer in profile.layers for name in SECONDS]
        if not all(isfinite(time) and time >= 0 for time in times):
            raise ValueError("it has a time that is negative or not finite")
        return profile


def profile_conditions(settings: Settings, optim: Mapping[Any, Any]) -> Facts:
    """Return the conditions that a profile and the run that reads it must share; `optim`: the optimizer's."""
    no_work = ("_target_", "_partial_", "lr")  # options that do not affect the optimizer's time
    options = (f" {key}={value}" for key, value in optim.items() if key not in no_work)
    return {
        "model": settings.model,
        "microbatch": settings.full,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "precision": settings.precision,
        "memory_format": settings.memory_format,
        "optimizer": str(optim["_target_"]).rsplit(".", 1)[-1] + "".join(options),
    }


def read_profile(path: str, conditions: Facts) -> Profile:
    """Read a profile measured under `conditions`. Raises ConfigError."""
    try:
        profile = Profile.from_json(json.loads(Path(path).expanduser().read_text()))
    except OSError as error:
        raise ConfigError(f"partition.profile={path} cannot be read: {error.strerror}; {ANEW}") from error
    except ValueError as error:  # not JSON, not text, or not a profile
        raise ConfigError(f"partition.profile={path} holds no profile: {error}; {ANEW}") from error
    for key in sorted(conditions.keys() | profile.conditions.keys()):
        theirs, ours = profile.conditions.get(key), conditions.get(key)
        if theirs != ours:
            raise ConfigError(
                f"partition.profile={path} was taken with {key}={theirs}, and this run has {key}={ours}; "
                f"{ANEW}"
            )
    return profile


def refuse_other_layers(profile: Profile, layers: Sequence[Layer]) -> None:
    """Refuse a profile whose layers have other names or outputs than the model's. Raises ConfigError."""
    theirs = [f"{layer.name} and returns {layer.output_bytes} bytes" for layer in profile.layers]
    ours = [f"{layer.name} and returns {layer.output.nbytes} bytes" for layer in layers]
    for index, (there, here) in enumerate(zip_longest(theirs, ours, fillvalue="missing")):
        if there != here:
            raise ConfigError(
                f"the profile is of another model: its layer {index} is {there}, and the model's is {here}; "
                f"{ANEW}"
            )


def average(ranks: Sequence[Sequence[LayerTime]]) -> list[LayerTime]:
    """Return each layer with the medians of the times over all ranks."""
    return [
        replace(of[0], **{name: median(getattr(layer, name) for layer in of) for name in SECONDS})
        for of in zip(*ranks, strict=True)
    ]
