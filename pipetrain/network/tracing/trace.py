"""Makes a network of layers of any nn.Module, by tracing it once as it is trained and once in evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves

from pipetrain.errors import ConfigError
from pipetrain.network.modes import evaluating
from pipetrain.network.tracing.aligning import align
from pipetrain.network.tracing.dataflow import Dataflow
from pipetrain.network.tracing.exporting import exported
from pipetrain.network.tracing.grouping import Item, Modules, group
from pipetrain.network.tracing.operations import Listing, Op, ops_in
from pipetrain.network.tracing.padding import zeros_of_the_fast_path
from pipetrain.network.tracing.proving import prove
from pipetrain.network.tracing.reading import read
from pipetrain.network.tracing.traced import Traced
from pipetrain.network.values import ValueSpec


def trace(model: nn.Module, example: ValueSpec, autocast: bool = False) -> Traced:
    """Return a model as layers and the values between them.

    `example`: what a sample's input is; `autocast`: see network_of. The model may be on the meta device. Its
    tensors are used as they are, and its modes, values and the random generators do not change. Raises
    ConfigError with the place and a way out for a model that cannot be traced or cut.
    """
    listings = []
    for training in (True, False):
        zeros = nullcontext() if autocast else zeros_of_the_fast_path(model, training)
        with nullcontext() if training else evaluating(model), zeros:
            program, device = exported(model, example)
        listings.append(read(program, model, _order(program, example), training, device))
    listing = align(*listings)
    _refuse_outputs(listing)
    flow = Dataflow(listing)
    forbidden = {
        position: barrier.reason
        for barrier in flow.barriers()
        for position in range(barrier.first + 1, barrier.last + 1)
    }
    items = _items(flow)
    groups = group(items, _modules(model, items), forbidden)
    network = Traced(model, flow, groups, listing.tree, listing.constants)
    prove(network, example, autocast)
    return network


def _order(program: ExportedProgram, example: ValueSpec) -> list[int]:
    """Return the number in `example` of each input of an exported program."""
    if example.names is None:
        return list(range(len(example.specs)))
    spec = program.call_spec.in_spec
    assert spec is not None
    return [example.names.index(name) for name in spec.child(1).context]


def _refuse_outputs(listing: Listing) -> None:
    outputs = list(ops_in(listing.outputs))
    if not outputs:
        raise ConfigError("the model returns no tensor: return what the loss takes")
    for op in outputs:
        if not isinstance(op.value, Tensor):
            raise ConfigError(
                f"the model returns {op.value} ({op.where}), which is no tensor: return tensors only"
            )
        if free_unbacked_symbols(op.value):
            raise ConfigError(
                f"the size of what the model returns depends on its data ({op.where}): return all of it, and "
                f"let the loss choose"
            )


def _items(flow: Dataflow) -> list[Item]:
    found = []
    for op in flow.items:
        uses = tuple(flow.position[user] for user in flow.users[op] if user in flow.position)
        if any(op is output for output in ops_in(flow.outputs)):
            uses = (*uses, len(flow.items))
        nbytes = _nbytes(op) if op in flow.trained else 0
        found.append(Item(op.calls, uses, nbytes, flow.works(op)))
    return found


def _nbytes(op: Op) -> int:
    total = 0
    for leaf in tree_leaves(op.value):
        if isinstance(leaf, Tensor):
            sizes: list[Any] = list(leaf.shape)
            hints = [(size.node.hint or 1) if isinstance(size, torch.SymInt) else size for size in sizes]
            total += math.prod(hints) * leaf.dtype.itemsize
    return total


def _modules(model: nn.Module, items: Sequence[Item]) -> Modules:
    """Return what the grouping needs to know of a model's modules; only lists of called modules count."""
    called = {call.path for item in items for call in item.calls}
    lists: set[str] = set()
    elements: set[str] = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            continue
        held = {f"{name}.{key}".lstrip(".") for key in module._modules} & called
        if held and not isinstance(module, ParametrizationList):
            elements |= held
            parts = name.split(".")
            lists |= {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    return Modules(lists, elements, type(model).__name__)
