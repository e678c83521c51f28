"""Chooses the cuts: the first layer of each stage but the first.

The slowest stage limits a pipeline, so automatic cuts minimise the largest stage, exactly, by dynamic
programming over contiguous slices (the linear partition problem). If ranks have several stages each, the
slowest rank is the limit, and a large stage still delays the filling: both are minimised together, by search.

With measured times: what the stages of any cut would take and hold, and what they may recompute. With
memory_limit= and recompute=auto each stage uses the fastest mode that fits: it saves everything, or the
results of expensive operations, or only its inputs. What each costs follows from a program whose stages all
have that mode.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

from pipetrain.codec import Identity
from pipetrain.config.settings import AUTO, PROFILE, STRATEGIES, Mode, modes_of
from pipetrain.errors import ConfigError
from pipetrain.plan.cost_estimate import Layer
from pipetrain.plan.costs import Table
from pipetrain.plan.verification import Draft, make_program
from pipetrain.schedule.actions import Op, Placement, replicated
from pipetrain.schedule.memory import GIB, Items, counts, held_bytes

LISTED = 40  # layers in an error message


def choose_cuts(partition: str | Sequence[int], layers: Sequence[Layer], where: Placement) -> list[int]:
    """Return the first layers of stages 1, 2, ...: as given, or by one of STRATEGIES.

    `where`: the ranks of each stage. Raises ConfigError, with the list of layers, if there are too few, a
    stage would be empty or a cut is outside the model.
    """
    stages, listed = len(where), require_layers(len(where), [layer.name for layer in layers])
    if partition == "even":
        return [round(len(layers) * stage / stages) for stage in range(1, stages)]
    if isinstance(partition, str):
        return balance([getattr(layer, partition) for layer in layers], where)
    rising = all(a < b for a, b in pairwise([0, *partition, len(layers)]))
    if stages == 1 and partition:
        raise ConfigError(
            f"partition={list(partition)} is of {len(partition) + 1} stages, and there is one process: start "
            f"the program by torchrun --nproc_per_node={len(partition) + 1}, or leave partition out"
        )
    if len(partition) != stages - 1 or not rising:
        raise ConfigError(
            f"partition={list(partition)} does not cut the model into {stages} stages: give {stages - 1} "
            f"rising numbers from 1 to {len(layers) - 1}, their first layers, out of: {listed}"
        )
    return list(partition)


def balance(weights: Sequence[float], where: Placement) -> list[int]:
    """Cut `weights` into a slice for each stage, which the ranks `where[stage]` share equally.

    If each rank has one stage, the largest sum of a slice is as small as possible. Else that plus the largest
    sum of a rank is as small as a local search finds. It starts from slices of equal sums, and from such
    slices for each split of the weights between the first and second half of the stages.
    """
    stages, half, replicas = len(where), len(where) // 2, [len(ranks) for ranks in where]
    until = [0.0, *accumulate(weights)]

    def even(start: int, end: int, stages: int, first: int = 0) -> list[int]:
        inside, ranks = until[start : end + 1], replicas[first : first + stages]
        if max(ranks) == 1:
            return [start + cut for cut in _even_cuts(inside, stages)]
        cuts, _ = best_cuts(end - start, stages, lambda stage, a, b: (inside[b] - inside[a]) / ranks[stage])
        return [start + cut for cut in cuts]

    equal = even(0, len(weights), stages)
    if len(set(where)) in (1, stages):
        return equal
    turns = range(half, len(weights) - (stages - half) + 1)
    starts = [[*even(0, t, half), t, *even(t, len(weights), stages - half, half)] for t in turns]
    return min((_refined(start, until, where) for start in [equal, *starts]), key=itemgetter(0))[1]


def require_layers(stages: int, names: Sequence[str]) -> str:
    """Return the list of a model's layers as text. Raises ConfigError if there are too few."""
    numbered = [f"{i} {name}" for i, name in enumerate(names)]
    few = numbered if len(names) <= LISTED else [*numbered[:LISTED], "...", numbered[-1]]
    listed = ", ".join(few)
    if stages > len(names):
        raise ConfigError(
            f"stages={stages} needs at least as many layers, but the model has {len(names)}: "
            f"{listed}; choose fewer stages or a deeper model"
        )
    return listed


def _refined(cuts: Sequence[int], until: Sequence[float], where: Placement) -> tuple[float, list[int]]:
    """Move one cut after the other anywhere between its neighbours, as long as the size decreases.

    Return the size, which is the largest sum of a rank plus that of a stage, and the cuts.
    """
    ends, stages_of = [0, *cuts, len(until) - 1], defaultdict[int, list[int]](list)
    for stage, ranks in enumerate(where):
        for rank in ranks:
            stages_of[rank].append(stage)

    def share(stage: int, start: int, end: int) -> float:
        return (until[end] - until[start]) / len(where[stage])

    def load(rank: int) -> float:
        return sum(shares[stage] for stage in stages_of[rank])

    def moved(i: int, rest: float, cut: int) -> float:
        """Move the cut after stage i; return the size. `others`: the largest sum of the other ranks."""
        shares[i : i + 2] = share(i, ends[i], cut), share(i + 1, cut, ends[i + 2])
        return max(rest, *map(load, {*where[i], *where[i + 1]})) + max(shares)

    shares = [share(stage, *span) for stage, span in enumerate(pairwise(ends))]
    loads = {rank: load(rank) for rank in stages_of}
    best, before = max(loads.values()) + max(shares), math.inf
    while best < before:
        before = best
        for i in range(len(cuts)):
            two = {*where[i], *where[i + 1]}
            size = partial(moved, i, max((loads | dict.fromkeys(two, 0.0)).values()))
            ends[i + 1] = min(range(ends[i] + 1, ends[i + 2]), key=size)
            best = size(ends[i + 1])
            loads |= {rank: load(rank) for rank in two}
    return best, ends[1:-1]


def _even_cuts(until: Sequence[float], stages: int) -> list[int]:
    """Return what `best_cuts` would, for costs until[end] - until[start], in stages x layers steps.

    For more layers, the last cut where the layers before it dominate does not move to an earlier layer.
    """
    layers = len(until) - 1
    best = [[0.0, *[math.inf] * layers]]  # best[k][i] as there
    for k in range(1, stages + 1):
        before, row, j = best[-1], [math.inf] * (layers + 1), k - 1
        for i in range(k, layers + 1):
            while j + 1 < i and before[j + 1] <= until[i] - until[j + 1]:
                j += 1
            row[i] = max(before[j], until[i] - until[j])
            if j + 1 < i:
                row[i] = min(row[i], before[j + 1])
        best.append(row)
    cuts, end = list[int](), layers
    for k in range(stages, 1, -1):
        most = best[k][end]
        end = next(j for j in range(k - 1, end) if until[end] - until[j] <= most)
        cuts.append(end)
    return cuts[::-1]


def best_cuts(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    until: Sequence[float] = (),
    limit: float = math.inf,
) -> tuple[list[int], float]:
    """Cut `layers` layers into `stages` non-empty slices so that the largest cost of a slice is smallest.

    Returns the cuts and that cost. `cost(stage, start, end)` is the cost of layers `start` to `end`
    (exclusive) as that stage; if `until` is given, at least until[end] - until[start]. `limit`: a cost that
    some cuts reach. Both save calls of `cost`, which may be stages x layers^2 / 2. Among equal cuts the later
    slices are larger.
    """
    # best[k][i]: the smallest largest cost of the first i layers in k slices; cut[k][i]: its last cut.
    best = [[math.inf] * (layers + 1) for _ in range(stages + 1)]
    cut = [[stage - 1] * (layers + 1) for stage in range(stages + 1)]
    best[0][0] = 0.0
    until, limit = until or [0.0] * (layers + 1), limit * (1 + 1e-9)  # as sums are rounded
    for k in range(1, stages + 1):
        for i in range(k, layers + 1):
            if until[layers] - until[i] > (stages - k) * limit:
                continue  # too much remains
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


# By measured times


class Priced(NamedTuple):
    """A stage in a mode: the seconds of a batch, and the most bytes that it holds."""

    mode: Mode
    batch_s: float
    held_bytes: int


class Choice(NamedTuple):
    """Some cuts, each stage in its fastest mode that fits; the slowest stage, and the fullest one."""

    cuts: list[int]
    stages: list[Priced]
    slowest_s: float
    held_bytes: int


class StageWork(NamedTuple):
    """The actions of a stage in a mode: how often each per batch, and the items that the stage may hold."""

    actions: Mapping[Op, float]
    items: Collection[Items]
    replicas: int = 1


@dataclass(frozen=True)
class Prices:
    """Prices any slice of layers as a stage, by the costs that `simulate` uses for the stage's actions.

    Messages count in full at both ends, see costs.py. `stages`: the work of each in its possible modes.
    """

    table: Table
    stages: Sequence[Mapping[Mode, StageWork]]

    def price(self, stage: int, start: int, end: int, mode: Mode) -> Priced:
        doing, sizes = self.stages[stage][mode], self.table.sizes(start, end, mode)
        seconds = self.table.seconds(start, end, Op.I in doing.actions, mode)
        messages = {Op.RECV_F: sizes.inputs, Op.SEND_F: sizes.outputs}
        messages |= {Op.RECV_B: sizes.grads, Op.SEND_B: sizes.returned}
        seconds |= {op: self.table.message_s(nbytes) for op, nbytes in messages.items()}
        seconds[Op.REDUCE] = self.table.reduce_s(sizes.gradients, doing.replicas)
        batch_s = sum(often * seconds.get(op, 0.0) for op, often in doing.actions.items())
        return Priced(mode, batch_s, max(held_bytes(items, sizes) for items in doing.items))

    def best(self, stage: int, start: int, end: int, limit: float) -> Priced:
        """Return a stage in the fastest mode that holds at most `limit` bytes, else in the smallest mode."""
        ways = [self.price(stage, start, end, mode) for mode in self.stages[stage]]
        fitting = [way for way in ways if way.held_bytes <= limit]
        if fitting:
            return min(fitting, key=lambda way: way.batch_s)
        return min(ways, key=lambda way: way.held_bytes)

    def choice(self, cuts: Sequence[int], limit: float = math.inf) -> Choice:
        spans = enumerate(pairwise([0, *cuts, len(self.table.layers)]))
        stages = [self.best(stage, *span, limit) for stage, span in spans]
        slowest, fullest = (
            max(priced.batch_s for priced in stages),
            max(priced.held_bytes for priced in stages),
        )
        return Choice(list(cuts), stages, slowest, fullest)

    def work_until(self) -> list[float]:
        """Return, for all layers before each layer, the seconds per batch that every stage needs at least."""
        microbatches = min(doing.actions[Op.F] for modes in self.stages for doing in modes.values())
        per_layer = (
            min(layer.forward_s, layer.recorded_s, layer.kept_s)
            + min(layer.backward_s, layer.input_s + layer.weight_s)
            for layer in self.table.times.layers
        )
        return [0.0, *accumulate(microbatches * seconds for seconds in per_layer)]


def prices_of(draft: Draft, batches: int, table: Table) -> Prices:
    """Return the prices of stages, by their work in a window of so many batches of the schedule."""
    settings = draft.settings
    count, copied = len(draft.placement), not isinstance(settings.codecs.forward, Identity)

    @cache
    def doing(mode: Mode) -> dict[int, StageWork]:
        by_stage: dict[int, StageWork] = {}
        items: dict[int, set[Items]] = defaultdict(set)  # of all replicas
        program = make_program(draft, None, batches, modes=[mode] * count)
        with_replicas = replicated(program)
        for actions in program:
            stages = {action.stage for action in actions}
            moments = list(counts(actions, settings.buffer_sizes, stages if copied else (), with_replicas))
            for stage in stages:
                often = Counter(action.op for action in actions if action.stage == stage)
                per_batch = {op: number / batches for op, number in often.items()}
                # The first replica has the most microbatches.
                by_stage.setdefault(stage, StageWork(per_batch, items[stage], len(draft.placement[stage])))
                items[stage].update(moment[stage] for moment in moments)
        return by_stage

    def work(stage: int, mode: Mode) -> StageWork:
        return doing(Mode.ALWAYS if mode is Mode.SELECTIVE else mode)[stage]  # their programs are the same

    requested = [[mode] for mode in modes_of(settings.recompute, count)]
    if settings.recompute == AUTO and settings.memory_limit is not None:
        # torch.compile leaves no operations to choose from.
        requested = [[Mode.NEVER, *[Mode.SELECTIVE] * (not settings.compile), Mode.ALWAYS]] * count
    stages: list[dict[Mode, StageWork]] = []
    for stage, modes in enumerate(requested):
        works = {mode: work(stage, mode) for mode in modes}
        recomputes = any(Op.R in of_mode.actions for of_mode in works.values())
        stages.append(works if recomputes else {Mode.NEVER: work(stage, Mode.NEVER)})
    return Prices(table, stages)


def balance_times(prices: Prices, allowed: Collection[int], limit: float = math.inf) -> list[int]:
    """Return the `allowed` cuts, within `limit` bytes a stage, whose slowest stage is fastest.

    Each stage uses the fastest recompute mode that fits. Raises ConfigError if there are none.
    """
    layers, stages = len(prices.table.layers), len(prices.stages)
    within = {0, layers, *allowed}

    def seconds(stage: int, start: int, end: int) -> float:
        best = prices.best(stage, start, end, limit) if {start, end} <= within else None
        return best.batch_s if best is not None and best.held_bytes <= limit else math.inf

    def held(stage: int, start: int, end: int) -> float:
        return prices.best(stage, start, end, 0).held_bytes if {start, end} <= within else math.inf

    until = prices.work_until()
    even = balance([b - a for a, b in pairwise(until)], [(stage,) for stage in range(stages)])
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


def cut_by_times(draft: Draft, batches: int, table: Table, allowed: Collection[int]) -> dict[str, Choice]:
    """Return the cuts by measured times, and by other strategies; `batches`: of the longest window."""
    prices, limit = prices_of(draft, batches, table), (draft.settings.memory_limit or math.inf) * GIB
    choices = {name: choose_cuts(name, table.layers, draft.placement) for name in STRATEGIES}
    cuts = {PROFILE: balance_times(prices, allowed, limit), **choices}
    return {name: prices.choice(first_layers, limit) for name, first_layers in cuts.items()}
