"""Builds the `_target_`s of a configuration; errors become one sentence."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from pipetrain.codec import Codec
from pipetrain.config.choices import chosen, nearest
from pipetrain.correction import Correction, together
from pipetrain.errors import ConfigError, one_line
from pipetrain.instantiate import NotMade, RefersToNothing, located, make
from pipetrain.model import deferred_init
from pipetrain.model.requirements import require_module
from pipetrain.model.specs import specs_of
from pipetrain.rules import BOOL, POSITIVE, Misfit, decoded, instance_of
from pipetrain.schedule.actions import Schedule
from pipetrain.tasks import Mean, Metric, Task


def build(cfg: Mapping[str, Any], group: str) -> Any:
    """Build a group's `_target_`. Raises ConfigError."""
    return build_node(group, cfg[group])


def build_node(key: str, node: object, partial: bool = False) -> Any:
    """Build the `_target_` of a key's node; `partial`: leave its call to others. Raises ConfigError."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{key} needs a _target_: the dotted name of what builds it")
    _refuse_unknown(key, node)
    try:
        return make(node, later=partial)
    except RefersToNothing as error:
        raise ConfigError(
            f"{key} cannot be built: {error}; choose another {key}=, or another data= that has it"
        ) from error
    except NotMade as error:
        if isinstance(error.__cause__, Misfit):
            raise ConfigError(f"{key}.{error.__cause__}") from error
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from error
        raise ConfigError(f"{key} cannot be built: {error}") from error


def _refuse_unknown(key: str, node: Mapping[str, Any]) -> None:
    """Refuse an argument that a node's `_target_`, or that of a node in it, does not take.

    A dataclass is asked for its fields: those of transformers' configurations keep whatever they are given.
    """
    for name, inner in node.items():
        if isinstance(inner, Mapping):
            _refuse_unknown(f"{key}.{name!s}", inner)
    try:
        target = located(node["_target_"])
        parameters = inspect.signature(target, follow_wrapped=False).parameters
    except Exception:  # it has none, or a module that cannot be imported, which is said when it is built
        return
    names = {*parameters}
    if isinstance(target, type) and is_dataclass(target):
        names |= {*dir(target), *getattr(target, "attribute_map", ())}
    elif any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in map(str, node):
        if not names & {name, f"_{name}"} and not name.startswith("_"):
            close = " or ".join(nearest(name, names))
            meant = close and f"did you mean {close}? If not, "
            raise ConfigError(
                f"{key} cannot be built: {node['_target_']} takes no {name}; {meant}leave it out with "
                f"~{key}.{name}"
            )


def make_schedule(cfg: Mapping[str, Any]) -> Schedule:
    """Return the program function that `cfg.schedule` names. Raises ConfigError."""
    schedule: Schedule = build(cfg, "schedule")
    if not callable(schedule):
        raise ConfigError("schedule must be a function; its YAML needs `_partial_: true` beside `_target_`")
    return schedule


def make_task(cfg: Mapping[str, Any]) -> Task:
    """Return the task of a configuration: `loss` and `metrics` if given, else `task`. Raises ConfigError."""
    by_name = {} if cfg.get("metrics") is None else cfg["metrics"]
    if not isinstance(by_name, Mapping):
        raise ConfigError(f"metrics={by_name!r} must be functions by name: metrics.NAME._target_=FUNCTION")
    metrics = {str(name): build_function(f"metrics.{name}", node) for name, node in by_name.items()}
    if cfg.get("loss") is not None:
        task = Task(build_function("loss", cfg["loss"]))
    else:
        task = instance_of(Task, "task", build(cfg, "task"))
    node = cfg["task"] if cfg.get("loss") is None else cfg["loss"]
    if cfg.get("label_smoothing") and "label_smoothing" not in node:
        raise ConfigError(
            f"label_smoothing={cfg['label_smoothing']} has no effect on {node['_target_']}, which has no "
            f"such argument: set label_smoothing=0"
        )
    if metrics:
        task.metrics = [
            metric if isinstance(metric, Metric) else Mean(name, metric) for name, metric in metrics.items()
        ]
    return task


@dataclass(frozen=True, slots=True)
class Optim:
    """An optimizer that was chosen, before it is tried.

    `name`: what sentences call it. `forms`: the first of them that works is taken. `groups`: the options of
    parameter groups, and `key` theirs. `options`: all that a configuration says of it.
    """

    name: str
    forms: Sequence[Callable[[Any], Optimizer]]
    key: str
    groups: Any
    options: Mapping[str, Any]


def make_optimizer(cfg: Mapping[str, Any]) -> Optim:
    """Return a configuration's optimizer; `fused` null: the fused form if it works. Raises ConfigError."""
    options = cfg["optim"]
    if not isinstance(options, Mapping):
        return build(cfg, "optim")  # type: ignore[no-any-return]  # which refuses it
    lr = POSITIVE.read("optim.lr", decoded(options.get("lr")))
    fused = BOOL.read("optim.fused", options.get("fused", True), null=True)
    left_out = {"groups"} if fused is not None else {"groups", "fused"}
    node = {key: value for key, value in options.items() if key not in left_out}
    factory = build_node("optim", node | {"lr": lr})
    forms = [factory] if fused is not None else [partial(factory, fused=True), factory]
    return Optim(str(options["_target_"]), forms, "optim.groups", options.get("groups"), options)


def build_function(key: str, node: object) -> Any:
    """Return the function of a `_target_`, or the callable that its class makes. Raises ConfigError."""
    function = build_node(key, node, partial=True)
    if isinstance(function.func, type):
        function = build_node(key, node)
    if not callable(function) and not isinstance(function, Metric):
        raise ConfigError(f"{key} must be a function; got {type(function).__name__}")
    return function


def model_of(cfg: Mapping[str, Any], seed: int) -> nn.Module | Callable[[], nn.Module]:
    """Return a configuration's model, with the same weights for one seed on every rank. Raises ConfigError.

    With build=stages it is the function that makes it.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if cfg.get("build") == "stages":
        return partial(build, cfg, "model")
    model: nn.Module = build(cfg, "model")
    require_module(model, f"{cfg['model']['_target_']} must return", None)
    return model


def make_model(cfg: Mapping[str, Any], seed: int, dtype: torch.dtype) -> nn.Module:
    """Return the model, for build=stages without its numbers, to plan with. Raises ConfigError."""
    model = model_of(cfg, seed)
    model = model if isinstance(model, nn.Module) else deferred_init.build(model, seed)[0]
    require_module(model, f"{cfg['model']['_target_']} must return", dtype)
    return model


def make_codec(key: str, node: object) -> Codec:
    """Return the codec of a name of conf/, or of a `_target_`, after a trial. Raises ConfigError."""
    if isinstance(node, str):
        node = chosen(key, "codec", node)
    made = node if isinstance(node, Codec) else build_node(key, node)
    codec = instance_of(Codec, key, made)  # type: ignore[type-abstract]
    _try_codec(key, codec)
    return codec


def make_correction(key: str, value: object) -> Correction:
    """Join corrections: an object, a name of conf/, a list of them, or nodes by name. Raises ConfigError."""
    parts = list[Correction]()
    for part in value if isinstance(value, list | tuple) else [value or "none"]:
        nodes = chosen(key, "correction", part) if isinstance(part, str) else part
        by_key = {key: part}
        if isinstance(nodes, Mapping):
            by_key = {f"{key}.{name}": build_node(f"{key}.{name}", node) for name, node in nodes.items()}
        parts += [instance_of(Correction, name, made) for name, made in by_key.items()]
    return together(parts)


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
    for what, specs, expected in (("encodes", wire, stated), ("decodes", back, (spec,))):
        if specs != expected:
            actual, meant = (" + ".join(map(str, some)) for some in (specs, expected))
            raise ConfigError(f"{key} {what} {spec} to {actual}, and should to {meant}; see Codec.wire_specs")
