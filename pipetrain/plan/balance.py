"""Chooses the cuts: the first layer of each stage but the first.

The slowest stage limits a pipeline, so automatic cuts minimise the largest stage, exactly, by dynamic
programming over contiguous slices (the linear partition problem). Where ranks have several stages each, the
slowest rank limits it, and a large stage still holds up the filling: both are minimised together, by search.

By measured times: what the stages of any cut would take and hold, and what they may recompute. With
memory_limit= and recompute=auto each stage is in the fastest mode that fits: it saves all, or it keeps what
is dear to make again, or its inputs alone. A program with an R wherever there may be one says how much that
is, beside the program without any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import sub
from typing import NamedTuple

from pipetrain.codec import Identity
from pipetrain.errors import ConfigError
from pipetrain.plan.costs import Profile, Table
from pipetrain.plan.estimate import Layer
from pipetrain.plan.program import Draft, make_program, modes_of
from pipetrain.schedule.actions import Op, Program, splits
from pipetrain.schedule.memory import GIB, Items, counts, held_bytes
from pipetrain.settings import AUTO, PROFILE, STRATEGIES, Mode, Settings

LISTED = 40  # layers in a sentence


def choose_cuts(partition: str | Sequence[int], layers: Sequence[Layer], where: Sequence[int]) -> list[int]:
    """Return the first layers of stages 1, 2, ...: as given, or by one of STRATEGIES.

    `where`: the rank of each stage. Raises ConfigError, with the list of layers, if there are too few, a
    stage would be empty or a cut is outside the model.
    """
    stages, listed = len(where), prove_layers(len(where), [layer.name for layer in layers])
    if partition == "even":
        return [round(len(layers) * stage / stages) for stage in range(1, stages)]
    if isinstance(partition, str):
        return balance([getattr(layer, partition) for layer in layers], where)
    rising = all(a < b for a, b in pairwise([0, *partition, len(layers)]))
    if len(partition) != stages - 1 or not rising:
        raise ConfigError(
            f"partition={list(partition)} does not cut the model into {stages} stages: give {stages - 1} "
            f"rising numbers from 1 to {len(layers) - 1}, their first layers, out of: {listed}"
        )
    return list(partition)


def balance(weights: Sequence[float], where: Sequence[int]) -> list[int]:
    """Cut `weights` into a slice for each stage, which rank `where[stage]` holds.

    Where each rank has one, the largest sum of a slice is as small as possible. Else that and the largest sum
    of a rank are as small together as a local search finds. It starts from slices of equal sums, and from
    such slices of each share of the weights for the first half of the stages.
    """
    stages, half = len(where), len(where) // 2
    until = [0.0, *accumulate(weights)]

    def even(start: int, end: int, stages: int) -> list[int]:
        inside = until[start : end + 1]
        # One slice after the other may be filled until a layer is too much.
        limit = (inside[-1] - inside[0]) / stages + max(map(sub, inside[1:], inside))
        cuts, _ = best_cuts(end - start, stages, lambda stage, a, b: inside[b] - inside[a], inside, limit)
        return [start + cut for cut in cuts]

    def size(cuts: Sequence[int]) -> float:
        held = dict.fromkeys(where, 0.0)
        sums = [until[end] - until[start] for start, end in pairwise([0, *cuts, len(weights)])]
        for rank, weight in zip(where, sums, strict=True):
            held[rank] += weight
        return max(held.values()) + max(sums)

    equal = even(0, len(weights), stages)
    if len(set(where)) in (1, stages):
        return equal
    turns = range(half, len(weights) - (stages - half) + 1)
    starts = [[*even(0, t, half), t, *even(t, len(weights), stages - half)] for t in turns]
    return min((_refined(start, len(weights), size) for start in [equal, *starts]), key=size)


def prove_layers(stages: int, names: Sequence[str]) -> str:
    """Return the list of a model's layers. Raises ConfigError if there are too few."""
    numbered = [f"{i} {name}" for i, name in enumerate(names)]
    few = numbered if len(names) <= LISTED else [*numbered[:LISTED], "...", numbered[-1]]
    listed = ", ".join(few)
    if stages > len(names):
        raise ConfigError(
            f"stages={stages} needs at least as many layers, but the model has {len(names)}: "
            f"{listed}; choose fewer stages or a deeper model"
        )
    return listed


def _refined(cuts: list[int], layers: int, size: Callable[[Sequence[int]], float]) -> list[int]:
    """Move one cut after the other anywhere between its neighbours, as long as that is smaller."""
    best, before = size(cuts), math.inf
    while best < before:
        before = best
        for i in range(len(cuts)):
            ends = [0, *cuts, layers]
            ways = ([*cuts[:i], cut, *cuts[i + 1 :]] for cut in range(ends[i] + 1, ends[i + 2]))
            cuts = min(ways, key=size)
        best = size(cuts)
    return cuts


def best_cuts(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    until: Sequence[float] = (),
    limit: float = math.inf,
) -> tuple[list[int], float]:
    """Cut `layers` layers into `stages` non-empty slices so that the largest cost of a slice is smallest.

    Returns the cuts and that cost. `cost(stage, start, end)` is the cost of layers `start` to `end`
    (exclusive) as that stage; where `until` is given, at least until[end] - until[start]. `limit`: what some
    cuts cost at most. Both spare calls of `cost`, of which there may be stages x layers^2 / 2. Among equal
    cuts the later slices are larger where one choice decides it.
    """
    # best[k][i]: the smallest largest cost of the first i layers in k slices; cut[k][i]: its last cut.
    best = [[math.inf] * (layers + 1) for _ in range(stages + 1)]
    cut = [[stage - 1] * (layers + 1) for stage in range(stages + 1)]
    best[0][0] = 0.0
    until, limit = until or [0.0] * (layers + 1), limit * (1 + 1e-9)  # as sums are rounded
    for k in range(1, stages + 1):
        for i in range(k, layers + 1):
            if until[layers] - until[i] > (stages - k) * limit:
                continue  # too much is left
            for j in range(i - 1, k - 2, -1):
                if until[i] - until[j] > min(best[k][i], limit):
                    break
                if best[k - 1][j] <= min(best[k][i], limit):
                    largest = max(best[k - 1][j], cost(k - 1, j, i))
                    if largest <= best[k][i]:
                        best[k][i], cut[k][i] = largest, j
    cuts, end = [], layers
    for k in range(stages, 1, -1):
        end = cut[k][end]
        cuts.append(end)
    return cuts[::-1], best[stages][layers]


class StageCost(NamedTuple):
    """What a stage takes and holds, as predicted; a batch is with B, or with I and W where it splits."""

    mode: Mode
    seconds: Mapping[Op, float]
    messages_s: float  # a microbatch
    batch_s: float
    held_bytes: int


class Choice(NamedTuple):
    """Some cuts, as predicted, each stage in its fastest mode that fits."""

    cuts: list[int]
    stages: list[StageCost]

    @property
    def slowest_s(self) -> float:
        return max(stage.batch_s for stage in self.stages)

    @property
    def held_bytes(self) -> int:
        return max(stage.held_bytes for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A profile's predictions; `choices`: by strategy; `limit`: the most bytes of a stage."""

    profile: Profile
    choices: dict[str, Choice]
    limit: float = math.inf

    @property
    def chosen(self) -> Choice:
        return self.choices[PROFILE]


class InSchedule(NamedTuple):
    """What a schedule has one stage do in a mode: how many items it may hold, and the share of R."""

    counts: Collection[Items]
    share: float = 0.0  # of its microbatches


@dataclass(frozen=True)
class Predictor:
    """Predicts layers `start` to `end` (exclusive) as stage number `stage` of a schedule.

    `placement`: the rank of each stage; `modes`: what each may do, by what it may recompute; `split`: whether
    backwards come in two halves.
    """

    table: Table
    placement: Sequence[int]
    modes: Sequence[Mapping[Mode, InSchedule]]
    microbatches: int
    split: bool = False

    def stage(self, stage: int, start: int, end: int, mode: Mode) -> StageCost:
        seconds = self.table.seconds(start, end, self.split, mode)
        sizes, of = self.table.sizes(start, end, mode), self.modes[stage][mode]
        backward_s = seconds[Op.I] + seconds[Op.W] if self.split else seconds[Op.B]
        messages_s = self._messages_s(stage, sizes)
        each_s = seconds[Op.F] + backward_s + of.share * seconds[Op.R] + messages_s
        batch_s = self.microbatches * each_s + seconds[Op.STEP]
        return StageCost(
            mode, seconds, messages_s, batch_s, max(held_bytes(items, sizes) for items in of.counts)
        )

    def _messages_s(self, stage: int, sizes: Items) -> float:
        """Return the time of the messages to and from other ranks: one each way at each end."""
        ends = {stage - 1: (sizes.inputs, sizes.returned), stage + 1: (sizes.outputs, sizes.grads)}
        return sum(
            self.table.message_s(nbytes)
            for other, both in ends.items()
            if any(both) and self.placement[other : other + 1] != [self.placement[stage]]
            for nbytes in both
        )

    def work_until(self) -> list[float]:
        """Return the seconds a batch that no stage can do without, of all layers before each one."""
        each = (
            min(of.forward_s, of.recorded_s, of.kept_s) + min(of.backward_s, of.input_s + of.weight_s)
            for of in self.table.times.layers
        )
        return [0.0, *accumulate(self.microbatches * seconds for seconds in each)]

    def best(self, stage: int, start: int, end: int, limit: float) -> StageCost:
        """Return a stage in the fastest mode that holds at most `limit` bytes, else in that of the least."""
        ways = [self.stage(stage, start, end, mode) for mode in self.modes[stage]]
        fitting = [way for way in ways if way.held_bytes <= limit]
        if fitting:
            return min(fitting, key=lambda way: way.batch_s)
        return min(ways, key=lambda way: way.held_bytes)

    def choice(self, cuts: Sequence[int], limit: float = math.inf) -> Choice:
        spans = pairwise([0, *cuts, len(self.table.layers)])
        return Choice(list(cuts), [self.best(stage, *span, limit) for stage, span in enumerate(spans)])


def predictor_of(draft: Draft, lengths: Collection[int], table: Table) -> Predictor:
    """Return what predicts any stage, by what the schedule has it do in any of the windows."""
    settings, where = draft.settings, draft.placement

    def programs(recompute: Collection[int] = ()) -> dict[int, Program]:
        return {n: make_program(draft, None, n, recompute=recompute) for n in lengths}

    stages, plain = range(len(where)), programs()
    asked = [[mode] for mode in modes_of(settings.recompute, len(where))]
    if settings.recompute == AUTO and settings.memory_limit is not None:
        # torch.compile leaves no operations to choose from.
        asked = [[mode for mode in Mode if mode != "selective" or not settings.compile]] * len(where)
    again = programs(stages) if any(modes != [Mode.NEVER] for modes in asked) else plain
    ways: list[dict[Mode, InSchedule]] = []
    for stage, modes in enumerate(asked):
        never = _in_schedule(settings, plain, stage)
        recomputing = never if again is plain else _in_schedule(settings, again, stage)
        chosen = modes if recomputing.share else [Mode.NEVER]
        ways.append({mode: never if mode is Mode.NEVER else recomputing for mode in chosen})
    split = any(splits(program) for program in plain.values())
    return Predictor(table, where, ways, settings.microbatches, split)


def _in_schedule(settings: Settings, programs: Mapping[int, Program], stage: int) -> InSchedule:
    """Return what a stage does in the programs; `programs`: by number of batches."""
    copied = [] if isinstance(settings.codecs.forward, Identity) else [stage]
    found: set[Items] = set()
    share = 0.0
    for batches, program in programs.items():
        (actions,) = (row for row in program if any(action.stage == stage for action in row))
        share = max(share, sum((a.stage, a.op) == (stage, Op.R) for a in actions) / batches)
        found |= {now[stage] for now in counts(actions, settings.buffer_size, copied)}
    return InSchedule(found, share / settings.microbatches)


def balance_times(predictor: Predictor, allowed: Collection[int], limit: float = math.inf) -> list[int]:
    """Return the `allowed` cuts, within `limit` bytes a stage, with the fastest slowest stage.

    Each stage is in the fastest mode of recomputation that fits. Raises ConfigError if there are none.
    """
    layers, stages = len(predictor.table.layers), len(predictor.placement)
    within = {0, layers, *allowed}

    def seconds(stage: int, start: int, end: int) -> float:
        best = predictor.best(stage, start, end, limit) if {start, end} <= within else None
        return best.batch_s if best is not None and best.held_bytes <= limit else math.inf

    def held(stage: int, start: int, end: int) -> float:
        return predictor.best(stage, start, end, 0).held_bytes if {start, end} <= within else math.inf

    until = predictor.work_until()
    even = balance([b - a for a, b in pairwise(until)], range(stages))
    reached = max(seconds(stage, *span) for stage, span in enumerate(pairwise([0, *even, layers])))
    cuts, slowest = best_cuts(layers, stages, seconds, until, reached)
    if slowest < math.inf:
        return cuts
    _, smallest = best_cuts(layers, stages, held)
    if smallest == math.inf:
        raise ConfigError(
            f"partition={PROFILE} cannot cut this model into {stages} stages: only {len(within) - 2} of its "
            f"{layers - 1} cuts part no layers that share a tensor and send no complex one; choose fewer"
        )
    raise ConfigError(
        f"memory_limit={limit / GIB:g} is too small: the smallest with which {stages} stages fit is "
        f"{math.ceil(smallest / GIB * 1e4) / 1e4:.4f} GiB; choose that, recompute=auto, more stages or "
        f"smaller microbatches"
    )


def cut_by_times(
    settings: Settings, predictor: Predictor, allowed: Collection[int], profile: Profile
) -> Prediction:
    """Choose the cuts by measured times, and compare them with those of the other strategies."""
    layers, where = predictor.table.layers, predictor.placement
    limit = math.inf if settings.memory_limit is None else settings.memory_limit * GIB
    others = {name: choose_cuts(name, layers, where) for name in STRATEGIES}
    cuts = {PROFILE: balance_times(predictor, allowed, limit), **others}
    return Prediction(profile, {name: predictor.choice(of, limit) for name, of in cuts.items()}, limit)
