"""The optimizer, tried before the start.

Each stage has its own optimizer over its own parameters. So it is tried on small copies of the model's: two
optimizers of half of them each must step as one of all does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetrain.building import Function, Optim
from pipetrain.errors import ConfigError, one_line
from pipetrain.groups import Group, groups_of, optimizer_of
from pipetrain.runtime.weights import OptimizerFactory

SIZES = (1.0, 1e4, 1e-2)  # of the trial's gradients, which reveal clipping by a common norm

_Parameters = list[tuple[str, nn.Parameter]]


def prove_optimizer(optim: Optim, model: nn.Module, stages: int) -> OptimizerFactory:
    """Return a stage's factory, of the first form that works. Raises ConfigError."""
    groups = groups_of(optim, model)
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


# The trial


def _tried(
    target: str,
    function: Function,
    groups: Sequence[Group],
    model: nn.Module,
    stages: int,
) -> OptimizerFactory:
    """Return the factory; refuse an optimizer that fails, or that stages cannot use."""
    factory = partial(optimizer_of, function, groups)
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
        unknown = [option for option in group.options if option not in optimizer.defaults]
        if unknown and not group.function:
            raise ConfigError(f"{group.key}.{unknown[0]}: {target} has no {unknown[0]}")
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
