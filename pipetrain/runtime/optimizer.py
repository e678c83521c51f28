"""The optimizer, tried before the start.

Each stage has its own optimizer over its own parameters. So it is tried on small copies of the model's: two
optimizers of half of them each must step as one of all does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetrain.building import Function, Optim
from pipetrain.errors import ConfigError, one_line
from pipetrain.runtime.weights import Named, OptimizerFactory

NORMS_AND_BIASES = "norms_and_biases"  # a group of this name needs no pattern
SIZES = (1.0, 1e4, 1e-2)  # of the trial's gradients, which reveal clipping by a common norm

_Parameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class Group:
    """The options of an optimizer for some parameters.

    `pattern` matches all of a parameter's full name; None: all parameters of at most one dimension, as
    the weights of norms and all biases are.
    """

    name: str
    pattern: str | None
    options: Mapping[str, Any]

    def takes(self, name: str, parameter: Tensor) -> bool:
        return parameter.dim() < 2 if self.pattern is None else bool(re.fullmatch(self.pattern, name))


def prove_optimizer(optim: Optim, model: nn.Module, stages: int) -> OptimizerFactory:
    """Return a stage's factory, of the first form that works. Raises ConfigError."""
    groups = _groups(optim.key, optim.groups, model)
    *first, last = (partial(_tried, optim.name, form, groups, model, stages) for form in optim.forms)
    for tried in first:
        with suppress(ConfigError):
            return tried()
    return last()


def small_copies(model: nn.Module) -> _Parameters:
    """Return a parameter of at most 2 in each dimension for each one that a model trains, with its name."""
    return [
        (name, nn.Parameter(torch.linspace(0.5, 1, math.prod(shape)).reshape(shape).to(p.dtype)))
        for name, p in model.named_parameters()
        if p.requires_grad
        for shape in [[min(n, 2) for n in p.shape]]
    ]


# The groups


def _groups(key: str, content: Any, model: nn.Module) -> list[Group]:
    if not isinstance(content or {}, Mapping):
        raise ConfigError(f"{key}={content} must have a name for each group, with its options")
    groups = [_group(f"{key}.{name}", options) for name, options in (content or {}).items()]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    taken = [next((group for group in groups if group.takes(*one)), None) for one in named]
    for group in groups:
        if group not in taken:
            wanted = (
                "a norm or a bias"
                if group.pattern is None
                else f"matched as a whole by params={group.pattern}"
            )
            raise ConfigError(
                f"{group.name} has no parameter: none that is left by the groups before it is {wanted}; "
                f"parameters have names such as {named[0][0]}"
            )
    return groups


def _group(key: str, content: Any) -> Group:
    if not isinstance(content, Mapping):
        raise ConfigError(f"{key}={content} must have options of the optimizer, such as {key}.weight_decay=0")
    options = dict(content)
    pattern = options.pop("params", None)
    if pattern is None and not key.endswith(f".{NORMS_AND_BIASES}"):
        raise ConfigError(f"{key} needs {key}.params=, a regular expression that its parameters' names match")
    try:
        re.compile(str(pattern))
    except re.error as error:
        raise ConfigError(f"{key}.params={pattern} is no regular expression: {error}") from error
    return Group(key, None if pattern is None else str(pattern), options)


def _over(function: Function, groups: Sequence[Group], named: Named) -> Optimizer:
    """Return an optimizer with a torch group for each of the groups that has parameters, and for the rest."""
    if not groups:
        return function([parameter for _, parameter in named])
    members: dict[str, dict[str, Any]] = {}
    for name, parameter in named:
        group = next((group for group in groups if group.takes(name, parameter)), Group("", None, {}))
        members.setdefault(group.name, {"params": [], **group.options})["params"].append(parameter)
    return function([*members.values()])


# The trial


def _tried(
    target: str,
    function: Function,
    groups: Sequence[Group],
    model: nn.Module,
    stages: int,
) -> OptimizerFactory:
    """Return the factory; refuse an optimizer that fails, or that stages cannot use."""
    factory = partial(_over, function, groups)
    whole, apart, gradients = small_copies(model), small_copies(model), _gradients(model)
    middle = len(apart) // 2
    try:
        optimizer = _stepped(factory, whole, gradients)
        for half in filter(None, (apart[:middle], apart[middle:])):
            _stepped(factory, half, gradients)
    except ConfigError:
        raise
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(f"optim cannot be built by {target}: {one_line(error)}") from error
    for group in groups:  # torch ignores what its optimizer does not have
        if unknown := [option for option in group.options if option not in optimizer.defaults]:
            raise ConfigError(f"{group.name}.{unknown[0]}: {target} has no {unknown[0]}")
    same = (torch.allclose(a, b, equal_nan=True) for (_, a), (_, b) in zip(whole, apart, strict=True))
    if stages > 1 and not all(same):
        raise ConfigError(
            f"optimizer {target} lets the step of one parameter depend on others, or on how many there are "
            f"before it, and each of {stages} stages sees its own alone: choose another optimizer, or one "
            f"stage; clip_grad_norm= clips over all, and param_groups= (optim.groups) gives options by name"
        )
    return factory


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a gradient for each small copy, sparse where the model's would be; each has another norm."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    sparse = {id(table.weight) for table in tables}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in sparse}
    dense = {name: torch.full_like(p, 1 / k) for k, (name, p) in enumerate(small_copies(model), start=1)}
    return {name: g.to_sparse(1) if name in names else g for name, g in dense.items()}


def _stepped(factory: OptimizerFactory, named: _Parameters, gradients: Mapping[str, Tensor]) -> Optimizer:
    """Make some steps; return the optimizer. Raises ConfigError if it has other parameters."""
    optimizer = factory(named)
    if {id(p) for group in optimizer.param_groups for p in group["params"]} != {id(p) for _, p in named}:
        raise ConfigError(
            f"the optimizer holds other parameters than those that its function was given, and each stage "
            f"gives its own: let the function pass on its argument, all of it, as in lambda p: "
            f"{type(optimizer).__name__}(p, ...), and freeze the others by requires_grad_(False)"
        )
    for size in SIZES:
        for name, weight in named:
            weight.grad = gradients[name] * size
        optimizer.step()
    return optimizer
