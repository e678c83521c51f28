"""Zero bubble: a backward is split, and the half that no stage waits for fills the idle time.

Only for the input gradient I does another stage wait; the weight gradient W may come at any time before the
STEP. So I comes as early as it can, and W when nothing else can run. Stage 0 has no input gradient to send:
its backward is whole, I directly followed by W. Every batch ends with a flush, staleness is 0.

`zb_h1` and `zb_h2` have one stage a rank (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", arXiv
2401.10241). The others place the stages as a V: rank r holds stages r and 2S-1-r, so a microbatch returns the
way that it came, and the first rank also has the loss: an early I frees memory early, equally on all ranks
(Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from math import inf

from pipetrain.schedule.actions import Op, Program
from pipetrain.schedule.programs.order import Work, repeated, require

FirstSlots = Callable[[int], tuple[int, int, int, int]]  # of a rank: the slots of microbatch 0


def zb_h1(ranks: int, batches: int, microbatches: int) -> Program:
    """1F1B's warm-up with split backwards: a third of its bubble, and its memory on every rank.

    Qi et al. 2024 (arXiv 2401.10241), section 2.2, figure 2.
    """
    require("zb_h1", ranks=ranks, batches=batches, microbatches=microbatches)
    return _handcrafted(ranks, batches, microbatches, 1)


def zb_h2(ranks: int, batches: int, microbatches: int) -> Program:
    """Twice the warm-up of zb_h1: batches follow each other without a bubble, for twice the memory.

    Qi et al. 2024 (arXiv 2401.10241), section 2.3, figure 3. In a window of one batch it takes zb_h1's time.
    """
    require("zb_h2", ranks=ranks, batches=batches, microbatches=microbatches)
    return _handcrafted(ranks, batches, microbatches, 2)


def _handcrafted(ranks: int, batches: int, microbatches: int, depth: int) -> Program:
    """Stage s runs `depth` (S-1-s) forwards ahead, and each W follows `depth` s input gradients after its I.

    The delay is as long as the gap that the drain leaves, and all stages hold as much as stage 0.
    """
    program: Program = []
    for stage in range(ranks):
        ahead, late = min(depth * (ranks - 1 - stage), microbatches), depth * stage
        order: list[Work] = [(Op.F, stage, mb) for mb in range(ahead)]
        for mb in range(microbatches):
            if ahead + mb < microbatches:
                order.append((Op.F, stage, ahead + mb))
            order.append((Op.I, stage, mb))
            if mb >= late:
                order.append((Op.W, stage, mb - late))
        order += [(Op.W, stage, mb) for mb in range(max(0, microbatches - late), microbatches)]
        program.append(repeated(order, microbatches, batches, microbatches))
    return program


def zbv(ranks: int, batches: int, microbatches: int) -> Program:
    """Zero bubble with the stages placed as a V, at 1F1B's memory (ZB-V).

    Qi et al. 2024 (arXiv 2401.10241), section 6. At first the forwards of stage a = r run ahead, 2S-1-r of
    them; then both stages of a rank have a forward, I and W in turn. The order is made for at least the
    microbatches that fill the pipeline, and those that a batch does not have are left out.
    """
    require("zbv", ranks=ranks, batches=batches, microbatches=microbatches)
    program: Program = []
    for rank in range(ranks):
        order = _zbv(rank, ranks, max(2 * ranks - 1, microbatches))
        existing = [work for work in order if work[2] < microbatches]
        program.append(repeated(existing, microbatches, batches, microbatches))
    return program


def _zbv(rank: int, ranks: int, microbatches: int) -> list[Work]:
    a, b = rank, 2 * ranks - 1 - rank
    done: Counter[tuple[Op, int]] = Counter()
    order: list[Work] = []

    def do(*kinds: tuple[Op, int]) -> None:
        for op, stage in kinds:
            order.append((op, stage, done[op, stage]))
            done[op, stage] += 1

    for _ in range(2 * (ranks - rank) - 1):
        do((Op.F, a))
    for _ in range(rank):
        do((Op.F, b), (Op.F, a))
    for _ in range(ranks - rank):
        do((Op.F, b), (Op.I, b), (Op.W, b))
    while done[Op.F, b] < microbatches:
        if done[Op.F, a] < microbatches:
            do((Op.F, a))
        do((Op.I, a), (Op.W, a), (Op.F, b), (Op.I, b), (Op.W, b))
    for _ in range(rank):
        do((Op.I, a), (Op.I, b))
    for _ in range(ranks - rank):
        do((Op.I, a), (Op.W, a))
    for stage in (b, a):
        for _ in range(microbatches - done[Op.W, stage]):
            do((Op.W, stage))
    return order


def v_half(ranks: int, batches: int, microbatches: int) -> Program:
    """Stages placed as a V, at half of 1F1B's memory (V-Half), and less bubble than 1F1B.

    Qi et al. 2024 (arXiv 2405.15362), section 3; the offsets are those of the authors' program.
    """
    require("v_half", ranks=ranks, batches=batches, microbatches=microbatches)
    gap = 3 if ranks % 2 == 0 else 0

    def first_slots(rank: int) -> tuple[int, int, int, int]:
        back = 3 * ranks + gap
        return 2 * rank, 3 * ranks - 2 - rank, back - 1 + 2 * rank, back + 3 * ranks - 2 - rank

    return _periodic(first_slots, ranks, batches, microbatches, limit=2 * (ranks // 2 + 1))


def v_min(ranks: int, batches: int, microbatches: int) -> Program:
    """Stages placed as a V, at a third of 1F1B's memory (V-Min), and less bubble than 1F1B.

    Qi et al. 2024 (arXiv 2405.15362), section 3. It loses more than v_half where I and W take unequal times.
    """
    require("v_min", ranks=ranks, batches=batches, microbatches=microbatches)
    gap = 2 if ranks % 3 == 0 else 0

    def first_slots(rank: int) -> tuple[int, int, int, int]:
        back = 2 * ranks + gap
        return rank, 2 * ranks - 1 - rank, back + rank, back + 2 * ranks - 1 - rank

    return _periodic(first_slots, ranks, batches, microbatches, limit=2 * ((ranks + 4) // 3))


def _periodic(first_slots: FirstSlots, ranks: int, batches: int, microbatches: int, limit: int) -> Program:
    """Each microbatch goes the way of the one before it, six slots later, at most `limit` open on a rank.

    Six slots are all the work of a rank on a microbatch. `first_slots(rank)`: the slots of microbatch 0, in F
    of stage a and of b, then I of b and of a. They give the order of F and I; simulating one batch places W.
    """
    orders: list[list[Work]] = []
    for rank in range(ranks):
        a, b = rank, 2 * ranks - 1 - rank
        kinds = zip(first_slots(rank), ((Op.F, a), (Op.F, b), (Op.I, b), (Op.I, a)), strict=True)
        slots = {slot + 6 * mb: (*kind, mb) for slot, kind in kinds for mb in range(microbatches)}
        orders.append([slots[slot] for slot in sorted(slots) if slots[slot][:2] != (Op.I, 0)])
    play = _Slots(orders, microbatches, limit)
    return [repeated(order, microbatches, batches, microbatches) for order in play.run()]


class _Slots:
    """Simulates a batch in slots of one F, I or W each; W fills the slots that the given orders leave free.

    A rank does the next work of its order; if that has not arrived, or is a forward and `limit` microbatches
    are open, the W with the oldest I. The backwards of stage 0, for which no stage waits, count as W.
    """

    def __init__(self, orders: list[list[Work]], microbatches: int, limit: int) -> None:
        self._orders = [deque(order) for order in orders]
        self._last = 2 * len(orders) - 1
        self._limit = limit
        self._fill = [
            {
                (Op.W if stage else Op.I, stage): deque(range(microbatches))
                for stage in (rank, self._last - rank)
            }
            for rank in range(len(orders))
        ]
        self._ended: dict[Work, int] = {}
        self._played: list[list[Work]] = [[] for _ in orders]
        self._free = [0] * len(orders)  # from which slot on
        self._open = [0] * len(orders)

    def run(self) -> list[list[Work]]:
        """Return the order of each rank."""
        for now in count():
            if not any(self._orders) and not any(any(fill.values()) for fill in self._fill):
                break
            for rank, free in enumerate(self._free):
                if free <= now and (work := self._next(rank, now)):
                    self._do(rank, work, now)
        return self._played

    def _next(self, rank: int, now: int) -> Work | None:
        order, fill = self._orders[rank], self._fill[rank]
        if order and self._since(order[0]) <= now and (order[0][0] is Op.I or self._open[rank] < self._limit):
            return order.popleft()
        possible = [(self._since((*kind, mbs[0])), kind) for kind, mbs in fill.items() if mbs]
        since, kind = min(possible, default=(now + 1, None))
        return (*kind, fill[kind].popleft()) if kind and since <= now else None

    def _since(self, work: Work) -> float:
        """Return the first slot in which a work can be done, infinity if not known yet."""
        op, stage, mb = work
        if op is Op.F:
            needed = (Op.F, stage - 1, mb) if stage else None
        elif op is Op.I:
            needed = (Op.I, stage + 1, mb) if stage < self._last else (Op.F, stage, mb)
        else:
            needed = (Op.I, stage, mb)
        return self._ended.get(needed, inf) if needed else 0

    def _do(self, rank: int, work: Work, now: int) -> None:
        op, stage, mb = work
        works: list[Work] = [work, (Op.W, 0, mb)] if (op, stage) == (Op.I, 0) else [work]
        self._played[rank] += works
        self._free[rank] = self._ended[work] = now + len(works)
        self._open[rank] += {Op.F: 1, Op.I: 0, Op.W: -1}[works[-1][0]]
