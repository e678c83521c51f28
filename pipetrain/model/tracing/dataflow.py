"""What each operation of a traced model depends on, and where the model must not be cut.

Tensors that do not depend on the data (positions, causal masks, normalised weights) are computed again in
each layer that uses them, and sizes are computed from those of the inputs; so only values that depend on
the data are sent. A tensor that is written in place is made, written and finished on one stage; otherwise
each stage would write its own copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipetrain.errors import ConfigError
from pipetrain.model.specs import TensorSpec, differentiable
from pipetrain.model.tracing.export import SAMPLES
from pipetrain.model.tracing.operations import Constant, Input, ModelTensor, Operations, Region, place_of
from pipetrain.model.trial_tensors import made_up, storage_of, strided

_ATEN = torch.ops.aten
_WORK = {*flop_registry, _ATEN.linear, _ATEN.matmul, _ATEN.einsum, _ATEN.scaled_dot_product_attention}
_WORK |= {_ATEN.lstm, _ATEN.gru, _ATEN.rnn_tanh, _ATEN.rnn_relu, _ATEN.conv1d, _ATEN.conv2d, _ATEN.conv3d}
_NORMS = {_ATEN.batch_norm, _ATEN.layer_norm, _ATEN.group_norm, _ATEN.instance_norm, _ATEN.rms_norm}
# Operators that write statistics, which is not in their schemas, with the argument that switches it on.
_STATISTICS = {_ATEN.batch_norm: "training", _ATEN.instance_norm: "use_input_stats"}
_CHANCES = ("p", "dropout_p", "dropout", "train", "training")  # 0 or False: draws nothing
_LOSSES = {_ATEN.cross_entropy_loss, _ATEN.nll_loss, _ATEN.nll_loss2d, _ATEN.nll_loss_nd}


class Dataflow:
    """The dependences of a model's operations. `items`: the operations to divide into layers, in order.

    `free`: other operations, which depend on neither data nor random numbers and write nothing in place;
    `trained`: those whose result can have a gradient for a weight; `written`: names of buffers that are
    written.
    """

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        *nodes, output = operations.graph.nodes
        self.order = {node: number for number, node in enumerate(operations.graph.nodes)}
        self._members: dict[int, list[fx.Node]] = defaultdict(list)  # of each storage
        self._writers: dict[int, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            for storage in _storages(node):
                self._members[storage].append(node)
        for node in nodes:
            for storage in {storage for written in _written(node) for storage in _storages(written)}:
                self._writers[storage].append(node)
        self.written = self._written_buffers()
        changing = {
            node for key, writers in self._writers.items() for node in (*writers, *self._members[key])
        }
        self.items: list[fx.Node] = []
        self.free: set[fx.Node] = set()
        for node in nodes:
            if node.op == "call_function" and not is_size(node):
                inputs = [source for source in node.all_input_nodes if not is_size(source)]
                free = all(
                    source in self.free or isinstance(source.meta.get("source"), ModelTensor | Constant)
                    for source in inputs
                )
                if free and not is_random(node) and changing.isdisjoint((node, *inputs)):
                    self.free.add(node)
                else:
                    self.items.append(node)
        self.position = {node: index for index, node in enumerate([*self.items, output])}
        self.trained = _trained(nodes)

    def _written_buffers(self) -> set[str]:
        """Return the names of the buffers that are written. Raises ConfigError for other tensors."""
        names = set()
        for storage, writers in self._writers.items():
            for source in (node.meta.get("source") for node in self._members[storage]):
                if isinstance(source, Constant) or (isinstance(source, ModelTensor) and source.is_parameter):
                    raise ConfigError(
                        f"the model writes {source.name} in place at {place_of(writers[0])}, which each "
                        f"stage would do to a copy of its own: register it as a buffer, and let the "
                        f"optimizer change parameters"
                    )
                if isinstance(source, ModelTensor):
                    names.add(source.name)
        return names

    def uses(self, node: fx.Node) -> list[int]:
        """Return the positions of the items that use a value; for an output of the model, the end."""
        return [self.position[user] for user in node.users if user in self.position]

    def uses_of(self, buffer: str) -> list[int]:
        """Return the positions of the items that use a buffer, or a value computed from it alone."""
        todo = [node for node in self.order if getattr(node.meta.get("source"), "name", "") == buffer]
        for node in todo:  # grows
            todo += [user for user in node.users if user in self.free and user not in todo]
        return [position for node in todo for position in self.uses(node)]

    def works(self, node: fx.Node) -> bool:
        """Return whether an operation uses a weight, except to normalise, or multiplies matrices."""
        packet = getattr(node.target, "overloadpacket", None)
        if packet in _WORK or packet in _NORMS:
            return packet in _WORK
        return any(source in self.trained and source not in self.position for source in node.all_input_nodes)

    def nbytes(self, node: fx.Node) -> int:
        """Return the bytes of a value for a few samples; 0 if it does not depend on weights."""
        leaves = tree_leaves(node.meta["val"]) if node in self.trained else ()
        return sum(spec_of(leaf).nbytes for leaf in leaves if isinstance(leaf, Tensor))

    def forbidden(self) -> set[int]:
        """Return the positions before which the model must not be cut."""
        ranges = (*self._unsendable(), *self._unfinished())
        return {position for first, last in ranges for position in range(first + 1, last + 1)}

    def labels(self, number: int, ignored: int) -> tuple[int, bool]:
        """Return the label that the first cross-entropy ignores, and whether it skips first labels."""
        for node in self.order:
            if getattr(node.target, "overloadpacket", None) in _LOSSES:
                ignored = int(_arguments(node)["ignore_index"])
                break
        (node,) = (candidate for candidate in self.order if candidate.meta.get("source") == Input(number))
        labels = made_up(spec_of(node.meta["val"]))
        if labels.is_floating_point() or labels.dim() < 2 or labels.shape[1] < 2:
            return ignored, False
        expected, same = self._made_of(node, labels.clone()), list[bool]()
        for label in (1, ignored):
            labels[:, 0] = label
            same += map(torch.equal, expected, self._made_of(node, labels.clone()))
        return ignored, all(same)

    @torch.no_grad()
    def _made_of(self, entering: fx.Node, tensor: Tensor) -> list[Tensor]:
        """Return the values that operations on one input alone pass to others."""
        computed: dict[fx.Node, Any] = {entering: tensor}
        for node in self.order:
            if isinstance(source := node.meta.get("source"), Constant):
                computed[node] = source.tensor.clone()
            elif is_size(node):
                computed[node] = _in_trace(node.meta["val"])
            elif (
                node.op == "call_function"
                and not is_random(node)
                and computed.keys() >= {*node.all_input_nodes}
            ):
                args: Any
                args, kwargs = fx.node.map_aggregate(
                    (node.args, node.kwargs), lambda v: computed[v] if isinstance(v, fx.Node) else v
                )
                computed[node] = node.target(*args, **kwargs)
        last = (node for node in computed if not computed.keys() >= {*node.users})
        return [computed[node] for node in last if isinstance(computed[node], Tensor)]

    def _unsendable(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of values that cannot be sent: not dense, complex, or of a data-dependent size."""
        for node in self.items:
            value = node.meta["val"]
            dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_complex()
            if not dense or free_unbacked_symbols(value):
                yield self.position[node], min(max(self.uses(node), default=-1), len(self.items) - 1)

    def _unfinished(self) -> Iterator[tuple[int, int]]:
        """Yield the range from the first to the last operation on each tensor that is written in place."""
        for storage, writers in self._writers.items():
            members = self._members[storage]
            sources = [node.meta["source"] for node in members if node.op == "placeholder"]
            inside = [self.position[node] for node in (*members, *writers) if node in self.position]
            if any(isinstance(source, ModelTensor) for source in sources):  # the next forward reads it
                inside += [use for node in members for use in self.uses(node)]
                last = max(inside)
            else:
                last = max(self.position[node] for node in writers)
            first = 0 if any(isinstance(source, Input) for source in sources) else min(inside)
            yield first, min(last, len(self.items) - 1)


def is_size(node: fx.Node) -> bool:
    """Return whether a value is a number that depends on the size of the batch only."""
    value = node.meta.get("val")
    number = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
    return node.op == "call_function" and number and not free_unbacked_symbols(value)


def spec_of(value: Tensor) -> TensorSpec:
    """Return the spec of a value as it was in the trace."""
    return TensorSpec(tuple(map(_in_trace, value.shape)), value.dtype)


def _in_trace(value: Any) -> Any:
    """Return a size, or a number computed from sizes, as it was in the trace; of data any."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value
    if not free_unbacked_symbols(value):
        return value.node.hint
    expression = value.node.expr
    return value.node.pytype(expression.subs(dict.fromkeys(expression.free_symbols, SAMPLES)))


def is_random(node: fx.Node) -> bool:
    """Return whether an operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = _arguments(node)
    return not any(arguments.get(name, 1) in (0, False) for name in _CHANCES)


def _parameters(node: fx.Node) -> Sequence[Any]:
    schema: Any = getattr(node.target, "_schema", None)
    return schema.arguments if schema else ()


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operation by their names in its schema."""
    parameters = _parameters(node)
    defaults = {p.name: p.default_value for p in parameters if p.has_default_value()}
    return defaults | dict(zip((p.name for p in parameters), node.args, strict=False)) | node.kwargs


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the values that an operation writes in place."""
    arguments, target = _arguments(node), getattr(node.target, "overloadpacket", None)
    if target in _STATISTICS:
        names = ["running_mean", "running_var"] if arguments[_STATISTICS[target]] else []
    else:
        names = [p.name for p in _parameters(node) if p.alias_info and p.alias_info.is_write]
    return [
        leaf for leaf in tree_leaves([arguments.get(name) for name in names]) if isinstance(leaf, fx.Node)
    ]


def _storages(node: fx.Node) -> set[int]:
    """Return the storages of a value, whose tensors have no data in the trace."""
    copies = node.users and all(user.target is _ATEN.lift_fresh_copy.default for user in node.users)
    if node.op == "placeholder" and copies:  # the trace gives the copies the same memory
        return set()
    return {storage_of(tensor) for tensor in strided(node.meta.get("val"))}


def _trained(nodes: list[fx.Node]) -> set[fx.Node]:
    trained: set[fx.Node] = set()
    for node in nodes:
        source, region = node.meta.get("source"), node.meta.get("region", Region())
        values = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
        passes = node.target is not _ATEN.detach.default and region.grad is not False
        from_weights = passes and any(input_node in trained for input_node in node.all_input_nodes)
        if (isinstance(source, ModelTensor) and source.trained) or (
            from_weights and any(map(differentiable, values))
        ):
            trained.add(node)
    return trained
