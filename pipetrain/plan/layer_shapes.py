"""What the layers of a network make of microbatches of other lengths than those that were estimated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pipetrain.errors import ConfigError, one_line
from pipetrain.model.network import INPUT, Network, Shape, ValueId, evaluating
from pipetrain.model.numerics import Numerics
from pipetrain.model.random_numbers import RngSnapshot
from pipetrain.model.specs import Size, ValueSpec, leaves_of
from pipetrain.model.tensor_places import names_by_id, standing_in, tensors_in
from pipetrain.plan.cost_estimate import Layer, fake_mode, quiet


@dataclass(frozen=True)
class LayerShapes:
    """The output of each layer by the size of a microbatch: by the trace, or by a run without numbers.

    `layers`: as estimated for one size; `example`: of the inputs; `training`: in the modes of the modules, or
    else in evaluation. Ranks that have only the tensors of their own stages can use it too.
    """

    network: Network
    layers: Sequence[Layer]
    example: ValueSpec
    numerics: Numerics
    training: bool
    _tensors: dict[str, Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The network's, without numbers, by name."""

    @torch.no_grad()
    def __call__(self, size: Size) -> list[ValueSpec]:
        """Return what each layer makes. Raises ConfigError with the name of one that cannot take it."""
        network, specs = self.network, [self.example.of(size)]
        if (traced := network.output_shapes(specs[0].specs, self.training)) is not None:
            return [_shaped(layer.output, shapes) for layer, shapes in zip(self.layers, traced, strict=True)]
        names = names_by_id(network.model)
        mode = nullcontext() if self.training else evaluating(network.model, *network.modules)
        with quiet(), RngSnapshot().replayed(), mode, fake_mode(), self.numerics.context("cpu"):
            made = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs[0].specs]
            values = {ValueId(INPUT, number): tensor for number, tensor in enumerate(made)}
            for index, (module, layer) in enumerate(zip(network.modules, self.layers, strict=True)):
                used = tensors_in(module, names)
                stand_ins = {id(tensor): self._without_numbers(name, tensor) for name, tensor in used.items()}
                try:
                    with standing_in(module, stand_ins):
                        result = network.call(index, tuple(map(values.__getitem__, layer.takes)), specs)
                except Exception as error:  # of the user's layer
                    where = f"layer {index} ({layer.name}) of the model"
                    raise ConfigError(
                        f"{where} cannot take {size}: {one_line(error)}; cut or pad such a batch"
                    ) from error
                outputs = leaves_of(result)
                values |= {ValueId(index, number): tensor for number, tensor in enumerate(outputs)}
                specs.append(_shaped(layer.output, [tuple(tensor.shape) for tensor in outputs]))
        return specs[1:]

    def _without_numbers(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._tensors:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            self._tensors[name] = empty.requires_grad_(tensor.requires_grad)
        return self._tensors[name]


def _shaped(value: ValueSpec, shapes: Sequence[Shape]) -> ValueSpec:
    specs = (replace(spec, shape=shape) for spec, shape in zip(value.specs, shapes, strict=True))
    return replace(value, specs=tuple(specs))
