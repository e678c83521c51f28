"""What each layer costs and returns, worked out without computing.

The layers run once under FakeTensorMode, on tensors that have a shape and no data: a pass that computes
would update BatchNorm's running statistics, and the meta device gets dtypes wrong under autocast.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from pipetrain.boundary import Boundary, TensorSpec, Value, as_tuple, describe, named_layers
from pipetrain.errors import ConfigError
from pipetrain.numerics import Numerics


@dataclass(frozen=True, slots=True)
class Layer:
    """One cuttable layer, as estimated for one microbatch size."""

    name: str
    params: int  # elements, each shared parameter once
    flops: int  # of one forward, plus one per output element
    output: Boundary
    writes_input: bool  # it works in place on what it is given
    hands_through: bool  # what it returns shares memory with what it is given


def estimate(
    model: nn.Sequential,
    example: TensorSpec,
    mode: FakeTensorMode | None = None,
    numerics: Numerics | None = None,
) -> list[Layer]:
    """Estimate every layer of `model` for one microbatch of the shape and dtype of `example`.

    A layer may keep a tensor of the pass for itself, so give a model that will not train, and the same `mode`
    for all its passes. Raises ConfigError with the layer's name where a layer cannot take what the one before
    it returns.
    """
    layers: list[Layer] = []
    numerics = numerics or Numerics(example.dtype)
    with mode or FakeTensorMode(allow_non_fake_inputs=True) as mode, _quiet():
        try:
            value: Value = torch.empty(example.shape, dtype=example.dtype)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"a microbatch of {example} cannot be: {_line(error)}") from error
        for name, module in named_layers(model):
            try:
                value, layer = _pass(name, module, value, mode, numerics)
            except Exception as error:
                raise ConfigError(
                    f"layer {len(layers)} ({name}) of the model cannot take {describe(value)}: {_line(error)}"
                ) from error
            layers.append(layer)
    return layers


def _pass(
    name: str, module: nn.Module, value: Value, mode: FakeTensorMode, numerics: Numerics
) -> tuple[Value, Layer]:
    fake = {key: numerics.arrange(mode.from_tensor(p)) for key, p in module.named_parameters()}
    fake |= {key: mode.from_tensor(buffer) for key, buffer in module.named_buffers()}
    # Not leaves: an in-place operation on them is allowed, and seen as a new version. In the order that they
    # have where they come over a cut.
    inputs = tuple(numerics.arrange(t.detach()) for t in as_tuple(value))
    before = [t._version for t in inputs]
    with torch.no_grad(), numerics.context("cpu"), FlopCounterMode(display=False) as counter:
        result = functional_call(module, fake, (inputs[0] if isinstance(value, Tensor) else inputs,))
    outputs = as_tuple(result)
    given = {t.untyped_storage()._cdata for t in inputs}
    layer = Layer(
        name=name,
        params=sum(p.numel() for p in module.parameters()),
        flops=counter.get_total_flops() + sum(t.numel() for t in outputs),
        output=describe(numerics.narrow(result)),
        writes_input=[t._version for t in inputs] != before,
        hands_through=any(t.untyped_storage()._cdata in given for t in outputs),
    )
    return (result if isinstance(result, Tensor) else outputs), layer


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging a traceback of a failure that is told in a sentence."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def list_layers(layers: Sequence[Layer]) -> str:
    """Name the layers with their numbers, for an error about a cut."""
    return ", ".join(f"{i} {layer.name}" for i, layer in enumerate(layers))
