"""Tries the optimizer before the start.

Each stage has its own optimizer for its own parameters. So the optimizer is tried on small copies of the
model's: two optimizers for half of them each must step as one for all does. If that fails, the parameters
have their true shapes until the optimizer is made, as its function may choose by shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetrain.config.build import Optim
from pipetrain.config.parameter_groups import Group, groups_of, optimizer_of
from pipetrain.errors import ConfigError, failing
from pipetrain.runtime.stage.parameter_store import OptimizerFactory

SIZES = (1.0, 1e4, 1e-2)  # of the trial's gradients, to reveal clipping by a common norm

_Parameters = list[tuple[str, nn.Parameter]]


def try_optimizer(optim: Optim, model: nn.Module, stages: int) -> OptimizerFactory:
    """Return a stage's factory, in the first form that works. Raises ConfigError."""
    groups = groups_of(optim, model)
    for form, true in product(optim.forms, (False, True)):
        try:
            return _tried(optim.name, form, groups, model, stages, true)
        except ConfigError as error:
            refusal = error
    raise refusal


def trial_optimizer(factory: OptimizerFactory, model: nn.Module) -> tuple[Optimizer, _Parameters]:
    """Return an optimizer for parameters like all of a model's, without their values, and those."""
    with suppress(Exception):
        named = _like(model, partial(_in_true_shape, device="meta"))
        return factory(named), named
    named = _like(model, _in_true_shape)
    return factory(named), named  # it reads values when it is made


def _like(model: nn.Module, copy_of: Callable[[Tensor], Tensor]) -> _Parameters:
    """Return a parameter made by `copy_of` for each trained one of a model, with its name."""
    return [(name, nn.Parameter(copy_of(p))) for name, p in model.named_parameters() if p.requires_grad]


def _in_true_shape(parameter: Tensor, device: str = "cpu") -> Tensor:
    """Return zeros of a parameter's shape, without memory."""
    return torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)


def _small(parameter: Tensor) -> Tensor:
    """Return numbers shaped like a parameter, but at most 2 in each dimension."""
    shape = [min(n, 2) for n in parameter.shape]
    return torch.linspace(0.5, 1, math.prod(shape)).reshape(shape).to(parameter.dtype)


# The trial


def _tried(
    target: str,
    function: Callable[[Any], Optimizer],
    groups: Sequence[Group],
    model: nn.Module,
    stages: int,
    true: bool,
) -> OptimizerFactory:
    """Return the factory; refuse an optimizer that fails, or that stages cannot use.

    `true`: whether its function gets true shapes.
    """
    factory = partial(optimizer_of, function, groups)
    whole, apart = (_like(model, _in_true_shape if true else _small) for _ in range(2))
    small, gradients = dict(_like(model, _small)), _gradients(model)
    middle = len(apart) // 2
    with failing(f"optim cannot be built by {target}"):
        optimizer = _stepped(factory, whole, small, gradients)
        for part in filter(None, (apart[:middle], apart[middle:]) if stages > 1 else ()):
            _stepped(factory, part, small, gradients)
    for group in groups:  # torch ignores options that its optimizer does not have
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
    """Return a gradient for each small copy, sparse if the model's would be; each has another norm."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    sparse = {id(table.weight) for table in tables}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in sparse}
    dense = {name: torch.full_like(p, 1 / k) for k, (name, p) in enumerate(_like(model, _small), start=1)}
    return {name: g.to_sparse(1) if name in names else g for name, g in dense.items()}


def _stepped(
    factory: OptimizerFactory,
    named: _Parameters,
    small: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> Optimizer:
    """Make some steps of copies with the `small` numbers; return the optimizer.

    Raises ConfigError if it has other parameters, or keeps gradients.
    """
    optimizer = factory(named)
    if {id(p) for group in optimizer.param_groups for p in group["params"]} != {id(p) for _, p in named}:
        raise ConfigError(
            f"the optimizer holds other parameters than those that its function was given, and each stage "
            f"gives its own: let the function pass on its argument, all of it, as in lambda p: "
            f"{type(optimizer).__name__}(p, ...), and freeze the others by requires_grad_(False)"
        )
    for name, weight in named:
        for key, value in optimizer.state.get(weight, {}).items():  # some make state at once
            if isinstance(value, Tensor) and value.shape == weight.shape:
                optimizer.state[weight][key] = value[tuple(map(slice, small[name].shape))].clone()
        weight.data = small[name].clone()
    for size in SIZES:
        for name, weight in named:
            weight.grad = gradients[name] * size
        try:
            optimizer.step()
        except Exception as error:
            if not _works_with_closure(optimizer):
                raise
            raise ConfigError(
                f"the step of {type(optimizer).__name__} needs a closure, which computes a batch's loss "
                f"again, and a pipeline has none: choose an optimizer without"
            ) from error
        optimizer.zero_grad()
        if any(weight.grad.to_dense().any() for _, weight in named if weight.grad is not None):
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} keeps gradients after a step, as one does that "
                f"accumulates them, and here each update has a batch of its own: leave that out, and give "
                f"larger batches in more microbatches="
            )
    return optimizer


def _works_with_closure(optimizer: Optimizer) -> bool:
    with suppress(Exception):
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
        return True
    return False
