"""Groups the operations of a traced model into layers, by the modules that they came from.

A module that is a block of a larger one (an element of a ModuleList or Sequential, without such containers
inside) is one layer. The operations that stand between two modules, such as a residual sum, join the one or
the other so that least is sent over a cut there. The result depends on the model alone, not on the number of
stages; blocks in which more travels inside than at the ends, such as a residual block, stay whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pipetrain.network.tracing.operations import Call

BULK = 1 / 3  # of all operations: a module that holds more wraps the model, and is divided further
BULK_IN_LIST = 2 / 3  # if it is an element of a list of modules


@dataclass(frozen=True, slots=True)
class Item:
    """An operation on data. `calls`: the module calls it is in, outermost first, without the model itself.

    `uses`: the positions of the operations that use its result, one behind the last for an output of the
    model; `nbytes`: of the result, 0 if it does not depend on weights; `works`: whether it uses weights or
    multiplies matrices.
    """

    calls: tuple[Call, ...]
    uses: tuple[int, ...]
    nbytes: int = 0
    works: bool = True

    @property
    def last_use(self) -> int:
        return max(self.uses, default=-1)


@dataclass(frozen=True, slots=True)
class Group:
    """Operations `start` to `end` (exclusive), as one layer. `joins`: why modules in it stay together."""

    name: str
    start: int
    end: int
    joins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Modules:
    """What the grouping knows of the module tree. `lists`: names of modules with a list of modules inside.

    `elements`: names of the elements of such lists; `root`: the class of the model, as a name.
    """

    lists: Collection[str]
    elements: Collection[str]
    root: str = "model"


def group(items: Sequence[Item], modules: Modules, forbidden: Mapping[int, str]) -> list[Group]:
    """Return the layers of a model. `forbidden`: positions before which it must not be cut -> the reason."""
    tree = _Tree(items, modules)
    cuts: list[int] = []
    joins: dict[int, str] = {}
    for before, behind in pairwise(tree.atoms):
        between = [p for p in range(before.end, behind.start + 1) if p not in forbidden]
        if between:
            start = cuts[-1] if cuts else 0
            cuts.append(min(between, key=lambda p: (*_sent(items, start, p), -p)))
        else:
            names = f"{before.calls[-1].path} and {behind.calls[-1].path}"
            joins[before.start] = f"{names} stay together because {forbidden[before.end]}"
    cuts = [cut for cut in cuts if not tree.inside_a_block(cut)]
    cuts = _joined(items, cuts)
    ends = [0, *cuts, len(items)]
    groups = _named(list(pairwise(ends)), items, tree, modules.root)
    return [
        replace(g, joins=tuple(why for at, why in sorted(joins.items()) if g.start <= at < g.end))
        for g in groups
    ]


def _sent(items: Sequence[Item], start: int, cut: int) -> tuple[int, int]:
    """Return the bytes that cross a cut, and those of them that were made since `start`."""
    crossing = [k for k in range(cut) if items[k].last_use >= cut]
    return sum(items[k].nbytes for k in crossing), sum(items[k].nbytes for k in crossing if k >= start)


@dataclass(slots=True)
class _Atom:
    """A call that is not divided, with its operations `start` to `end` (exclusive)."""

    calls: tuple[Call, ...]
    start: int
    end: int


class _Tree:
    def __init__(self, items: Sequence[Item], modules: Modules) -> None:
        self._items = items
        self._modules = modules
        self._count = Counter(call.key for item in items for call in item.calls)
        self._inner: dict[str, set[str]] = {}  # the calls directly inside a call
        for item in items:
            for outer, inner in pairwise(item.calls):
                self._inner.setdefault(outer.key, set()).add(inner.key)
        self._span: dict[str, tuple[int, int]] = {}
        for index, item in enumerate(items):
            for call in item.calls:
                self._span[call.key] = self._span.get(call.key, (index, 0))[0], index + 1
        self.atoms: list[_Atom] = []
        for index, item in enumerate(items):
            calls = self._atom(item)
            if calls is None:
                continue
            known = next((k for k, atom in enumerate(self.atoms) if atom.calls == calls), None)
            if known is None:
                self.atoms.append(_Atom(calls, index, index + 1))
            else:  # with all that came between
                self.atoms[known].end = index + 1
                del self.atoms[known + 1 :]

    def _atom(self, item: Item) -> tuple[Call, ...] | None:
        """Return the call of an item that is not divided, with those around it; None if it is in no such."""
        for depth, call in enumerate(item.calls):
            if not self._is_divided(call):
                return item.calls[: depth + 1]
        return None

    def _is_divided(self, call: Call) -> bool:
        return call.path in self._modules.lists or self._is_bulk(call)

    def _is_bulk(self, call: Call) -> bool:
        most = BULK_IN_LIST if call.path in self._modules.elements else BULK
        wraps = len(self._inner.get(call.key, ())) > 1
        return wraps and self._count[call.key] > most * len(self._items)

    def filled(self, calls: tuple[Call, ...], start: int, end: int) -> tuple[Call, ...]:
        """Return the outermost of some calls that lies in operations `start` to `end`; none, if none does."""
        for depth, call in enumerate(calls):
            first, last = self._span[call.key]
            if start <= first and last <= end:
                return calls[: depth + 1]
        return ()

    def inside_a_block(self, cut: int) -> bool:
        """Return whether a cut divides a module at a place where more values cross than at its ends."""
        if not 0 < cut < len(self._items):
            return False
        around = [call for call in self._items[cut - 1].calls if call in self._items[cut].calls]
        return any(not self._is_bulk(call) and self._is_wide(call, cut) for call in around)

    def _is_wide(self, call: Call, cut: int) -> bool:
        start, end = self._span[call.key]
        enter = leave = cross = 0
        for k, item in enumerate(self._items[:end]):
            if item.nbytes:
                inside = any(start <= use < end for use in item.uses)
                enter += k < start and inside
                leave += k >= start and item.last_use >= end
                later = any(cut <= use < end for use in item.uses)
                cross += k < cut and (later or (k >= start and item.last_use >= end))
        return cross > max(1, enter, leave)


def _joined(items: Sequence[Item], cuts: list[int]) -> list[int]:
    """Join layers that hardly work with a neighbour, where more would be sent between both."""
    cuts = list(cuts)
    while True:
        ends = [0, *cuts, len(items)]
        idle = [
            (start, end)
            for start, end in pairwise(ends)
            if not any(item.works for item in items[start:end])
            or not any(item.last_use >= end for item in items[start:end])
        ]
        if not idle or not cuts:
            return cuts
        start, end = idle[0]
        sides = [cut for cut in (start, end) if cut in cuts]
        cuts.remove(max(sides, key=lambda cut: (_sent(items, 0, cut)[0], -cut)))


def _named(ranges: Sequence[tuple[int, int]], items: Sequence[Item], tree: _Tree, root: str) -> list[Group]:
    groups: list[Group] = []
    taken: Counter[str] = Counter()
    for start, end in ranges:
        inside = [atom for atom in tree.atoms if start <= atom.start < end]
        working = [a for a in inside if any(item.works for item in items[a.start : a.end])] or inside
        around = tree.filled(_common([atom.calls for atom in working]), start, end)
        name = next((calls[-1].path for calls in [around, *(a.calls for a in working)] if calls), root)
        taken[name] += 1
        groups.append(Group(name if taken[name] == 1 else f"{name}#{taken[name]}", start, end))
    return groups


def _common(stacks: Sequence[tuple[Call, ...]]) -> tuple[Call, ...]:
    """Return the calls that are around all of some calls."""
    depth = 0
    for level in zip(*stacks, strict=False):
        if len(set(level)) > 1:
            break
        depth += 1
    return stacks[0][:depth] if stacks else ()
