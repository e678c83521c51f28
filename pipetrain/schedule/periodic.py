"""Periodic orders of a V placement: each microbatch follows the one before by one period, on every rank.

Rank r of S holds stages r and 2S-1-r, so a period has six works on each rank: F, I and W of both. If they do
not overlap modulo the period, which is the time of the busiest rank, the pipeline never waits once it is
full, whatever the times are: this is modulo scheduling (Rau, "Iterative Modulo Scheduling", 1994). What
remains to choose are the waits between the works of a microbatch: they cost activations, staleness, and time
to fill. V-Min and V-Half (Qi et al. 2024, arXiv 2405.15362) are such orders for F = I = W; a beam search
makes one for any times. The backward of stage 0 is whole, as no stage waits for it.

Times are whole numbers of ticks, 720,720 per period, so that comparisons are exact.
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
Busy = tuple[tuple[int, int], ...]  # of a rank: (start, length) of its works in the period, ascending

_BEAM, _BRANCHES = 24, 3
_TICKS = 720_720  # per period, up to rounding; divisible by all numbers to 16


@dataclass(frozen=True)
class Offsets:
    """When the works of microbatch 0 begin; those of microbatch k follow k periods later."""

    period: int
    start: dict[Node, int]

    def ahead(self, stage: int) -> int:
        """Return how many forwards of later microbatches a stage does before the W of a microbatch."""
        return (self.start[Op.W, stage] - self.start[Op.F, stage]) // self.period

    def orders(self, where: Sequence[int], microbatches: int) -> list[list[Work]]:
        """Return the works of each rank in order; the order is the same for fewer microbatches."""
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
    """The first works of microbatch 0, placed; `cost`: how long stages hold it while it waits, in sum."""

    cost: int
    starts: tuple[int, ...]
    busy: tuple[Busy, ...]  # by rank
    ready: int  # when the next work may begin


def offsets(where: Sequence[int], times: WorkTimes, hop: float = 0.0) -> Offsets:
    """Return offsets with short waits, for stages on the ranks `where`.

    A work begins at least `hop` periods after the one before it on another rank: messages may arrive late.
    """
    tick = (max(times.busy(where)) or 1.0) / _TICKS
    stages = range(len(where))
    path = [(Op.F, s) for s in stages] + [(Op.I, s) for s in reversed(stages[1:])] + [(Op.W, 0)]
    seconds = {Op.F: times.f, Op.I: times.i, Op.W: times.w}
    nodes = [*path, *((Op.W, s) for s in stages[1:])]
    lengths = {(op, stage): round(seconds[op][stage] / tick) for op, stage in nodes}
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
            for at in _places(state.busy[rank], state.ready, length, rest, period):
                occupied = list(state.busy)
                occupied[rank] = _with(occupied[rank], at % period, length)
                cost = state.cost + (at - state.ready) * holding
                grown.append(_Partial(cost, (*state.starts, at), tuple(occupied), at + least))
        beam = sorted(grown, key=lambda state: state.cost)[:_BEAM]

    def holding_time(start: dict[Node, int]) -> float:
        """Return how long all stages hold a microbatch, plus a small part of its whole time."""
        return sum(start[Op.W, s] - start[Op.F, s] for s in stages) + 0.01 * max(start.values())

    candidates = [
        _with_weights(dict(zip(path, state.starts, strict=True)), state.busy, where, lengths, period)
        for state in beam
    ]
    return Offsets(period, min(candidates, key=holding_time))


def _with_weights(
    start: dict[Node, int],
    occupied: Sequence[Busy],
    where: Sequence[int],
    lengths: dict[Node, int],
    period: int,
) -> dict[Node, int]:
    """Add each W in the first gap after its I, in the better of both orders on a rank."""
    start = {**start, (Op.I, 0): start[Op.W, 0]}
    for rank, busy in enumerate(occupied):
        stages = [stage for stage in reversed(range(len(where))) if where[stage] == rank and stage]
        options: list[dict[Node, int]] = []
        for order in (stages, stages[::-1]):
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


def _with(busy: Busy, phase: int, length: int) -> Busy:
    """Return the busy times with one more work; a work of length 0 adds none."""
    return tuple(sorted((*busy, (phase, length)))) if length else busy


def _places(busy: Busy, ready: int, length: int, left: tuple[int, ...], period: int) -> Iterator[int]:
    """Yield the earliest times from `ready` on at which a work fits between the `busy` times.

    The `left` works of the rank must fit as well. So the work begins when it is ready, or leaves a gap as
    long as some of them before or after it.
    """
    if not length or not busy:
        yield ready
        return
    sums = {sum(some) for count in range(len(left) + 1) for some in combinations(left, count)}
    edges = {start + long + gap for start, long in busy for gap in sums}
    edges |= {start - length - gap for start, _ in busy for gap in sums}
    places = 0
    for wait in sorted({0, *((edge - ready) % period for edge in edges)}):
        if _fits(_with(busy, (ready + wait) % period, length), left, period):
            yield ready + wait
            places += 1
            if places == _BRANCHES:
                return


def _fits(busy: Busy, left: tuple[int, ...], period: int) -> bool:
    """Return whether no two works overlap, and the `left` works fit into the gaps."""
    following = [*(start for start, _ in busy[1:]), busy[0][0] + period]
    gaps = [end - start - length for (start, length), end in zip(busy, following, strict=True)]
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
