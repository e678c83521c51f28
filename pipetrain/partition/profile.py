"""What each layer of a model was measured to take: the figures, and their form as a file.

A profile says under which conditions it was taken. Those that change what is measured must be those of the
run that reads it; the machine it was taken on is only told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from pipetrain.errors import ConfigError
from pipetrain.partition.estimate import Layer

PROFILE = "profile"  # what the strategy is called
VERSION = 1
Facts = Mapping[str, str | int]


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
    saved_bytes: (
        int  # kept between its forward and its backward; parameters and what it was given not counted
    )
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
    layers: Sequence[LayerTime]

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {"pipetrain_profile": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """Read what `to_json` made. Raises ValueError that says what is wrong with it."""
        if not isinstance(data, dict) or data.get("pipetrain_profile") != VERSION:
            raise ValueError(f"it is no profile of version {VERSION}")
        values = _checked(cls, {key: data[key] for key in data.keys() - {"pipetrain_profile"}}, "it")
        layers = [
            LayerTime(**_checked(LayerTime, layer, f"layer {i}")) for i, layer in enumerate(values["layers"])
        ]
        return cls(**{**values, "layers": layers})


def _checked(kind: type, data: Any, what: str) -> dict[str, Any]:
    """Return `data` if it is a value of the right sort for each field of a dataclass. Raises ValueError."""
    kinds = {field.name: str(field.type) for field in fields(kind)}
    if not isinstance(data, dict) or data.keys() != kinds.keys():
        raise ValueError(f"{what} must have {', '.join(kinds)}")
    for key, value in data.items():
        if not _SORTS[kinds[key]](value):
            raise ValueError(f"{what} has {key}={value!r:.40}")
    return data


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_SORTS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "int": _whole,
    "float": lambda value: _whole(value) or (isinstance(value, float) and 0 <= value < math.inf),
    "Facts": lambda value: isinstance(value, dict),
    "Sequence[LayerTime]": lambda value: isinstance(value, list),
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
    profiled = [(layer.name, layer.output_bytes) for layer in profile.layers]
    ours = [(layer.name, layer.output.nbytes) for layer in layers]
    for index, (theirs, mine) in enumerate(zip(profiled, ours, strict=False)):
        if theirs != mine:
            raise ConfigError(
                f"the profile is of another model: its layer {index} is {theirs[0]} and returns {theirs[1]} "
                f"bytes, and the model's is {mine[0]} and returns {mine[1]}; make one with partition=profile"
            )
    if len(profiled) != len(ours):
        raise ConfigError(
            f"the profile is of another model: it has {len(profiled)} layers, and the model {len(ours)}; "
            f"make one with partition=profile"
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
