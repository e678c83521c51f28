"""The layers of a traced model in one mode: what each takes, makes and holds, and the code of a run of them.

The code is that of torch.fx, of a function of tensors. Weights are arguments of it too, so that another
version can be put in their place, and the generators are seeded before a layer that draws.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pipetrain.network import draws
from pipetrain.network.tracing.dataflow import SIZES, Dataflow
from pipetrain.network.tracing.dataflow import draws as draws_numbers
from pipetrain.network.tracing.reading import Constant, Held, Input, Region


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. `nodes`: its operations, and those that it needs and that do not depend on data, in order.

    `takes`, `makes`: the values that it takes and returns; `sizes`: of a size that it cannot compute, the
    taken tensor to read it from, its dimension and a factor; `held`: the parameters and buffers that it uses.
    """

    nodes: list[fx.Node]
    takes: list[fx.Node]
    makes: list[fx.Node]
    sizes: dict[fx.Node, tuple[fx.Node, int, int]]
    held: list[str]


def layers_of(flow: Dataflow, cuts: Sequence[int]) -> list[Layer]:
    """Return the layers of a model that is cut before the items at `cuts`."""
    outputs = [output for output in flow.operations.outputs if isinstance(output, fx.Node)]
    ends = [*cuts, len(flow.items)]
    needs = [
        _Needs(flow, flow.items[start:end], outputs if end == ends[-1] else ())
        for start, end in zip([0, *cuts], ends, strict=True)
    ]
    layers = []
    for index, mine in enumerate(needs):
        later = {node for other in needs[index + 1 :] for node in other.taken}
        made = [node for node in mine.items if node in later] if index < len(cuts) else outputs
        nodes, takes = (sorted(some, key=flow.order.__getitem__) for some in (mine.nodes, mine.taken))
        layers.append(Layer(nodes, takes, made, mine.sizes, list(mine.held)))
    return layers


class _Needs:
    """Collects what a layer needs: values of others (`taken`), weights, what it makes again, and sizes."""

    def __init__(self, flow: Dataflow, items: Sequence[fx.Node], outputs: Iterable[fx.Node]) -> None:
        self._flow = flow
        self._reads: list[fx.Node] = []
        self.items = items
        self.nodes = set(items)
        self.taken: dict[fx.Node, None] = {}
        self.held: dict[str, None] = {}
        self.sizes: dict[fx.Node, tuple[fx.Node, int, int]] = {}
        for item in items:
            self._add(item.all_input_nodes)
        self._add(outputs)
        for node in self._reads:  # grows
            (of,) = node.all_input_nodes
            found = (_size_from(node, tensor) for tensor in self.taken)
            if of not in self.nodes and of not in self.taken and (read := next(filter(None, found), None)):
                self.sizes[node] = read
            else:
                self._add([of])
                self.nodes.add(node)

    def _add(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            source = node.meta.get("source")
            if node in self.nodes or node in self.taken or node in self._reads:
                continue
            if isinstance(source, Held):
                self.held[source.name] = None
            elif isinstance(source, Input) or node in self._flow.position:
                self.taken[node] = None
            elif node.target in SIZES:
                self._reads.append(node)
            elif source is None:
                self.nodes.add(node)
                self._add([*node.all_input_nodes, *self._flow.writers(node)])


def _size_from(node: fx.Node, tensor: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return how to read the size that an operation computes from another tensor: dimension and factor."""
    value = node.meta["val"]
    wanted = value.node.expr if isinstance(value, torch.SymInt) else value
    for dimension, size in enumerate(tensor.meta["val"].shape):
        if isinstance(size, torch.SymInt):
            times = wanted / size.node.expr
            if times.is_Integer:
                return tensor, dimension, int(times)
    return None


class Code(NamedTuple):
    """A function of the tensors that enter, `held` ones, `constants` and a device; it returns a tuple."""

    function: Callable[..., tuple[Tensor, ...]]
    held: tuple[str, ...]
    constants: tuple[str, ...]


def code_of(
    flow: Dataflow, layers: Mapping[int, Layer], enters: Sequence[fx.Node], leaves: Sequence[fx.Node]
) -> Code:
    """Return the code of some layers by their numbers, from the values `enters` to the values `leaves`."""
    graph = fx.Graph()
    made = {node: graph.placeholder(f"x{number}") for number, node in enumerate(enters)}
    used = [
        *(given for layer in layers.values() for n in layer.nodes for given in n.all_input_nodes),
        *leaves,
    ]
    sources = {node: node.meta["source"] for node in used if node.op == "placeholder" and node not in made}
    held = {node: source.name for node, source in sources.items() if isinstance(source, Held)}
    constants = {node: source.name for node, source in sources.items() if isinstance(source, Constant)}
    made |= {node: graph.placeholder(node.name) for node in (*held, *constants)}
    device = graph.placeholder("device")

    def argument(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == flow.operations.device.type:
            return device
        return made[value] if isinstance(value, fx.Node) else value

    for index, layer in layers.items():
        for node, (tensor, dimension, times) in layer.sizes.items():
            if node not in made:
                size = graph.call_function(torch.ops.aten.sym_size.int, (made[tensor], dimension))
                made[node] = graph.call_function(operator.mul, (size, times)) if times != 1 else size
        begun = False
        for node in layer.nodes:
            if node in made:
                continue
            if draws_numbers(node) and not begun:
                begun = True
                graph.call_function(draws.begin, (index,))
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), argument)
            region = node.meta.get("region", Region())
            if region == Region():
                made[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            else:
                made[node] = graph.call_function(in_region, (node.target, *region, *args), kwargs)  # type: ignore[arg-type]
    graph.output(tuple(made[leaf] for leaf in leaves))
    function = type(fx.GraphModule({}, graph)).forward
    return Code(lambda *args: function(None, *args), tuple(held.values()), tuple(constants.values()))


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
