"""The layers of a traced model in one mode: what each takes, makes and holds, and the code of a run of them.

The code is that of torch.fx, of a function of tensors. Weights are arguments of it too, so that another
version can be put in their place, and the generators are seeded before a layer that draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from pipetrain.network import draws
from pipetrain.network.network import INPUT, Made, Slice
from pipetrain.network.tracing.dataflow import Dataflow, is_size
from pipetrain.network.tracing.dataflow import draws as draws_numbers
from pipetrain.network.tracing.reading import Constant, Held, Input, Region


class Code(NamedTuple):
    """A function of the tensors that enter and of `held` ones on a device; it returns a tuple."""

    function: Callable[..., tuple[Tensor, ...]]
    held: tuple[str, ...]


class Layers:
    """The layers of a model that is cut before the items at `cuts`. `values`: what travels between them.

    Of each layer: `nodes`, its operations and those that it makes again, in order; `slices`, what it takes
    and makes; `held`, the parameters and buffers that it uses.
    """

    def __init__(self, flow: Dataflow, cuts: Sequence[int]) -> None:
        self.flow = flow
        outputs = [output for output in flow.operations.outputs if isinstance(output, fx.Node)]
        parts = [flow.items[start:end] for start, end in pairwise([0, *cuts, len(flow.items)])]
        needs = [_needs(flow, part, outputs if part is parts[-1] else []) for part in parts]
        self.nodes = [sorted(nodes, key=flow.order.__getitem__) for nodes, _, _ in needs]
        self.held = [list(dict.fromkeys(held)) for _, _, held in needs]
        sources = ((node, node.meta.get("source")) for node in flow.order)
        numbers = {node: Made(INPUT, source.number) for node, source in sources if isinstance(source, Input)}
        self.values = {made: node for node, made in numbers.items()}
        self.slices: list[Slice] = []
        for index, (_, taken, _) in enumerate(needs):
            later = {node for _, others, _ in needs[index + 1 :] for node in others}
            makes = outputs if index == len(cuts) else [node for node in parts[index] if node in later]
            enters = tuple(sorted(numbers[node] for node in taken))
            leaves = tuple(Made(index, number) for number in range(len(makes)))
            self.slices.append(Slice(index, index + 1, enters, leaves))
            self.values |= zip(leaves, makes, strict=True)
            numbers |= zip(makes, leaves, strict=True)
        self._codes: dict[tuple[Slice, torch.device], Code] = {}

    def code(self, slice: Slice, device: torch.device) -> Code:
        """Return the code of some layers, from the values that enter to those that leave."""
        if (slice, device) not in self._codes:
            self._codes[slice, device] = self._code(slice, device)
        return self._codes[slice, device]

    def _code(self, slice: Slice, device: torch.device) -> Code:
        graph, enters = fx.Graph(), [self.values[made] for made in slice.enters]
        leaves = [self.values[made] for made in slice.leaves]
        made = {node: graph.placeholder(f"x{number}") for number, node in enumerate(enters)}
        nodes = [(index, node) for index in range(slice.start, slice.end) for node in self.nodes[index]]
        used = dict.fromkeys([*(given for _, node in nodes for given in node.all_input_nodes), *leaves])
        sources = [(node, node.meta.get("source")) for node in used]
        held = {node: source.name for node, source in sources if isinstance(source, Held)}
        others = {node: source.tensor for node, source in sources if isinstance(source, Constant)}
        made |= {node: graph.placeholder(node.name) for node in held}
        made |= {node: graph.get_attr(node.name) for node in others}
        _add_sizes(graph, [node for node in used if is_size(node)], enters, made)

        def argument(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return made[value]
            return device if isinstance(value, torch.device) else value

        seeded = set[int]()
        for index, node in nodes:
            if node in made:
                continue
            if draws_numbers(node) and index not in seeded:
                graph.call_function(draws.begin, (index,))
                seeded.add(index)
            args: Any
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), argument)
            target: Any = node.target
            region = node.meta.get("region", Region())
            if region != Region():
                target, args = in_region, (node.target, *region, *args)
            made[node] = graph.call_function(target, args, kwargs)
        graph.output(tuple(made[leaf] for leaf in leaves))
        constants = {node.name: tensor.to(device) for node, tensor in others.items()}
        return Code(fx.GraphModule(constants, graph).forward, tuple(held.values()))


def _needs(
    flow: Dataflow, items: list[fx.Node], outputs: list[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node], list[str]]:
    """Return the operations of a layer, the values of others that it takes, and the tensors that it holds."""
    nodes, taken, held = dict.fromkeys(items), dict[fx.Node, None](), list[str]()
    todo = [*(given for item in items for given in item.all_input_nodes), *outputs]
    sized = any(map(is_size, todo))
    for node in todo:  # grows
        source = node.meta.get("source")
        if isinstance(source, Held):
            held.append(source.name)
        elif isinstance(source, Input) or (node in flow.position and node not in nodes):
            taken[node] = None
        elif source is None and node not in nodes and not is_size(node):
            nodes[node] = None
            todo += node.all_input_nodes
            sized = sized or any(map(is_size, node.all_input_nodes))
    if sized and not any(map(_samples_in, taken)):
        taken[next(node for node in flow.order if isinstance(node.meta.get("source"), Input))] = None
    return list(nodes), list(taken), held


def _samples_in(node: fx.Node) -> tuple[int, int, Any] | None:
    """Return a dimension of a value that has samples, how many numbers for each, and what stands for them."""
    for dimension, size in enumerate(getattr(node.meta["val"], "shape", ())):
        if isinstance(size, torch.SymInt) and len(size.node.expr.free_symbols) == 1:
            (symbol,) = size.node.expr.free_symbols
            if (each := size.node.expr / symbol).is_Integer:
                return dimension, int(each), symbol
    return None


def _add_sizes(
    graph: fx.Graph, sizes: Sequence[fx.Node], enters: Sequence[fx.Node], made: dict[fx.Node, Any]
) -> None:
    """Compute sizes of the number of samples, which the first of the tensors that enter tells."""
    if not sizes:
        return
    node, (dimension, each, symbol) = next((node, found) for node in enters if (found := _samples_in(node)))
    read: Any = fx.Proxy(graph.call_function(torch.ops.aten.sym_size.int, (made[node], dimension)))
    samples = {symbol: read // each if each > 1 else read}
    for node in sizes:
        value = node.meta["val"]
        number = (
            sympy_interp(PythonReferenceAnalysis, samples, value.node.expr) if _symbolic(value) else value
        )
        made[node] = number.node if isinstance(number, fx.Proxy) else number


def _symbolic(value: object) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def in_region(
    function: Callable[..., Any],
    grad: bool | None,
    autocast: bool | None,
    dtype: torch.dtype | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run an operation in its region, under autocast on the device of its first tensor."""
    device = next((arg.device.type for arg in args if isinstance(arg, Tensor)), "cpu")
    if grad is None and not autocast and not torch.is_autocast_enabled(device):
        return function(*args, **kwargs)
    with (
        nullcontext() if grad is None else torch.set_grad_enabled(grad),
        nullcontext() if autocast is None else torch.autocast(device, dtype, enabled=autocast),
    ):
        return function(*args, **kwargs)
