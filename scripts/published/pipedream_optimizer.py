"""The plans that the optimizer of PipeDream's authors gives, written anew from their formulas.

As their repository's optimizer_graph_hierarchical.py does (msr-fiddle/pipedream, commit 7db6a1c), which is
not the paper's formula: on m machines a stage takes (work + 4 (m - 1) / m * weights / bandwidth) / m, so its
all-reduce adds to its work, where the paper takes the longer. A message counts its activations and their
gradients, over as many links as the later stage has machines, or nothing, which is the command's default. A
level of machines is planned after the one within it, as if each machine of the level were one fast rank.

Many plans are equally fast, and which of them theirs prints depends on the order of a Python set. So here it
gives each of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from csv import DictReader
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from published.measures import PROFILES

Array = NDArray[np.float64]
Counts = tuple[int, ...]
NEAR = 1e-12  # of sums in another order


class Level(NamedTuple):
    """Machines of a level, and the bytes per second of the links between them."""

    machines: int
    bandwidth: float


@dataclass(frozen=True)
class States:
    """The sets of nodes after which a model may be cut, ascending, each with all that its nodes need.

    `work_s`, `weights`: sums over a set, in s and bytes; `leaves`: bytes that leave it; `before[k, j]`:
    whether set k is a part of set j. `longest_s`: of a node, below which no stage of one rank can be.
    """

    work_s: Array
    weights: Array
    leaves: Array
    before: NDArray[np.bool_]
    longest_s: float

    @classmethod
    def read(cls, model: str, scale: float = 1.0) -> States:
        """Read a profile, for `scale` times its samples; without the data, and outputs that nothing takes."""
        with (PROFILES / f"{model}.csv").open(newline="") as file:
            rows = {row["node"]: row for row in DictReader(file)}
        rows = {node: row for node, row in rows.items() if not row["operator"].startswith("Input")}
        taken = {source for row in rows.values() for source in row["inputs"].split()}
        rows = {
            n: row for n, row in rows.items() if n in taken or not row["operator"].startswith("__getitem__")
        }
        nodes = {node: number for number, node in enumerate(rows)}
        edges = [(nodes[s], nodes[n]) for n, row in rows.items() for s in row["inputs"].split() if s in nodes]
        needs = [1 << number for number in range(len(rows))]  # sets are the bits of a number
        for source, target in edges:  # a row takes only rows above it
            needs[target] |= needs[source]

        found, new = {1}, [1]
        while new:
            known = new.pop()
            for source, target in edges:
                longer = known | needs[target]
                if known >> source & 1 and longer not in found:
                    found.add(longer)
                    new.append(longer)
        sets = sorted(found, key=int.bit_count)
        inside = np.array([[known >> n & 1 for n in range(len(rows))] for known in sets], dtype=float)

        def column(*names: str) -> Array:
            return np.array([sum(float(row[name]) for name in names) for row in rows.values()])

        work_s, sent = (scale * column("forward_ms", "backward_ms") / 1e3, scale * column("activation_bytes"))
        return cls(
            work_s=inside @ work_s,
            weights=inside @ column("parameter_bytes"),
            leaves=np.array([sum(sent[n] for n in _last(known, needs, edges)) for known in sets]),
            before=(inside @ inside.T == inside.sum(1)[:, None]) & ~np.eye(len(sets), dtype=bool),
            longest_s=float(work_s.max()),
        )

    def chain(self) -> States:
        """Return some of the sets, each a part of the next: there may be faster plans than between these."""
        some = [0]
        for known in range(1, len(self.leaves)):
            if self.before[some[-1], known]:
                some.append(known)
        before = self.before[np.ix_(some, some)]
        return States(self.work_s[some], self.weights[some], self.leaves[some], before, self.longest_s)


def _last(known: int, needs: Sequence[int], edges: Sequence[tuple[int, int]]) -> set[int]:
    """Return the nodes of a set that no other one needs, and those whose output leaves the way to one."""
    members = [n for n in range(len(needs)) if known >> n & 1]
    ends = [n for n in members if not any(needs[m] >> n & 1 for m in members if m != n)]
    return {*ends} | {
        s for s, t in edges for end in ends if s != end and needs[end] >> s & 1 > needs[end] >> t & 1
    }


@dataclass(frozen=True, eq=False)
class Optimizer:
    """Plans a model on levels of machines, the innermost first. `messages`: whether they take time."""

    states: States
    levels: Sequence[Level]
    messages: bool
    _times: list[Array] = field(default_factory=list, init=False)
    _fastest: list[Mapping[int, Array]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        work = self._between(self.states.work_s)
        valid = np.vstack([np.ones(len(self.states.leaves), dtype=bool), self.states.before])
        work[~valid] = np.inf
        for number, level in enumerate(self.levels):
            self._times.append(work)
            starts = 1 if number == len(self.levels) - 1 else len(work)
            fastest = {m: self._alone(number, m)[:starts] for m in range(1, level.machines + 1)}
            for m in range(2, level.machines + 1):
                for last in range(1, m):
                    ends = self._last_stage(number, last)
                    for start in range(starts):
                        ways = np.maximum(fastest[m - last][start][:, None], ends).min(0)
                        np.minimum(fastest[m][start], ways, out=fastest[m][start])
            self._fastest.append(fastest)
            work = fastest[level.machines]

    @property
    def seconds(self) -> float:
        """The time of the slowest stage of its plan."""
        return float(self._fastest[-1][self.levels[-1].machines][0, -1])

    @property
    def parallel_s(self) -> float:
        """The time of data parallelism."""
        seconds, within, weights = float(self.states.work_s[-1]), 1, float(self.states.weights[-1])
        for machines, bandwidth in self.levels:
            seconds = (seconds + 4 * (machines - 1) * weights / (bandwidth * machines) / within) / machines
            within = machines
        return seconds

    def plan(self) -> Counts:
        """Return the replicas of the stages of one of its plans."""
        return self._plan(len(self.levels) - 1, 0, len(self.states.leaves) - 1, self.levels[-1].machines)

    def gives(self, replicas: Sequence[int]) -> bool:
        """Return whether a plan of these replicas is one of its plans."""

        @cache
        def given(level: int, start: int, end: int, machines: int, counts: Counts) -> bool:
            if level < 0:
                return counts == (1,)
            inner, full = level - 1, self.levels[level - 1].machines if level else 1
            for last, way in self._ways(level, start, end, machines):
                parts = [(way, ())] if way is None else [(way, counts[:n]) for n in range(1, len(counts))]
                for cut, first in parts:
                    own = counts[len(first) :]
                    if any(count % last for count in own):
                        continue
                    inside = tuple(count // last for count in own)
                    begin = start if cut is None else cut + 1
                    if given(inner, begin, end, full, inside) and (
                        cut is None or given(level, start, cut, machines - last, first)
                    ):
                        return True
            return False

        return given(
            len(self.levels) - 1, 0, len(self.states.leaves) - 1, self.levels[-1].machines, tuple(replicas)
        )

    def _plan(self, level: int, start: int, end: int, machines: int) -> Counts:
        if level < 0:
            return (1,)
        last, cut = self._ways(level, start, end, machines)[0]
        full = self.levels[level - 1].machines if level else 1
        inside = self._plan(level - 1, start if cut is None else cut + 1, end, full)
        first = () if cut is None else self._plan(level, start, cut, machines - last)
        return (*first, *(last * count for count in inside))

    def _ways(self, level: int, start: int, end: int, machines: int) -> list[tuple[int, int | None]]:
        """Return the machines of the last stage and the cut before it, of each fastest way; None: no cut."""
        fastest = self._fastest[level]
        limit = fastest[machines][start, end] * (1 + NEAR)
        if self._alone(level, machines)[start, end] <= limit:
            return [(machines, None)]
        return [
            (last, int(cut))
            for last in reversed(range(1, machines))
            for cut in np.flatnonzero(
                np.maximum(fastest[machines - last][start], self._last_stage(level, last)[:, end]) <= limit
            )
        ]

    def _alone(self, level: int, machines: int) -> Array:
        """Return the time of one stage on machines: by the set before its first node and its last set."""
        reduce_s = self._reduce_s(level, machines) / (self.levels[level - 1].machines if level else 1)
        return np.asarray((self._times[level] + reduce_s) / machines)

    @cache  # noqa: B019
    def _last_stage(self, level: int, machines: int) -> Array:
        """Return the time of a last stage with its messages: by the set before it and its last set."""
        stage = ((self._times[level] + self._reduce_s(level, machines)) / machines)[1:]
        if self.messages:
            link_s = 2 * self.states.leaves / (self.levels[level].bandwidth * machines)
            stage = np.maximum(stage, link_s[:, None])
            stage[:, :-1] = np.maximum(stage[:, :-1], link_s[:-1])
        ends: Array = np.where(self.states.before, stage, np.inf)
        return ends

    def _reduce_s(self, level: int, machines: int) -> Array:
        ring = 4 * (machines - 1) / machines
        seconds: Array = ring * self._between(self.states.weights) / self.levels[level].bandwidth
        return seconds

    @staticmethod
    def _between(sums: Array) -> Array:
        """Return the sum from each set, first from none, to each set."""
        between: Array = sums - np.concatenate([[0.0], sums])[:, None]
        return between
