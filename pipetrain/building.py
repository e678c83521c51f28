"""Builds the `_target_`s of a configuration; errors become one sentence."""

from __future__ import annotations

import difflib
import inspect
import random
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import is_dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from hydra.errors import InstantiationException
from hydra.utils import get_method, get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from torch import nn

from pipetrain.cli import conf_dir
from pipetrain.codec import Codec
from pipetrain.errors import ConfigError, one_line
from pipetrain.network import factory
from pipetrain.network.chain import Chain, is_chain, network_of
from pipetrain.network.materialise import named_tensors
from pipetrain.network.model import prove_model
from pipetrain.network.network import Network, Values
from pipetrain.network.tensors import storage_of
from pipetrain.network.values import ValueSpec, specs_of
from pipetrain.schedule.actions import Schedule
from pipetrain.tasks import Mean, Metric, Task


def build(cfg: DictConfig, group: str) -> Any:
    """Build a group's `_target_`. Raises ConfigError."""
    return build_node(group, cfg[group])


def build_node(key: str, node: object, partial: bool = False) -> Any:
    """Build the `_target_` of a key's node; `partial`: leave its call to others. Raises ConfigError."""
    if not isinstance(node, Mapping | DictConfig) or "_target_" not in node:
        raise ConfigError(f"{key} needs a _target_: the dotted name of what builds it")
    node = node if isinstance(node, DictConfig) else OmegaConf.create(dict(node))
    try:
        more = {"_partial_": True} if partial else {}
        made = instantiate(node, _convert_="all", **more)  # lists and dicts, as callers in Python give
    except InstantiationException as error:
        raise not_built(key, node, error) from error
    except InterpolationKeyError as error:
        missing = one_line(error).split("'")[1]
        raise ConfigError(
            f"{key} needs {missing}, which the configuration does not have: choose another {key}= or "
            f"{missing.split('.')[0]}="
        ) from error
    _refuse_ignored(key, node)
    return made


def shipped(group: str, name: object) -> DictConfig | None:
    """Return what conf/ has by a name of a group; None if it has none of that name."""
    path = conf_dir() / group / f"{name}.yaml"
    content = OmegaConf.load(path) if isinstance(name, str) and path.is_file() else None
    return content if isinstance(content, DictConfig) else None


def names_of(group: str) -> str:
    """Return the names that conf/ has in a group, in words."""
    return ", ".join(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


def _refuse_ignored(key: str, node: object) -> None:
    """Refuse arguments that a dataclass keeps and does not know, as transformers' configurations do."""
    if not isinstance(node, DictConfig):
        return
    for name, inner in node.items():
        _refuse_ignored(f"{key}.{name!s}", inner)
    made = get_object(node["_target_"]) if "_target_" in node else None
    if isinstance(made, type) and is_dataclass(made):
        known = {*dir(made), *inspect.signature(made).parameters, *getattr(made, "attribute_map", ())}
        for name in map(str, node):
            if not known & {name, f"_{name}"} and not name.startswith("_"):
                raise ConfigError(f"{key} cannot be built: {_not_taken(key, node['_target_'], name)}")


def not_built(key: str, node: Mapping[str, Any], error: Exception) -> ConfigError:
    """Return the error for a `_target_` that could not be called; it names an unknown argument."""
    cause = error.__cause__ or error
    if isinstance(cause, ConfigError):
        return cause
    text = re.split(r",? (?:set env var HYDRA_FULL_ERROR|full_key: )", one_line(cause))[0]
    if argument := re.search(r"unexpected keyword argument '(\w+)'", text):
        text = _not_taken(key, str(node["_target_"]), argument[1])
    elif cause is not error:
        text = f"{type(cause).__name__}: {text}"
    return ConfigError(f"{key} cannot be built: {text}")


def _not_taken(key: str, target: str, argument: str) -> str:
    try:
        known = list(inspect.signature(get_method(target)).parameters)
    except Exception:  # some callables have no signature
        known = []
    close = difflib.get_close_matches(argument, known, n=1)
    meant = f"did you mean {close[0]}? If not, " if close else ""
    return f"{target} takes no {argument}; {meant}leave it out with ~{key}.{argument}"


def make_schedule(cfg: DictConfig) -> Schedule:
    """Return the program function that `cfg.schedule` names. Raises ConfigError."""
    schedule: Schedule = build(cfg, "schedule")
    if not callable(schedule):
        raise ConfigError("schedule must be a function; its YAML needs `_partial_: true` beside `_target_`")
    return schedule


def make_task(cfg: DictConfig) -> Task:
    """Return the task of a configuration: `loss` and `metrics` if given, else `task`. Raises ConfigError."""
    metrics = {
        name: build_function(f"metrics.{name}", node) for name, node in (cfg.get("metrics") or {}).items()
    }
    if cfg.get("loss") is not None:
        task = Task(build_function("loss", cfg.loss))
    else:
        task = build(cfg, "task")
        if not isinstance(task, Task):
            raise ConfigError(f"task must be a {Task.__module__}.Task; got {type(task).__name__}")
    node = cfg.task if cfg.get("loss") is None else cfg.loss
    if cfg.get("label_smoothing") and "label_smoothing" not in node:
        raise ConfigError(
            f"label_smoothing={cfg.label_smoothing} has no effect on {node._target_}, which has no such "
            f"argument: set label_smoothing=0"
        )
    if metrics:
        task.metrics = [
            made if isinstance(made, Metric) else Mean(name, made) for name, made in metrics.items()
        ]
    return task


def build_function(key: str, node: object) -> Any:
    """Return the function of a `_target_`, or the callable that its class makes. Raises ConfigError."""
    made = build_node(key, node, partial=True)
    if isinstance(made.func, type):
        made = build_node(key, node)
    if not callable(made) and not isinstance(made, Metric):
        raise ConfigError(f"{key} must be a function; got {type(made).__name__}")
    return made


ReadWeights = Callable[[str, nn.Module, Values | None], Values]
"""(path, model, values of what the path has not) -> the values of the model's tensors."""


class Models:
    """Builds the model of a configuration once per process, if it can be copied.

    Planning and measuring get a copy of an nn.Sequential, as running a layer may change attributes other than
    its tensors; a traced model has none. Training gets the model itself, without another reference.
    `read_weights`: opens what `weights` names; None: a plan needs no numbers.
    """

    def __init__(self, read_weights: ReadWeights | None = None) -> None:
        self._read_weights = read_weights
        self._key: object = None
        self._model: nn.Module | None = None
        self._values: Values | None = None  # that the model shall have
        self._traced: tuple[ValueSpec, Network] | None = None
        self._random: tuple[Any, Any] = None, None  # states after building of Python's and NumPy's generators

    def see(self, cfg: DictConfig, seed: int, dtype: torch.dtype) -> nn.Module:
        """Return the whole model, to be read only. Raises ConfigError."""
        key = None
        with suppress(ValueError, OmegaConfBaseException):  # make_model raises a better error
            key = OmegaConf.to_container(cfg.model, resolve=True), seed, dtype, _origin(cfg)
        if self._model is None or self._key != key:
            made = _with_values(cfg, seed, dtype, self._read_weights)
            self._key, self._traced, (self._model, self._values) = key, None, made
            self._random = random.getstate(), np.random.get_state()
        random.setstate(self._random[0])  # so that layers draw the same numbers on every use
        np.random.set_state(self._random[1])
        return self._model

    def copy(self, cfg: DictConfig, seed: int, dtype: torch.dtype, example: ValueSpec) -> Network:
        """Return a copy of the whole model, for inputs like the example. Raises ConfigError."""
        model = self.see(cfg, seed, dtype)
        if not is_chain(model):
            return self._trace(model, example, cfg)
        if _is_copied_whole(model):
            return _valued(Chain(deepcopy(model)), self._values)
        twin, values = _with_values(cfg, seed, dtype, self._read_weights)
        return _valued(network_of(twin, example), values)

    def take(self, cfg: DictConfig, seed: int, dtype: torch.dtype, example: ValueSpec) -> Network:
        """Return the whole model for training, and drop the reference. Raises ConfigError."""
        model = self.see(cfg, seed, dtype)
        network = self._trace(model, example, cfg)
        self._model = self._traced = self._values = None
        return network

    def _trace(self, model: nn.Module, example: ValueSpec, cfg: DictConfig) -> Network:
        if self._traced is None or self._traced[0] != example:
            network = network_of(model, example, cfg.get("precision") == "bf16")
            self._traced = example, _valued(network, self._values)
        return self._traced[1]


def _valued(network: Network, values: Values | None) -> Network:
    network.values = values
    return network


def _origin(cfg: DictConfig) -> tuple[object, object]:
    return cfg.get("weights"), cfg.get("build", "whole")


def _is_copied_whole(model: nn.Module) -> bool:
    """Return whether `deepcopy` copies all of a model: layers of known classes, without shared memory.

    A function or a weak reference in a layer would still refer to the layers of the original.
    """
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.numel()]
    held = [t.untyped_storage().data_ptr() or storage_of(t) for t in tensors]
    if len(held) > len(set(held)):
        return False
    return all(
        type(module).__module__.startswith(("torch.nn.modules.", "pipetrain."))
        and not any(callable(value) and not isinstance(value, nn.Module) for value in vars(module).values())
        and not any(value for name, value in vars(module).items() if name.endswith("_hooks"))
        for module in model.modules()
    )


def make_model(cfg: DictConfig, seed: int, dtype: torch.dtype) -> nn.Module:
    """Build the whole model, with the same weights for one seed on every rank. Raises ConfigError."""
    return _with_values(cfg, seed, dtype)[0]


def _with_values(
    cfg: DictConfig, seed: int, dtype: torch.dtype, read_weights: ReadWeights | None = None
) -> tuple[nn.Module, Values | None]:
    """Build the model, for build=stages without its numbers; return the values that it shall have too."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    weights, origin = _origin(cfg)
    model: Any
    values: Values | None
    if origin == "whole":
        model, values = build(cfg, "model"), None
    else:
        model, values = factory.build(partial(build, cfg, "model"), seed)
    prove_model(model, f"{cfg.model._target_} must return", dtype)
    if weights is not None and read_weights is not None:
        values = read_weights(str(weights), model, values)
    elif weights is None and values is not None:
        values.prove(named_tensors(model))
    return cast(nn.Module, model), values


def make_codec(key: str, node: object) -> Codec:
    """Return the codec of a name of conf/, or of a `_target_`, after a trial. Raises ConfigError."""
    if isinstance(node, Codec):
        _try_codec(key, node)
        return node
    if isinstance(node, str) and (named := shipped("codec", node)) is None:
        raise ConfigError(f"{key}={node} is unknown; choose one of {names_of('codec')}")
    if isinstance(node, str):
        node = named
    if not isinstance(node, Mapping | DictConfig) or "_target_" not in node:
        raise ConfigError(f"{key} must be a codec's name, or have a _target_: the dotted name of its class")
    try:
        codec = instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError) and re.match(r"\w+=", str(cause)):  # a message of our codecs
            raise ConfigError(f"{key}.{one_line(cause)}") from error
        raise not_built(key, node, error) from error
    if not isinstance(codec, Codec):
        raise ConfigError(f"{key}: {node['_target_']} must be a {Codec.__module__}.Codec")
    _try_codec(key, codec)
    return codec


def _try_codec(key: str, codec: Codec) -> None:
    """Refuse a codec that fails, or whose messages differ from its `wire_specs`."""
    x = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    (spec,) = specs_of([x])
    try:
        with torch.random.fork_rng([]):
            stated, tensors = tuple(codec.wire_specs(spec)), codec.encode(x)
            wire, back = specs_of(tensors), specs_of([codec.decode(tensors, spec)])
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(f"{key} cannot carry {spec}: {type(error).__name__}: {one_line(error)}") from error
    for what, specs, wanted in (("encodes", wire, stated), ("decodes", back, (spec,))):
        if specs != wanted:
            made, meant = (" + ".join(map(str, some)) for some in (specs, wanted))
            raise ConfigError(f"{key} {what} {spec} to {made}, and should to {meant}; see Codec.wire_specs")
