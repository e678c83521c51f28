"""What each operation of a traced model depends on, and between which ones the model must not be cut.

Tensors that do not depend on the data (positions, causal masks, normalised weights) and sizes are made again
in each layer that uses them, so that all that travels between layers depends on the data. A tensor that is
written in place is made, written and finished on one stage; otherwise each stage would write its own copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipetrain.network.tracing.aliasing import argument, refuse_writes, storages, writers_of
from pipetrain.network.tracing.operations import BOTH, Held, Input, Listing, Op, ops_in

_ATEN = torch.ops.aten
SIZES = (_ATEN.sym_size.int, _ATEN.sym_numel.default)
_WORK = {*flop_registry, _ATEN.linear, _ATEN.matmul, _ATEN.einsum, _ATEN.scaled_dot_product_attention}
_WORK |= {_ATEN.lstm, _ATEN.gru, _ATEN.rnn_tanh, _ATEN.rnn_relu, _ATEN.conv1d, _ATEN.conv2d, _ATEN.conv3d}
_NORMS = {_ATEN.batch_norm, _ATEN.layer_norm, _ATEN.group_norm, _ATEN.instance_norm, _ATEN.rms_norm}


@dataclass(frozen=True, slots=True)
class Barrier:
    """No cut may be between operations `first` (exclusive) and `last` (inclusive), as positions of items."""

    first: int
    last: int
    reason: str


class Dataflow:
    """The dependences of a listing; `items`: the operations on data, in order, which layers divide."""

    def __init__(self, listing: Listing) -> None:
        self.outputs = listing.outputs
        ops = listing.ops
        self._storage = storages(ops)
        self._writers = writers_of(ops, self._storage)
        refuse_writes(self._writers, self._storage)
        self.random = {op for op in ops if any(draws(op, mode) for mode in op.modes)}
        self.ops = self._needed(ops)
        self.sizes = _sizes(self.ops)
        self.free = self._independent()
        self.items = [op for op in self.ops if op not in self.free and op not in self.sizes and not op.source]
        self.position = {op: index for index, op in enumerate(self.items)}
        self.users: dict[Op, list[Op]] = {op: [] for op in self.ops}
        for op in self.ops:
            for given in dict.fromkeys(op.given()):
                self.users[given].append(op)
        self.trained = self._trained()

    def _needed(self, ops: Sequence[Op]) -> list[Op]:
        """Leave out what has no effect."""
        members: dict[int, list[Op]] = {}
        for op, root in self._storage.items():
            members.setdefault(root, []).append(op)
        todo = [*ops_in(self.outputs), *(op for op in ops if op in self.random)]
        lasting = (
            root for root, held in members.items() if root in self._writers and any(op.source for op in held)
        )
        todo += [writer for root in lasting for writer in self._writers[root]]
        kept: set[Op] = set()
        while todo:
            op = todo.pop()
            if op not in kept:
                kept.add(op)
                todo += op.given()
                todo += self._writers.get(self._storage[op], ())
        self._writers = {
            root: [op for op in writers if op in kept] for root, writers in self._writers.items()
        }
        self._writers = {root: writers for root, writers in self._writers.items() if writers}
        return [op for op in ops if op in kept]

    def _independent(self) -> set[Op]:
        """Return the operations that do not depend on the data, nor on chance or on what is written."""
        free = {op for op in self.ops if op not in self.random and op not in self.sizes}
        free -= {op for op in self.ops if isinstance(op.source, Input)}
        sharing: dict[int, tuple[list[Op], list[Op]]] = {root: ([], []) for root in self._writers}
        for op in self.ops:  # who shares the memory that is written, and who uses it
            for number, some in enumerate(([op], op.given())):
                for root in dict.fromkeys(self._storage[each] for each in some):
                    if root in sharing:
                        sharing[root][number].append(op)
        while True:
            wrong = {op for op in free if any(g not in free and g not in self.sizes for g in op.given())}
            for root, writers in self._writers.items():
                held, users = sharing[root]
                last = writers[-1].index
                alone = all(op in free and not op.source for op in (*held, *writers))
                early = (op for op in users if self._storage[op] != root and op not in writers)
                if not alone or any(op.index < last for op in early):
                    wrong |= free.intersection(op for op in (*held, *writers) if not op.source)
                    wrong |= free.intersection(op for op in users)
            if not wrong:
                return free
            free -= wrong

    def _trained(self) -> set[Op]:
        """Return the operations whose result can have a gradient for a weight."""
        found: set[Op] = set()
        for op in self.ops:
            value = op.value
            if isinstance(op.source, Held) or op.source is None:
                own = isinstance(op.source, Held) and isinstance(value, Tensor) and value.requires_grad
                passes = op.target not in (_ATEN.detach.default, *SIZES)
                if own or (passes and any(g in found for g in op.given()) and _differentiable(value)):
                    found.add(op)
        return found

    def writers(self, op: Op) -> list[Op]:
        """Return the operations that write in place what an operation returns."""
        return self._writers.get(self._storage[op], [])

    def works(self, op: Op) -> bool:
        """Return whether an operation uses a weight, other than to normalise, or multiplies matrices."""
        packet = getattr(op.target, "overloadpacket", None)
        if packet in _WORK or packet in _NORMS:
            return packet in _WORK
        todo, seen = [*op.given()], set()
        while todo:
            given = todo.pop()
            if given in self.free and given not in seen:
                seen.add(given)
                if given in self.trained and given.source:
                    return True
                todo += given.given()
        return False

    def last_use(self, op: Op) -> int:
        """Return the position of the last item that uses a tensor; the end for an output of the model."""
        if any(op is output for output in ops_in(self.outputs)):
            return len(self.items)
        uses = [self.position[user] for user in self.users[op] if user in self.position]
        return max(uses, default=-1)

    def barriers(self) -> Iterator[Barrier]:
        """Return between which items the model must not be cut, with the reason."""
        for op in self.items:
            if reason := _unsendable(op):
                last = min(self.last_use(op), len(self.items) - 1)
                yield Barrier(
                    self.position[op], last, f"{reason} ({op.target}{op.where and f' at {op.where}'})"
                )
        for root, writers in self._writers.items():
            if all(op in self.free for op in writers):
                continue
            held = [op for op in self.ops if self._storage[op] == root]
            lasting = any(isinstance(op.source, Held) for op in held)
            where = [self.position[op] for op in (*held, *writers) if op in self.position]
            if lasting:
                where += [self.position[u] for op in held for u in self.users[op] if u in self.position]
            if any(isinstance(op.source, Input) for op in held):
                where.append(0)
            last = max(where) if lasting else max(self.position[op] for op in writers)
            by = writers[-1]
            where_by = f" at {by.where}" if by.where else ""
            yield Barrier(
                min(where), last, f"{by.target}{where_by} writes in place a tensor that was made before"
            )


def draws(op: Op, training: bool) -> bool:
    """Return whether an operation draws random numbers in a mode."""
    if torch.Tag.nondeterministic_seeded not in getattr(op.target, "tags", ()):
        return False
    chances = [argument(op, name, training) for name in ("p", "dropout_p", "dropout")]
    switches = [argument(op, name, training) for name in ("train", "training")]
    if any(chance is not None and not isinstance(chance, Op) and not chance for chance in chances):
        return False
    return not any(switch is False for switch in switches)


def _sizes(ops: Sequence[Op]) -> set[Op]:
    """Return the operations that compute whole numbers from the sizes of tensors."""
    found: set[Op] = set()
    for op in ops:
        if (
            isinstance(op.value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
            and not op.source
        ):
            given = list(op.given())
            if not free_unbacked_symbols(op.value) and (
                op.target in SIZES or (given and all(other in found for other in given))
            ):
                found.add(op)
    return found


def _differentiable(value: Any) -> bool:
    return any(
        isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) for t in tree_leaves(value)
    )


def _unsendable(op: Op) -> str:
    """Return why the result of an operation cannot be sent to another stage, or ""."""
    value = op.value
    if not isinstance(value, Tensor):
        return "only tensors can be sent between stages"
    if value.layout is not torch.strided or value.is_complex():
        return "a sparse or complex tensor cannot be sent"
    if free_unbacked_symbols(value):
        return "a tensor whose size depends on the data cannot be sent"
    if op.modes != BOTH:
        return "a tensor that only one of training and evaluation makes cannot be sent"
    return ""
