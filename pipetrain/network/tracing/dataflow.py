"""What each operation of a traced model depends on, and between which ones the model must not be cut.

Tensors that do not depend on the data (positions, causal masks, normalised weights) and sizes are made again
in each layer that uses them, so that all that travels between layers depends on the data. A tensor that is
written in place is made, written and finished on one stage; otherwise each stage would write its own copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipetrain.errors import ConfigError
from pipetrain.network.tensors import storage_of, strided
from pipetrain.network.tracing.reading import Constant, Held, Input, Operations, Region, place_of
from pipetrain.network.values import TensorSpec, differentiable

_ATEN = torch.ops.aten
SAMPLES = 3  # of a microbatch in the trace, which holds for any number
SIZES = (_ATEN.sym_size.int, _ATEN.sym_numel.default)
_WORK = {*flop_registry, _ATEN.linear, _ATEN.matmul, _ATEN.einsum, _ATEN.scaled_dot_product_attention}
_WORK |= {_ATEN.lstm, _ATEN.gru, _ATEN.rnn_tanh, _ATEN.rnn_relu, _ATEN.conv1d, _ATEN.conv2d, _ATEN.conv3d}
_NORMS = {_ATEN.batch_norm, _ATEN.layer_norm, _ATEN.group_norm, _ATEN.instance_norm, _ATEN.rms_norm}
# Operators that write statistics, which their schemas do not say, by the switch.
_STATISTICS = {_ATEN.batch_norm: "training", _ATEN.instance_norm: "use_input_stats"}


class Dataflow:
    """The dependences of a model's operations. `items`: those on data, in order, which layers divide.

    `free`: operations that depend on neither data nor chance; `sizes`: those that compute numbers from sizes;
    `trained`: those whose result can have a gradient for a weight.
    """

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        *nodes, self._output = operations.graph.nodes
        self.order = {node: number for number, node in enumerate(operations.graph.nodes)}
        self._members: dict[int, list[fx.Node]] = {}
        for node in nodes:
            for storage in _storages(node):
                self._members.setdefault(storage, []).append(node)
        self._writers: dict[int, list[fx.Node]] = {}
        for node in nodes:
            for storage in {storage for written in _written(node) for storage in _storages(written)}:
                self._writers.setdefault(storage, []).append(node)
        self.written = self._written_buffers()
        calls = [node for node in nodes if node.op == "call_function"]
        self.sizes = _sizes(calls)
        self.free = self._independent({n for n in calls if n not in self.sizes and not draws(n)})
        self.items = [node for node in calls if node not in self.free and node not in self.sizes]
        self.position = {node: index for index, node in enumerate(self.items)}
        self.position[self._output] = len(self.items)
        self.trained = _trained(nodes)

    def _written_buffers(self) -> set[str]:
        """Return the names of the buffers that are written. Raises ConfigError for other tensors."""
        names = set()
        for storage, writers in self._writers.items():
            for source in (node.meta.get("source") for node in self._members[storage]):
                if isinstance(source, Constant) or (isinstance(source, Held) and source.is_parameter):
                    raise ConfigError(
                        f"the model writes {source.name} in place at {place_of(writers[0])}, which each "
                        f"stage would do to a copy of its own: register it as a buffer, and let the "
                        f"optimizer change parameters"
                    )
                if isinstance(source, Held):
                    names.add(source.name)
        return names

    def _independent(self, free: set[fx.Node]) -> set[fx.Node]:
        """Return those of some operations that depend on no data, nor on what is written before its end."""
        written = []
        for storage, writers in self._writers.items():
            held = {*self._members[storage], *writers}
            users = {user for node in held for user in node.users} - held
            last = self.order[writers[-1]]
            early = any(self.order[user] < last for user in users)
            written.append((held, users, early or any(node.op == "placeholder" for node in held)))
        while True:
            wrong = {
                node
                for node in free
                if any(
                    isinstance(given.meta.get("source"), Input)
                    or (given.op != "placeholder" and given not in free and given not in self.sizes)
                    for given in node.all_input_nodes
                )
            }
            for held, users, never in written:
                if never or not free.issuperset(held):
                    wrong |= free & (held | users)
            if not wrong:
                return free
            free -= wrong

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """Return the operations that write in place what an operation returns."""
        return [writer for storage in _storages(node) for writer in self._writers.get(storage, ())]

    def uses(self, node: fx.Node) -> list[int]:
        """Return the positions of the items that use a value; the end for an output of the model."""
        return [self.position[user] for user in node.users if user in self.position]

    def uses_of(self, buffer: str) -> list[int]:
        """Return the positions of the items that use a buffer, or what is computed of it alone."""
        todo = [node for node in self.order if getattr(node.meta.get("source"), "name", "") == buffer]
        for node in todo:  # grows
            todo += [user for user in node.users if user in self.free and user not in todo]
        return [position for node in todo for position in self.uses(node)]

    def works(self, node: fx.Node) -> bool:
        """Return whether an operation uses a weight, other than to normalise, or multiplies matrices."""
        packet = getattr(node.target, "overloadpacket", None)
        if packet in _WORK or packet in _NORMS:
            return packet in _WORK
        return any(given in self.trained and given not in self.position for given in node.all_input_nodes)

    def nbytes(self, node: fx.Node) -> int:
        """Return the bytes of a value for a few samples; 0 if it does not depend on weights."""
        leaves = tree_leaves(node.meta["val"]) if node in self.trained else ()
        return sum(spec_of(leaf, SAMPLES).nbytes for leaf in leaves if isinstance(leaf, Tensor))

    def forbidden(self) -> dict[int, str]:
        """Return the positions before which the model must not be cut -> the reason."""
        return {
            position: reason
            for first, last, reason in (*self._unsendable(), *self._unfinished())
            for position in range(first + 1, last + 1)
        }

    def _unsendable(self) -> Iterator[tuple[int, int, str]]:
        for node in self.items:
            if reason := _reason_not_to_send(node.meta["val"]):
                last = max(self.uses(node), default=-1)
                at = place_of(node) and f" at {place_of(node)}"
                yield self.position[node], min(last, len(self.items) - 1), f"{reason} ({node.target}{at})"

    def _unfinished(self) -> Iterator[tuple[int, int, str]]:
        """Yield where something that is written in place begins and ends."""
        for storage, writers in self._writers.items():
            if self.free.issuperset(writers):
                continue
            members = self._members[storage]
            sources = [node.meta["source"] for node in members if node.op == "placeholder"]
            first = [self.position[node] for node in (*members, *writers) if node in self.position]
            last = [self.position[node] for node in writers]
            if any(isinstance(source, Held) for source in sources):  # the next forward reads it
                users = [use for node in members for use in self.uses(node)]
                first, last = [*first, *users], [*first, *users]
            if any(isinstance(source, Input) for source in sources):
                first.append(0)
            by = writers[-1]
            at = place_of(by) and f" at {place_of(by)}"
            end = min(max(last), len(self.items) - 1)
            yield min(first), end, f"{by.target}{at} writes in place a tensor that was made before"


def spec_of(value: Tensor, samples: int) -> TensorSpec:
    """Return what a value of the trace is for a number of samples."""
    shape: list[Any] = list(value.shape)
    for dimension, size in enumerate(shape):
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            shape[dimension] = int(expression.subs(dict.fromkeys(expression.free_symbols, samples)))
    return TensorSpec(tuple(shape), value.dtype)


def draws(node: fx.Node) -> bool:
    """Return whether an operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = _arguments(node)
    return not any(given.get(name, 1) in (0, False) for name in _CHANCES)


_CHANCES = ("p", "dropout_p", "dropout", "train", "training")


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operation by their names in its schema."""
    schema: Any = getattr(node.target, "_schema", None)
    parameters = schema.arguments if schema else ()
    defaults = {p.name: p.default_value for p in parameters if p.has_default_value()}
    return defaults | dict(zip((p.name for p in parameters), node.args, strict=False)) | node.kwargs


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the values that an operation writes in place."""
    given, target = _arguments(node), getattr(node.target, "overloadpacket", None)
    if target in _STATISTICS:
        names = ["running_mean", "running_var"] if given[_STATISTICS[target]] else []
    else:
        schema: Any = getattr(node.target, "_schema", None)
        parameters = schema.arguments if schema else ()
        names = [p.name for p in parameters if p.alias_info and p.alias_info.is_write]
    return [leaf for leaf in tree_leaves([given.get(name) for name in names]) if isinstance(leaf, fx.Node)]


def _storages(node: fx.Node) -> set[int]:
    """Return what stands for the memory of a value, of tensors without data, in the trace."""
    copies = node.users and all(user.target is _ATEN.lift_fresh_copy.default for user in node.users)
    if node.op == "placeholder" and copies:  # to which the trace gives the same memory
        return set()
    return {storage_of(tensor) for tensor in strided(node.meta.get("val"))}


def _sizes(calls: list[fx.Node]) -> set[fx.Node]:
    """Return the operations that compute numbers from the sizes of tensors."""
    found: set[fx.Node] = set()
    for node in calls:
        value = node.meta.get("val")
        number = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
        of_sizes = bool(node.all_input_nodes) and found.issuperset(node.all_input_nodes)
        if number and (node.target in SIZES or of_sizes) and not free_unbacked_symbols(value):
            found.add(node)
    return found


def _trained(nodes: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in nodes:
        source, region = node.meta.get("source"), node.meta.get("region", Region())
        values = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
        passes = node.target not in (_ATEN.detach.default, *SIZES) and region.grad is not False
        from_weights = passes and any(given in found for given in node.all_input_nodes)
        if (isinstance(source, Held) and source.trained) or (
            from_weights and any(map(differentiable, values))
        ):
            found.add(node)
    return found


def _reason_not_to_send(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "only tensors can be sent between stages"
    if value.layout is not torch.strided or value.is_complex():
        return "a sparse or complex tensor cannot be sent"
    if free_unbacked_symbols(value):
        return "a tensor whose size depends on the data cannot be sent"
    return ""
