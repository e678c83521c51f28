"""Compares a module with its traced layers, cut in several ways."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipetrain.model.network import INPUT, Part, Slice, ValueId, run_parts
from pipetrain.model.specs import TensorSpec, ValueSpec
from pipetrain.model.tracing.dataflow import is_random
from pipetrain.model.tracing.trace import trace
from pipetrain.model.tracing.traced_network import Traced


def example(*shapes: tuple[int, ...], names: tuple[str, ...] | None = None) -> ValueSpec:
    """An example of floating-point inputs."""
    specs = tuple(TensorSpec(shape, torch.float32) for shape in shapes)
    return ValueSpec(specs, single=len(shapes) == 1 and not names, names=names)


def tokens(*names: str, length: int = 8) -> ValueSpec:
    return ValueSpec(tuple(TensorSpec((length,), torch.int64) for _ in names), single=False, names=names)


def inputs(example: ValueSpec, samples: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [
        torch.rand(samples, *spec.shape, dtype=spec.dtype)
        if spec.dtype.is_floating_point
        else torch.randint(0, 2, (samples, *spec.shape)).to(spec.dtype)
        for spec in example.specs
    ]


def run_module(model: nn.Module, example: ValueSpec, tensors: list[Tensor]) -> Any:
    return model(**dict(zip(example.names, tensors, strict=True))) if example.names else model(*tensors)


def run_stages(network: Traced, tensors: list[Tensor], cuts: list[int]) -> Any:
    """The model's output, computed by one part for each stage."""
    layers, training, parts = len(network.names), network.model.training, []
    ends = [0, *cuts, layers]
    for start, end in pairwise(ends):
        taken = {made for index in range(start, end) for made in network.takes(index, ())}
        enters = tuple(sorted(made for made in taken if made.layer < start))
        later = {made for index in range(end, layers) for made in network.takes(index, ())}
        leaves = tuple(sorted(made for made in later if start <= made.layer < end))
        if end == layers:
            leaves = network.alone(layers - 1, training).leaves
        slice = Slice(start, end, enters, leaves)
        parts.append(network.part(slice).train(training))
    return network.pack(run_parts(parts, tensors))


def whole(network: Traced) -> Part:
    """All layers of a model of one input, as one part in training."""
    end = len(network.names)
    slice = Slice(0, end, (ValueId(INPUT, 0),), network.alone(end - 1, True).leaves)
    return network.part(slice, slice).train()


def drawing(network: Traced) -> set[int]:
    """The layers that draw random numbers in training."""
    return {index for index, nodes in enumerate(network.modes[True].nodes) if any(map(is_random, nodes))}


def gradients(model: nn.Module, outputs: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    weighted = [
        (out * torch.linspace(0, 1, out.numel()).reshape(out.shape)).sum()
        for out in outputs
        if out.requires_grad
    ]
    torch.stack(weighted).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def some_cuts(layers: int) -> list[list[int]]:
    chance = random.Random(layers)
    two = [sorted(chance.sample(range(1, layers), min(2, layers - 1))) for _ in range(2)]
    return [[], list(range(1, layers)), *two]


def assert_equal(model: nn.Module, example: ValueSpec, samples: int = 2, exact: bool = True) -> Traced:
    """The module and its layers, cut in several ways, agree: outputs, gradients, buffers; both modes."""
    network = trace(model, example)
    tensors = inputs(example, samples)
    before = [buffer.clone() for buffer in model.buffers()]
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    for training in (True, False):
        for module in (model, *network.modules):
            module.train(training)
        results = []
        for cuts in [None, *some_cuts(len(network.names))]:
            with torch.no_grad():
                for buffer, old in zip(model.buffers(), before, strict=True):
                    buffer.copy_(old)
            torch.manual_seed(2)
            whole = cuts is None
            output = run_module(model, example, tensors) if whole else run_stages(network, tensors, cuts)
            made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            results.append((type(output), made, gradients(model, made), buffers))
        for result in results[1:]:
            torch.testing.assert_close(list(result[1:]), list(results[0][1:]), **tolerance, equal_nan=True)
            assert result[0] is results[0][0]
    for module in (model, *network.modules):
        module.train()
    return network
