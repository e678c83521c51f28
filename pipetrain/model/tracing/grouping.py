"""Groups the operations of a traced model into layers, by the modules that they came from.

A module that is a block of a larger one (an element of a ModuleList or Sequential, without such containers
inside) is one layer. Operations between two modules, such as a residual sum, join one or the other so that
least is sent over a cut there. The result depends on the model alone, not on the number of stages; blocks in
which more values cross inside than at the ends, such as a residual block, stay whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

BULK = 1 / 3  # of all operations: a module with more wraps the model, and is divided further
BULK_IN_LIST = 2 / 3  # the same for an element of a list of modules


@dataclass(frozen=True, slots=True)
class Item:
    """An operation on data. `calls`: the module calls around it, outermost first, without the model itself.

    A call is the module's name, with `@1` appended for the second call. `uses`: the positions of the
    operations that use the result, one after the last for an output of the model; `nbytes`: of the result, 0
    if it does not depend on weights; `works`: whether it uses weights or multiplies matrices.
    """

    calls: tuple[str, ...]
    uses: tuple[int, ...]
    nbytes: int = 0
    works: bool = True

    @property
    def last_use(self) -> int:
        return max(self.uses, default=-1)


def group(
    items: Sequence[Item], elements: Collection[str], forbidden: Collection[int], root: str
) -> dict[str, int]:
    """Return the layers of a model in order: the position of the first operation, by name.

    `elements`: the names of modules in lists of modules; `forbidden`: positions before which it must not be
    cut; `root`: the model's class, as the name of operations outside all modules.
    """
    tree = _Tree(items, elements)
    cuts: list[int] = []
    for (_, end), (start, _) in pairwise(tree.atoms.values()):
        if between := [p for p in range(end, start + 1) if p not in forbidden]:
            cuts.append(min(between, key=lambda p: (*_sent(items, p, since=max(cuts, default=0)), -p)))
    cuts = _joined(items, [cut for cut in cuts if not tree.inside_a_block(cut)])
    starts: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for start, end in pairwise([0, *cuts, len(items)]):
        name = tree.name(start, end) or root
        counts[name] += 1
        starts[name if counts[name] == 1 else f"{name}#{counts[name]}"] = start
    return starts


def module_of(call: str) -> str:
    """Return the name of a call's module."""
    return call.partition("@")[0]


def _sent(items: Sequence[Item], cut: int, since: int = 0) -> tuple[int, int]:
    """Return the bytes that cross a cut, and the part of them made since an item."""
    crossing = [k for k in range(cut) if items[k].last_use >= cut]
    return sum(items[k].nbytes for k in crossing), sum(items[k].nbytes for k in crossing if k >= since)


class _Tree:
    """The calls of a model's modules. `atoms`: the calls that are not divided, with the calls around each.

    Each with its range of operations (end exclusive).
    """

    def __init__(self, items: Sequence[Item], elements: Collection[str]) -> None:
        self._items = items
        self._elements = elements
        paths = [element.split(".")[:-1] for element in elements]
        lists = {".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}
        self._count = Counter(call for item in items for call in item.calls)
        inner = {pair for item in items for pair in pairwise(item.calls)}
        self._inside = Counter(outer for outer, _ in inner)  # the calls directly inside each
        self._span: dict[str, tuple[int, int]] = {}
        for index, item in enumerate(items):
            for call in item.calls:
                self._span[call] = self._span.get(call, (index, 0))[0], index + 1
        divided = {call for call in self._count if module_of(call) in lists or self._is_bulk(call)}
        self.atoms: dict[tuple[str, ...], tuple[int, int]] = {}
        for index, item in enumerate(items):
            whole = [depth for depth, call in enumerate(item.calls) if call not in divided]
            if whole:
                calls = item.calls[: whole[0] + 1]
                start = self.atoms.get(calls, (index, 0))[0]
                # Including all between.
                self.atoms = {
                    calls_of_atom: span for calls_of_atom, span in self.atoms.items() if span[0] < start
                }
                self.atoms[calls] = start, index + 1

    def _is_bulk(self, call: str) -> bool:
        most = BULK_IN_LIST if module_of(call) in self._elements else BULK
        return self._inside[call] > 1 and self._count[call] > most * len(self._items)

    def inside_a_block(self, cut: int) -> bool:
        """Return whether a cut divides a module where more values cross than at its ends."""
        if not 0 < cut < len(self._items):
            return False
        around = [call for call in self._items[cut - 1].calls if call in self._items[cut].calls]
        return any(not self._is_bulk(call) and self._is_wide(call, cut) for call in around)

    def _is_wide(self, call: str, cut: int) -> bool:
        start, end = self._span[call]
        enter = leave = cross = 0
        for k, item in enumerate(self._items[:end]):
            if item.nbytes:
                inside = any(start <= use < end for use in item.uses)
                enter += k < start and inside
                leave += k >= start and item.last_use >= end
                later = any(cut <= use < end for use in item.uses)
                cross += k < cut and (later or (k >= start and item.last_use >= end))
        return cross > max(1, enter, leave)

    def name(self, start: int, end: int) -> str:
        """Return the outermost module around all working operations of a layer, if it is whole in the layer.

        Otherwise the first module that works; "" if there is none.
        """
        inside = [(calls, span) for calls, span in self.atoms.items() if start <= span[0] < end]
        busy = [calls for calls, span in inside if any(item.works for item in self._items[slice(*span)])]
        stacks = busy or [calls for calls, _ in inside]
        common = [level[0] for level in zip(*stacks, strict=False) if len(set(level)) == 1]
        whole = [c for c in common if start <= self._span[c][0] and self._span[c][1] <= end]
        return module_of((whole or [stack[-1] for stack in stacks] or [""])[0])


def _joined(items: Sequence[Item], cuts: list[int]) -> list[int]:
    """Join layers that hardly work with a neighbour, on the side where more would be sent."""
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
        sides = [cut for cut in idle[0] if cut in cuts]
        cuts.remove(max(sides, key=lambda cut: (_sent(items, cut)[0], -cut)))
