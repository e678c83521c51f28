"""What each layer costs and returns, worked out without computing.

The layers run once under FakeTensorMode, on tensors that have a shape and no data: a pass that computes
would update BatchNorm's running statistics, and the meta device gets dtypes wrong under autocast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from pipetrain.boundary import Boundary, TensorSpec, Value, as_tuple, describe
from pipetrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layer:
    """One cuttable layer, as estimated for one microbatch size."""

    name: str
    params: int  # elements, each shared parameter once
    flops: int  # of one forward, plus one per output element
    output: Boundary
    writes_input: bool  # its first operation works in place: the layer must get a copy at a boundary


def estimate(model: nn.Sequential, example: TensorSpec) -> list[Layer]:
    """Estimate every layer of `model` for one microbatch of the shape and dtype of `example`.

    Raises ConfigError with the layer's name where a layer cannot take what the one before it returns.
    """
    layers: list[Layer] = []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        value: Value = torch.empty(example.shape, dtype=example.dtype)
        for name, module in model.named_children():
            fake: dict[str, Tensor] = {
                key: mode.from_tensor(tensor)
                for key, tensor in [*module.named_parameters(), *module.named_buffers()]
            }
            # Not leaves: an in-place operation on them is allowed, and seen as a new version.
            inputs = tuple(t.detach() for t in as_tuple(value))
            before = [t._version for t in inputs]
            try:
                with torch.no_grad(), FlopCounterMode(display=False) as counter:
                    value = functional_call(
                        module, fake, (inputs[0] if isinstance(value, Tensor) else inputs,)
                    )
                output = describe(value)
            except Exception as error:
                cause = " ".join(str(error).split())
                raise ConfigError(
                    f"layer {len(layers)} ({name}) of the model cannot take {describe(value)}: {cause}"
                ) from error
            elements = sum(t.numel() for t in as_tuple(value))
            layers.append(
                Layer(
                    name=name,
                    params=sum(p.numel() for p in module.parameters()),
                    flops=counter.get_total_flops() + elements,
                    output=output,
                    writes_input=[t._version for t in inputs] != before,
                )
            )
    return layers


def list_layers(layers: Sequence[Layer]) -> str:
    """Name the layers with their numbers, for an error about a cut."""
    return ", ".join(f"{i} {layer.name}" for i, layer in enumerate(layers))
