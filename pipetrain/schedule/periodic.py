"""Periodic orders of a V placement: each microbatch follows the one before by one period, on every rank.

Rank r of S holds stages r and 2S-1-r, so a period has six works on each rank: F, I and W of both. If those do
not overlap modulo the period, which is the time of the busiest rank, then the pipeline never waits once it is
full, whatever the times are: this is modulo scheduling (Rau, "Iterative Modulo Scheduling", 1994). What
remains to be chosen are the waits between the works of a microbatch: they cost activations, staleness, and
time to fill. V-Min and V-Half (Qi et al. 2024, arXiv 2405.15362) are such orders for F = I = W; a beam search
makes one for any times. The backward of stage 0, for which nobody waits, is whole.

Times are whole numbers of ticks here, 720,720 a period, so that what fits is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from pipetrain.schedule.actions import Op
from pipetrain.schedule.list_scheduler import WorkTimes
from pipetrain.schedule.programs.order import Work

Node = tuple[Op, int]  # (F, I or W, stage)
Taken = tuple[tuple[int, int], ...]  # of a rank: (start, length) of its works in the period, ascending

_BEAM, _BRANCHES = 24, 3
_TICKS = 720_720  # a period, but for rounding; divided by all numbers to 16


@dataclass(frozen=True)
class Offsets:
    """When the works of microbatch 0 begin; those of microbatch k follow k periods later."""

    period: int
    start: dict[Node, int]

    def ahead(self, stage: int) -> int:
        """Return how many forwards of later microbatches a stage does before the W of one."""
        return (self.start[Op.W, stage] - self.start[Op.F, stage]) // self.period

    def orders(self, where: Sequence[int], microbatches: int) -> list[list[Work]]:
        """Return the works of each rank in order; of fewer microbatches, they come in the same order."""
        works = sorted(
            (at + mb * self.period, "FIW".index(op), stage, mb)
            for (op, stage), at in self.start.items()
            for mb in range(microbatches)
        )
        orders: list[list[Work]] = [[] for _ in range(max(where) + 1)]
        for _, kind, stage, mb in works:
            orders[where[stage]].append((Op("FIW"[kind]), stage, mb))
        return orders


@dataclass(frozen=True)
class _Partial:
    """The first works of microbatch 0, placed; `cost`: how long stages hold it while it waits, summed up."""

    cost: int
    starts: tuple[int, ...]
    taken: tuple[Taken, ...]  # by rank
    ready: int  # when the next work may begin


def offsets(where: Sequence[int], times: WorkTimes, hop: float = 0.0) -> Offsets:
    """Return offsets of few waits for stages on the ranks `where`.

    A work begins at least `hop` periods after the one before it on another rank: messages may come late.
    """
    tick = (max(times.busy(where)) or 1.0) / _TICKS
    stages = range(len(where))
    path = [(Op.F, s) for s in stages] + [(Op.I, s) for s in reversed(stages[1:])] + [(Op.W, 0)]
    of = {Op.F: times.f, Op.I: times.i, Op.W: times.w}
    nodes = [*path, *((Op.W, s) for s in stages[1:])]
    lengths = {(op, stage): round(of[op][stage] / tick) for op, stage in nodes}
    travels = [round(time / tick) for time in (*times.ahead[:-1], 0.0, *times.back[:0:-1], 0.0)]
    left = [[length for (_, s), length in lengths.items() if where[s] == rank] for rank in set(where)]
    period = max(1, *map(sum, left))
    beam = [_Partial(0, (), ((),) * len(left), 0)]
    for index, ((op, stage), travel) in enumerate(zip(path, travels, strict=True)):
        rank, length = where[stage], lengths[op, stage]
        left[rank].remove(length)
        rest = tuple(sorted(left[rank]))
        behind = path[min(index + 1, len(path) - 1)][1]
        least = max(length + travel, round(hop * period) if where[behind] != rank else 0)
        holding = stage if op is Op.F else stage + 1  # the stages that hold the microbatch while it waits
        grown: list[_Partial] = []
        for state in beam:
            for at in _places(state.taken[rank], state.ready, length, rest, period):
                taken = list(state.taken)
                taken[rank] = _with(taken[rank], at % period, length)
                cost = state.cost + (at - state.ready) * holding
                grown.append(_Partial(cost, (*state.starts, at), tuple(taken), at + least))
        beam = sorted(grown, key=lambda state: state.cost)[:_BEAM]

    def holding_time(start: dict[Node, int]) -> float:
        """Return for how long all stages hold a microbatch, and a little of how long it takes to pass."""
        return sum(start[Op.W, s] - start[Op.F, s] for s in stages) + 0.01 * max(start.values())

    candidates = [
        _with_weights(dict(zip(path, state.starts, strict=True)), state.taken, where, lengths, period)
        for state in beam
    ]
    return Offsets(period, min(candidates, key=holding_time))


def _with_weights(
    start: dict[Node, int],
    taken: Sequence[Taken],
    where: Sequence[int],
    lengths: dict[Node, int],
    period: int,
) -> dict[Node, int]:
    """Add each W in the first gap after its I, in the better of both orders on a rank."""
    start = {**start, (Op.I, 0): start[Op.W, 0]}
    for rank, busy in enumerate(taken):
        mine = [stage for stage in reversed(range(len(where))) if where[stage] == rank and stage]
        options: list[dict[Node, int]] = []
        for order in (mine, mine[::-1]):
            placed: dict[Node, int] = {}
            filled = busy
            for index, stage in enumerate(order):
                rest = tuple(sorted(lengths[Op.W, other] for other in order[index + 1 :]))
                length = lengths[Op.W, stage]
                ready = start[Op.I, stage] + lengths[Op.I, stage]
                placed[Op.W, stage] = at = next(_places(filled, ready, length, rest, period))
                filled = _with(filled, at % period, length)
            options.append(placed)
        best = min(options, key=lambda placed: sum(placed.values()))
        start |= best
    return start


def _with(taken: Taken, phase: int, length: int) -> Taken:
    """Return what is taken with one work more; one of no length takes nothing."""
    return tuple(sorted((*taken, (phase, length)))) if length else taken


def _places(taken: Taken, ready: int, length: int, left: tuple[int, ...], period: int) -> Iterator[int]:
    """Yield the earliest times from `ready` on at which a work fits between those that are `taken`.

    What is `left` for the rank must find room as well. So the work begins when it is ready, or else leaves a
    gap of the length of some of these beside it.
    """
    if not length or not taken:
        yield ready
        return
    sums = {sum(some) for count in range(len(left) + 1) for some in combinations(left, count)}
    edges = {start + long + gap for start, long in taken for gap in sums}
    edges |= {start - length - gap for start, _ in taken for gap in sums}
    places = 0
    for wait in sorted({0, *((edge - ready) % period for edge in edges)}):
        if _fits(_with(taken, (ready + wait) % period, length), left, period):
            yield ready + wait
            places += 1
            if places == _BRANCHES:
                return


def _fits(taken: Taken, left: tuple[int, ...], period: int) -> bool:
    """Return whether no two works overlap, and those left have room in the gaps."""
    following = [*(start for start, _ in taken[1:]), taken[0][0] + period]
    gaps = [end - start - length for (start, length), end in zip(taken, following, strict=True)]
    return min(gaps) >= 0 and _packs(tuple(gap for gap in gaps if gap), left)


@lru_cache(maxsize=4096)
def _packs(gaps: tuple[int, ...], left: tuple[int, ...]) -> bool:
    """Return whether works of these lengths, ascending, fit into the gaps together."""
    if not left or not left[-1]:
        return True
    *rest, longest = left
    return any(
        gap >= longest and _packs((*gaps[:index], gap - longest, *gaps[index + 1 :]), tuple(rest))
        for index, gap in enumerate(gaps)
    )
