"""The layers of a traced model: their operations, what each takes, returns and holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from pipetrain.network.tracing.dataflow import SIZES, Dataflow
from pipetrain.network.tracing.grouping import Group
from pipetrain.network.tracing.operations import Held, Input, Op, ops_in


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. `takes`, `makes`: the operations whose values it takes and returns.

    `sizes`: for an operation that computes a size, the tensor to read it from, its dimension and a factor;
    `held`: names of the parameters and buffers that it uses.
    """

    items: list[Op]
    takes: list[Op]
    makes: list[Op]
    sizes: dict[Op, tuple[Op, int, int]]
    held: list[str]


def layers_of(flow: Dataflow, groups: Sequence[Group]) -> list[Layer]:
    """Return the layers of a model with what each takes and makes."""
    outputs = list(ops_in(flow.outputs))
    layers = []
    for group in groups:
        items = flow.items[group.start : group.end]
        needs = _Needs(flow, items)
        for op in items:
            needs.add(op.given())
        if group is groups[-1]:
            needs.add(outputs)
        needs.resolve()
        takes = sorted(needs.taken, key=lambda op: op.index)
        layers.append(Layer(items, takes, [], needs.sizes, list(needs.held)))
    for k, layer in enumerate(layers[:-1]):
        later = {op for other in layers[k + 1 :] for op in other.takes}
        layer.makes.extend(op for op in layer.items if op in later)
    layers[-1].makes.extend(outputs)
    return layers


class _Needs:
    """Collects what a layer needs: tensors on data (`taken`), weights (`held`), and where to read sizes."""

    def __init__(self, flow: Dataflow, items: Sequence[Op]) -> None:
        self._flow = flow
        self._mine = set(items)
        self._seen: set[Op] = set()
        self._reads: list[Op] = []
        self.taken: dict[Op, None] = {}
        self.held: dict[str, None] = {}
        self.sizes: dict[Op, tuple[Op, int, int]] = {}

    def add(self, ops: Iterable[Op]) -> None:
        """Add the values of operations."""
        for op in ops:
            if op in self._seen or op in self._mine:
                continue
            self._seen.add(op)
            if isinstance(op.source, Held):
                self.held[op.source.name] = None
            elif isinstance(op.source, Input) or op in self._flow.position:
                self.taken[op] = None
            elif op.target in SIZES:
                self._reads.append(op)
            else:
                self.add(op.given())
                self.add(self._flow.writers(op) if op in self._flow.free else ())

    def resolve(self) -> None:
        """Find a tensor from which each size can be read; take the one of the model, if there is no other."""
        for op in self._reads:  # grows
            (of,) = op.given()
            if of in self._mine or of in self.taken:
                continue
            read = next(filter(None, (_size_from(op, tensor) for tensor in self.taken)), None)
            if read is None:
                self.add([of])
            else:
                self.sizes[op] = read


def _size_from(op: Op, tensor: Op) -> tuple[Op, int, int] | None:
    """Return how to read the size that an operation computes from another tensor: dimension and factor."""
    wanted = op.value.node.expr if isinstance(op.value, torch.SymInt) else op.value
    for dimension, size in enumerate(tensor.value.shape):
        if isinstance(size, torch.SymInt):
            times = wanted / size.node.expr
            if times.is_Integer:
                return tensor, dimension, int(times)
    return None
