"""The configured optimizer and its parameter groups, tried before the start.

Each stage has its own optimizer over its own parameters. This equals one optimizer over all of them only if
each parameter is treated separately, so it is tried on small parameters of the model's kinds, together and
one by one. Its state must fit into a checkpoint.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetrain.building import build, not_built
from pipetrain.errors import ConfigError, one_line
from pipetrain.runtime.memory import Memory
from pipetrain.runtime.weights import Group, GroupedFactory, OptimizerFactory, optimizer_over

NORMS_AND_BIASES = "norms_and_biases"  # a group of this name needs no pattern
SIZES = (1.0, 1e4, 1e-2)  # of the trial's gradients, which reveal clipping by a common norm

_Sample = tuple[str, nn.Parameter, list[Tensor]]
"""A small parameter, the name of one of its kind in the model, and the gradients of its steps."""


def make_optimizer(cfg: DictConfig, model: nn.Module, stages: int = 1) -> OptimizerFactory:
    """Return a stage's optimizer factory; `fused` null: the fused form if it works. Raises ConfigError."""
    cfg, groups = cfg.copy(), _groups(cfg, model)
    if isinstance(cfg.optim, DictConfig) and "groups" in cfg.optim:
        del cfg.optim.groups
    fused = cfg.optim.get("fused", True) if isinstance(cfg.optim, DictConfig) else True
    if fused is not None:
        if not isinstance(fused, bool):
            raise ConfigError(f"optim.fused={fused} must be true or false")
        return _tried(cfg, build(cfg, "optim"), groups, model, stages)
    del cfg.optim.fused
    factory = build(cfg, "optim")
    with suppress(ConfigError):
        return _tried(cfg, partial(factory, fused=True), groups, model, stages)
    return _tried(cfg, factory, groups, model, stages)


def prove_optimizer(
    factory: OptimizerFactory, groups: Mapping[str, Any] | None, model: nn.Module, stages: int
) -> OptimizerFactory:
    """Return a stage's factory from a function of parameters, with `groups` as `optim.groups`.

    Raises ConfigError.
    """
    name = getattr(factory, "__qualname__", type(factory).__qualname__)
    example = name if hasattr(factory, "param_groups") else "torch.optim.SGD"
    if not callable(factory):
        raise ConfigError(
            f"optimizer must be a function of the parameters, such as lambda p: {example}(p, ...), as each "
            f"stage has its own; got {name}"
        )
    cfg = OmegaConf.create({"optim": {"_target_": name, "groups": groups}, "checkpoint": {"every": 1}})
    try:
        return _tried(cfg, factory, _groups(cfg, model), model, stages)
    except ConfigError as error:
        raise ConfigError(str(error).replace("optim.groups", "param_groups")) from error


def _groups(cfg: DictConfig, model: nn.Module) -> list[Group]:
    """Return the groups of `optim.groups`. Raises ConfigError, also for a group without parameters."""
    node = OmegaConf.select(cfg, "optim.groups") if isinstance(cfg.optim, DictConfig) else None
    content = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node or {}
    if not isinstance(content, dict):
        raise ConfigError(f"optim.groups={content} must have a name for each group, with its options")
    groups = [_group(str(name), options) for name, options in content.items()]
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    of = GroupedFactory(torch.optim.SGD, groups).group_of
    taken = [of(name, parameter) for name, parameter in trained]
    for group in groups:
        if group not in taken:
            raise ConfigError(
                f"optim.groups.{group.name} has no parameter: none that is left by the groups before it is "
                f"{'a norm or a bias' if group.pattern is None else f'matched by params={group.pattern}'}; "
                f"parameters have names such as {trained[0][0]}"
            )
    return groups


def _group(name: str, options: Any) -> Group:
    key = f"optim.groups.{name}"
    if not isinstance(options, dict):
        raise ConfigError(f"{key}={options} must have options of the optimizer, such as {key}.weight_decay=0")
    options = dict(options)
    pattern = options.pop("params", None)
    if pattern is None and name != NORMS_AND_BIASES:
        raise ConfigError(f"{key} needs {key}.params=, a regular expression that its parameters' names match")
    try:
        re.compile(str(pattern))
    except re.error as error:
        raise ConfigError(f"{key}.params={pattern} is no regular expression: {error}") from error
    return Group(name, None if pattern is None else str(pattern), options)


def _refuse_unknown(groups: Sequence[Group], optimizer: Optimizer, target: str) -> None:
    """Refuse options that the optimizer does not have, which torch would ignore. Raises ConfigError."""
    for group in groups:
        for option in group.options:
            if option not in optimizer.defaults:
                close = difflib.get_close_matches(str(option), optimizer.defaults, n=1)
                meant = f"; did you mean {close[0]}" if close else ""
                raise ConfigError(f"optim.groups.{group.name}.{option}: {target} has no {option}{meant}")


def _tried(
    cfg: DictConfig, plain: OptimizerFactory, groups: Sequence[Group], model: nn.Module, stages: int
) -> OptimizerFactory:
    """Return the factory; refuse an optimizer that fails, or that stages or checkpoints cannot use."""
    target = cfg.optim._target_
    factory = GroupedFactory(plain, groups) if groups else plain
    together, apart = _samples(factory, model), _samples(factory, model)
    try:
        optimizer = _built(factory, together)
        _refuse_unknown(groups, optimizer, target)
        for group in groups if isinstance(plain, partial) else ():
            _built(partial(plain, **group.options), together)  # optimizers check values only there
        memory = _stepped(optimizer, together)
        for sample in apart:
            _stepped(_built(factory, [sample]), [sample])
    except ConfigError:
        raise
    except Exception as error:  # a user's class may raise anything
        if "unexpected keyword argument" in str(error) and "_partial_" in cfg.optim:  # not from Python
            raise not_built("optim", cfg.optim, error) from error
        raise ConfigError(f"optim cannot be built by {target}: {one_line(error)}") from error
    pairs = zip(together, apart, strict=True)
    if stages > 1 and not all(torch.allclose(a, b, equal_nan=True) for (_, a, _), (_, b, _) in pairs):
        raise ConfigError(
            f"optim {target} lets the step of one parameter depend on others, and each of {stages} stages "
            f"sees its own alone: choose another optimizer, or one stage"
        )
    if not all(weight.isfinite().all() for _, weight, _ in together):
        raise ConfigError(f"optim {target} makes weights that are not finite: see to its settings")
    try:
        for _, weight, _ in together:
            memory.of(weight)
    except TypeError as error:
        if cfg.checkpoint.every is not None:
            raise ConfigError(
                f"optim {target} remembers {error}, which a checkpoint cannot hold: choose another "
                f"optimizer, or checkpoint.every=null"
            ) from error
    return factory


def _samples(factory: OptimizerFactory, model: nn.Module) -> list[_Sample]:
    """Make two parameters of each kind that a model trains: shape, dtype, form of gradient, and group."""
    group_of = factory.group_of if isinstance(factory, GroupedFactory) else lambda name, p: None
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    sparse = {id(m.weight) for m in embeddings if m.sparse}
    kinds = {
        (tuple(min(n, 2) for n in p.shape), p.dtype, id(p) in sparse, id(group_of(name, p))): name
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    made = []
    for number, ((shape, dtype, is_sparse, _), name) in enumerate([*kinds.items()] * 2, start=1):
        values = torch.linspace(0.5, 1, math.prod(shape)).reshape(shape).to(dtype)
        most = torch.finfo(dtype).max ** 0.5  # far from an overflow, of float16
        gradients = [values * number * min(size, most) for size in SIZES]
        gradients = [g.to_sparse(1) if is_sparse else g for g in gradients]
        made.append((name, nn.Parameter(values.clone()), gradients))
    return made


def _built(factory: OptimizerFactory, samples: Sequence[_Sample]) -> Optimizer:
    """Return an optimizer over the samples. Raises ConfigError if it has other parameters."""
    optimizer = optimizer_over(factory, [(name, weight) for name, weight, _ in samples])
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            f"the optimizer's function must return an optimizer, as lambda p: torch.optim.SGD(p, 0.01) does; "
            f"it returned {type(optimizer).__name__}"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(weight) for _, weight, _ in samples}:
        raise ConfigError(
            f"the optimizer holds other parameters than those that its function was given, and each stage "
            f"gives its own: let the function pass on its argument, all of it, as in lambda p: "
            f"{type(optimizer).__name__}(p, ...), and freeze the others by requires_grad_(False)"
        )
    return optimizer


def _stepped(optimizer: Optimizer, samples: Sequence[_Sample]) -> Memory:
    memory = Memory(optimizer)
    for step in range(len(SIZES)):
        for _, weight, gradients in samples:
            weight.grad = gradients[step].clone()
        optimizer.step()
    return memory
