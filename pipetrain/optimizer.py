"""The configured optimizer, tried before the start.

Each stage has its own optimizer over its own parameters. This equals one optimizer over all of them only if
each parameter is treated separately, so it is tried on small parameters of the model's kinds, together and
one by one. Its state must fit into a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from pipetrain.building import build, not_built, one_line
from pipetrain.errors import ConfigError
from pipetrain.runtime.memory import Memory
from pipetrain.runtime.weights import OptimizerFactory

SIZES = (1.0, 1e4, 1e-2)  # of the trial's gradients, which reveal clipping by a common norm

_Sample = tuple[nn.Parameter, list[Tensor]]  # a small parameter, and the gradients of its steps


def make_optimizer(cfg: DictConfig, model: nn.Module, stages: int = 1) -> OptimizerFactory:
    """Return a stage's optimizer factory; `fused` null: the fused form if it works. Raises ConfigError."""
    fused = cfg.optim.get("fused", True) if isinstance(cfg.optim, DictConfig) else True
    if fused is not None:
        if not isinstance(fused, bool):
            raise ConfigError(f"optim.fused={fused} must be true or false")
        return _tried(cfg, build(cfg, "optim"), model, stages)
    cfg = cfg.copy()
    del cfg.optim.fused
    factory = build(cfg, "optim")
    with suppress(ConfigError):
        return _tried(cfg, partial(factory, fused=True), model, stages)
    return _tried(cfg, factory, model, stages)


def _tried(cfg: DictConfig, factory: OptimizerFactory, model: nn.Module, stages: int) -> OptimizerFactory:
    """Return the factory; refuse an optimizer that fails, or that stages or checkpoints cannot use."""
    target = cfg.optim._target_
    together, apart = _samples(model), _samples(model)
    try:
        memory = _stepped(factory, together)
        for sample in apart:
            _stepped(factory, [sample])
    except Exception as error:  # a user's class may raise anything
        if "unexpected keyword argument" in str(error):
            raise not_built("optim", cfg.optim, error) from error
        raise ConfigError(f"optim cannot be built by {target}: {one_line(error)}") from error
    pairs = zip(together, apart, strict=True)
    if stages > 1 and not all(torch.allclose(a, b, equal_nan=True) for (a, _), (b, _) in pairs):
        raise ConfigError(
            f"optim {target} lets the step of one parameter depend on others, and each of {stages} stages "
            f"sees its own alone: choose another optimizer, or one stage"
        )
    if not all(weight.isfinite().all() for weight, _ in together):
        raise ConfigError(f"optim {target} makes weights that are not finite: see to its settings")
    try:
        for weight, _ in together:
            memory.of(weight)
    except TypeError as error:
        if cfg.checkpoint.every is not None:
            raise ConfigError(
                f"optim {target} remembers {error}, which a checkpoint cannot hold: choose another "
                f"optimizer, or checkpoint.every=null"
            ) from error
    return factory


def _samples(model: nn.Module) -> list[_Sample]:
    """Make two parameters of each kind that a model trains: of its shape, dtype, and form of gradient."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    sparse = {id(m.weight) for m in embeddings if m.sparse}
    kinds = {
        (tuple(min(n, 2) for n in p.shape), p.dtype, id(p) in sparse)
        for p in model.parameters()
        if p.requires_grad
    }
    made = []
    for number, (shape, dtype, is_sparse) in enumerate([*kinds, *kinds], start=1):
        values = torch.linspace(0.5, 1, math.prod(shape)).reshape(shape).to(dtype)
        gradients = [values * number * size for size in SIZES]
        made.append((nn.Parameter(values.clone()), [g.to_sparse(1) if is_sparse else g for g in gradients]))
    return made


def _stepped(factory: OptimizerFactory, samples: Sequence[_Sample]) -> Memory:
    optimizer = factory([weight for weight, _ in samples])
    memory = Memory(optimizer)
    for step in range(len(SIZES)):
        for weight, gradients in samples:
            weight.grad = gradients[step].clone()
        optimizer.step()
    return memory
