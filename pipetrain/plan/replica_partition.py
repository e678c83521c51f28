"""Chooses the cuts and the replicas of a pipeline: PipeDream's dynamic programme, on several machines.

A stage's replicas run microbatches in turn and sum their weights' gradients once an update. As in Narayanan
et al. ("PipeDream", 2019, section 3.1) a stage takes the longer of its work and its all-reduce, a cut the
time of all that crosses it, and the slowest of these bounds the pipeline. A link's bandwidth covers what it
sends and receives together, as in the authors' optimizer: an all-reduce of w bytes by a ring of r ranks
counts as 4 (r - 1) / r w, a message as its activations and their gradients.

PipeDream solves level by level: pipelines within one machine, then machines as if they were ranks. That
cannot give its own published plan, 15 replicas and 1 on four machines of four. Here stages get ranks in
order, and one flat programme knows the ranks of each stage and thus its machines. A message depends on two
stages, so the state is the layers and ranks so far and the replicas of the last stage. That is exact for all
plans whose stages have consecutive ranks; a whole pipeline in each machine is no such plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipetrain.config.settings import Mode
from pipetrain.errors import ConfigError
from pipetrain.plan.costs import Table, ring_bytes
from pipetrain.plan.verification import Draft
from pipetrain.schedule.actions import SENDS, Op, ScheduleError
from pipetrain.schedule.memory import GIB, Items
from pipetrain.schedule.timeline import Costs, Timeline

TRIED = 8  # plans that are simulated
Array = NDArray[np.float64]
RanksTaken = tuple[int, int]  # the ranks of all stages so far, and the replicas of the last one


@dataclass(frozen=True, slots=True)
class Machines:
    """Ranks in order, so many on each machine, and the seconds per byte over links within and between.

    Each rank has a link within its machine, each machine one to the others.
    """

    ranks: int
    per_machine: int
    within_s: float
    between_s: float

    def reduce_s(self, first: int, replicas: int) -> float:
        """Return the seconds per byte of weights in which the replicas from rank `first` reduce by a ring."""
        spans = first // self.per_machine != (first + replicas - 1) // self.per_machine
        return ring_bytes(replicas) * (self.between_s if spans else self.within_s)

    def message_s(self, first: int, before: int, replicas: int) -> float:
        """Return the seconds per byte of a microbatch from the stage before rank `first` to the stage there.

        The side with fewer links counts: of ranks, or of machines if the two stages are on several.
        """
        fewer, inside = min(before, replicas), first % self.per_machine
        if inside >= before and inside + replicas <= self.per_machine:
            return self.within_s / fewer
        return self.between_s / max(1, fewer / self.per_machine)


class LayerSums(NamedTuple):
    """Sums over all layers before each layer; lists begin with no layers and end with all.

    `work_s`: forward and backward of a microbatch; with no layers: what a stage takes in addition.
    `crossing`: the bytes of values and their gradients that cross a cut there. `cuts`: the possible ones.
    """

    work_s: Sequence[float]
    step_s: Sequence[float]
    weight_bytes: Sequence[float]
    crossing: Sequence[float]
    cuts: Collection[int]
    size: Callable[[int, int], Items]  # of a stage, from its first layer to the one after its last

    @classmethod
    def from_table(
        cls, table: Table, cuts: Collection[int] | None = None, mode: Mode = Mode.NEVER
    ) -> LayerSums:
        """Return the sums of a table, with all layers in one recompute mode; `cuts`: None: all."""
        last, ops = len(table.layers), (Op.F, Op.B) if mode is Mode.NEVER else (Op.F, Op.R, Op.B)
        times = [table.seconds(0, end, False, mode) for end in range(last + 1)]
        firsts = {name: layer for layer in reversed(table.layers) for name in layer.weights}
        trained = (
            sum(entry.nbytes for name, entry in layer.weights.items() if firsts[name] is layer)
            for layer in table.layers
        )
        inner = (sum(table.wire_bytes(table.entering(cut, last))) for cut in range(1, last))
        return cls(
            work_s=[sum(entry[op] for op in ops) for entry in times],
            step_s=[entry[Op.STEP] for entry in times],
            weight_bytes=[*accumulate(trained, initial=0)],
            crossing=[0, *inner, 0],
            cuts=range(1, last) if cuts is None else cuts,
            size=lambda start, end: table.sizes(start, end, mode),
        )


class ReplicaPlan(NamedTuple):
    """Stages in order of their ranks; the parts of each one's microbatch time; the slowest time."""

    cuts: list[int]
    replicas: list[int]
    parts: list[dict[str, float]]
    seconds: float
    bound: str  # the longest part of the slowest stage


class _Reached(NamedTuple):
    """The fastest stages of the first layers, by their number: the times, with first layers and replicas."""

    seconds: Array
    stages: list[tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class Planner:
    """Prices stages with replicas, and finds the fastest.

    `microbatches`: of an update, all done before the next if the schedule `flushes`; None: one per replica,
    as in PipeDream. `overlaps`: links work while ranks compute; else ranks also copy what they send and
    receive. `adds_reduce`: a stage takes its work and then its all-reduce, as in the optimizer of PipeDream's
    authors, not the longer of both. `limit`: the bytes of a rank, by its open microbatches in 1F1B, each with
    its own weight version if the schedule `stashes`; messages do not count. `most`: the replicas that a stage
    may have.
    """

    layers: LayerSums
    machines: Machines
    microbatches: int | None = None
    flushes: bool = True
    overlaps: bool = True
    adds_reduce: bool = False
    stashes: bool = True
    limit: float = inf
    most: float = inf
    _stages: dict[tuple[float, int, int], Array] = field(default_factory=dict, init=False)

    def best(self, replicas: Sequence[int] | None = None) -> ReplicaPlan | None:
        """Return the fastest plan, among equals with the fewest stages; `replicas`: of each stage, if known.

        None if there is none: too few layers or cuts, or too little memory.
        """
        return min(self.by_stages(replicas), key=lambda plan: plan.seconds, default=None)

    def by_stages(self, replicas: Sequence[int] | None = None) -> list[ReplicaPlan]:
        """Return the fastest plan for each number of stages, ascending: a flush costs more with more."""
        ranks, plans = self.machines.ranks, []
        counts = range(1, int(min(ranks, self.most)) + 1)
        none = np.full(len(self.layers.work_s), inf)
        none[0] = 0.0
        reached = {(0, 1): _Reached(none, [()] * len(none))}
        for stage in range(len(replicas) if replicas else min(ranks, len(none) - 1)):
            reached = self._longer(reached, replicas[stage : stage + 1] if replicas else counts)
            ends = [(reached[key].seconds[-1], key) for key in reached if key[0] == ranks]
            seconds, end = min(ends, default=(inf, (0, 0)))
            if seconds < inf:
                plans.append(self.priced(reached[end].stages[-1]))
        return plans

    def priced(self, stages: Sequence[tuple[int, int]]) -> ReplicaPlan:
        """Price stages by their first layers and replicas."""
        parts, seconds, rank, before = [], [], 0, 1
        for (start, replicas), (end, _) in pairwise([*stages, (len(self.layers.work_s) - 1, 0)]):
            link = self.machines.message_s(rank, before, replicas) * self.layers.crossing[start]
            alone = {name: float(array[start, end]) for name, array in self._parts(rank, replicas).items()}
            parts.append({"message": link, **alone})
            seconds.append(max(link, float(self._stage(rank, replicas)[start, end])))
            rank, before = rank + replicas, replicas
        slowest = seconds.index(max(seconds))
        longest = max(parts[slowest], key=lambda part: parts[slowest][part])
        cuts, counts = [start for start, _ in stages[1:]], [replicas for _, replicas in stages]
        return ReplicaPlan(cuts, counts, parts, max(seconds), f"{longest} of stage {slowest}")

    def _longer(
        self, reached: dict[RanksTaken, _Reached], counts: Sequence[int]
    ) -> dict[RanksTaken, _Reached]:
        """Add a stage with any of these numbers of replicas."""
        longer = {}
        for first, replicas in product({ranks for ranks, _ in reached}, counts):
            if first + replicas > self.machines.ranks:
                continue
            ways = [(before, partial) for (ranks, before), partial in reached.items() if ranks == first]
            message_s = [self.machines.message_s(first, before, replicas) for before, _ in ways]
            link_s = np.multiply.outer(message_s, self.layers.crossing)
            enters = np.maximum([partial.seconds for _, partial in ways], link_s)  # [before, start]
            total = np.maximum(enters.min(0)[:, None], self._stage(first, replicas))  # [start, end]
            way, start = enters.argmin(0), total.argmin(0).tolist()
            stages = [(*ways[way[layer]][1].stages[layer], (layer, replicas)) for layer in start]
            longer[first + replicas, replicas] = _Reached(total.min(0), stages)
        return longer

    # The parts of a microbatch's time: arrays by a stage's first layer, and by the one after its last

    def _parts(self, first: int, replicas: int) -> dict[str, Array]:
        layers, microbatches = self.layers, self.microbatches or replicas
        share = microbatches / replicas
        busiest = ceil(share) if self.flushes else share
        work = busiest * (_between(layers.work_s) + layers.work_s[0]) + _between(layers.step_s)
        reduce = self.machines.reduce_s(first, replicas) * _between(layers.weight_bytes)
        parts = {"compute": work, "all-reduce": reduce}
        if not self.overlaps:
            crossing = np.array(layers.crossing)
            parts["message"] = busiest * self.machines.within_s * (crossing[:, None] + crossing)
        return {name: part / microbatches for name, part in parts.items()}

    def _stage(self, first: int, replicas: int) -> Array:
        has_open = ceil((self.machines.ranks - first) / replicas)
        key = self.machines.reduce_s(first, replicas), replicas, has_open if self.limit < inf else 0
        if key not in self._stages:
            parts = [*self._parts(first, replicas).values()]
            at_once = self.overlaps and not self.adds_reduce
            seconds: Array = np.maximum.reduce(parts) if at_once else np.add.reduce(parts)
            seconds[np.tril_indices(len(seconds))] = inf
            seconds[[start not in (0, *self.layers.cuts) for start in range(len(seconds))]] = inf
            if self.limit < inf:
                versions = (has_open - 1) * self.stashes
                counts = Items(saved=has_open, weights=1, versions=versions, gradients=1, optimizer=1)
                seconds[self._sizes @ np.array(counts) > self.limit] = inf
            self._stages[key] = seconds
        return self._stages[key]

    @cached_property
    def _sizes(self) -> Array:
        ends, size = range(len(self.layers.work_s)), self.layers.size
        return np.array([[size(start, end) if start < end else Items() for end in ends] for start in ends])


def _between(until: Sequence[float]) -> Array:
    """Return the sum from each layer to each layer, given sums from the first one."""
    sums: Array = np.array(until, dtype=float)
    return sums - sums[:, None]


# For a run


class Way(NamedTuple):
    """Replicas of the stages and the cuts for them; the predicted time of a batch, and what bounds it."""

    replicas: list[int]
    cuts: list[int]
    batch_s: float
    bound: str


def choose_replicas(
    draft: Draft, table: Table, cuts: Collection[int], way_of: Callable[[Draft], Way]
) -> tuple[Draft, dict[str, Way | None]]:
    """Return the draft with the fastest replicas, and that way and others by name; None: impossible.

    The planner finds the best replicas for each number of stages, without the bubble. For the TRIED best,
    `way_of` cuts the model and simulates the schedule. `cuts`: the possible ones. Raises ConfigError and
    ScheduleError if no replicas are possible.
    """
    settings, late = draft.settings, draft.reads_late
    ranks, s_per_byte = settings.ranks, table.times.s_per_byte
    planner = Planner(
        LayerSums.from_table(table, cuts),
        Machines(ranks, ranks, s_per_byte, s_per_byte),
        settings.microbatches,
        flushes=not late,
        overlaps=table.on_gpu,
        stashes=late,
        limit=(settings.memory_limit or inf) * GIB,
        most=settings.microbatches * (settings.window or ranks if late else 1),
    )
    planners = [planner]
    if settings.memory_limit is not None:  # stages that recompute everything may fit
        planners.append(replace(planner, layers=LayerSums.from_table(table, cuts, Mode.ALWAYS)))
    plans = sorted(
        (plan for variant in planners for plan in variant.by_stages()), key=lambda plan: plan.seconds
    )
    parallel, straight = (ranks,), (1,) * ranks
    ways: dict[tuple[int, ...], Way | None] = {}
    drafts: dict[tuple[int, ...], Draft] = {}
    refused: ConfigError | ScheduleError | None = None
    for replicas in dict.fromkeys([parallel, straight, *(tuple(plan.replicas) for plan in plans[:TRIED])]):
        try:
            drafts[replicas] = Draft.from_settings(replace(settings, replicas=[*replicas]), draft.schedule)
            ways[replicas] = way_of(drafts[replicas])
        except (ConfigError, ScheduleError) as error:
            ways[replicas], refused = None, error
    fastest = min((way for way in ways.values() if way), key=lambda way: way.batch_s, default=None)
    if fastest is None:
        assert refused is not None
        raise refused
    by_name = {"data parallel": ways[parallel], "straight pipeline": ways[straight], "chosen": fastest}
    return drafts[tuple(fastest.replicas)], by_name


def longest_part(run: Timeline, costs: Costs) -> str:
    """Return what takes a rank longest in a window: the compute, messages or all-reduce of a stage."""
    parts: defaultdict[tuple[int, str, int], float] = defaultdict(float)
    for rank, row in enumerate(run.rows):
        for action in row.actions:
            part = "message" if action.op in SENDS else "all-reduce" if action.op is Op.REDUCE else "compute"
            parts[rank, part, action.stage] += costs(action)
    _, part, stage = max(parts, key=lambda key: parts[key])
    return f"{part} of stage {stage}"
