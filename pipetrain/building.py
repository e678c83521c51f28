"""What the `_target_`s of a configuration build, or the one sentence that says why they do not."""

from __future__ import annotations

import re
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipetrain.boundary import specs_of
from pipetrain.errors import ConfigError
from pipetrain.runtime.codec import Codec


def build(cfg: DictConfig, group: str) -> Any:
    """Return what a group's `_target_` builds. Raises ConfigError."""
    if "_target_" not in cfg[group]:
        raise ConfigError(f"{group} needs a _target_: the dotted name of what builds it")
    try:
        return instantiate(cfg[group])
    except InstantiationException as error:
        raise _not_built(group, error) from error


def _not_built(key: str, error: InstantiationException) -> ConfigError:
    text = re.sub(
        r", set env var HYDRA_FULL_ERROR=1 \S+ \S+ \S+ exception\.|full_key: \S+", "", one_line(error)
    )
    cause = one_line(error.__cause__) if error.__cause__ else ""
    why = f": {cause}" if cause not in text else ""
    return ConfigError(f"{key} cannot be built: {text.strip()}{why}")


def one_line(error: BaseException) -> str:
    """Return an error's text as one line."""
    return " ".join(str(error).split())


def make_codec(cfg: DictConfig, direction: str) -> Codec:
    """Return the codec of a direction, forward or backward, tried once. Raises ConfigError."""
    key = f"codec.{direction}"
    try:
        node = OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        node = None
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise ConfigError(f"{key} must be a codec's name, or have a _target_: the dotted name of its class")
    try:
        codec = instantiate(node)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError) and re.match(r"\w+=", str(cause)):  # by our codecs' own words
            raise ConfigError(f"{key}.{one_line(cause)}") from error
        raise _not_built(key, error) from error
    if not isinstance(codec, Codec):
        raise ConfigError(f"{key}: {node._target_} must be a pipetrain.runtime.codec.Codec")
    _try_codec(key, codec)
    return codec


def _try_codec(key: str, codec: Codec) -> None:
    """Refuse a codec that fails, or whose messages are not of the sizes that it says."""
    x = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    (spec,) = specs_of([x])
    try:
        with torch.random.fork_rng([]):
            said, tensors = tuple(codec.wire_specs(spec)), codec.encode(x)
            wire, back = specs_of(tensors), specs_of([codec.decode(tensors, spec)])
    except Exception as error:  # whatever somebody's own class raises
        raise ConfigError(f"{key} cannot carry {spec}: {type(error).__name__}: {one_line(error)}") from error
    for what, specs, wanted in (("encodes", wire, said), ("decodes", back, (spec,))):
        if specs != wanted:
            made, meant = (" + ".join(map(str, some)) for some in (specs, wanted))
            raise ConfigError(f"{key} {what} {spec} to {made}, and should to {meant}; see Codec.wire_specs")
