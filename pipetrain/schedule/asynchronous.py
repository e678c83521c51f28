"""v_async: the V placement without a flush, with weight stashing.

As in PipeDream, a forward reads the newest weights of its stage, its backward reads the same ones, and a
stage steps after each batch's last W. But a microbatch returns to the rank where it began, so all ranks hold
about as much, a third to a half of what PipeDream's first rank holds: fewer activations, fewer weight
versions, less staleness. The works are in a periodic order (see `periodic`), so no rank waits once the
pipeline is full.

The order is made for the costs. V-Min's offsets are least stale where F = I = W, but ranks would wait a sixth
of the time where I takes a fifth longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from pipetrain.schedule.actions import Program, ScheduleError, most_open
from pipetrain.schedule.list_scheduler import WorkTimes
from pipetrain.schedule.lower import lower
from pipetrain.schedule.periodic import Offsets, offsets
from pipetrain.schedule.programs.order import newest, require, v_placement, versioned
from pipetrain.schedule.simulate import Cost, Deadlock, simulate, unit_cost

LIKE = ("auto", "v_min", "v_half")
_SLOWER = 1.01  # longest period, as a multiple of the shortest, accepted for less staleness


@dataclass(frozen=True)
class AsynchronousV:
    """Makes a periodic order for the costs of the stages; called, it is a Schedule.

    `like`: v_min and v_half use that schedule's offsets for F = I = W; auto chooses among these and some made
    for the costs: of the fastest, to a hundredth, those that hold the fewest activations, which are the least
    stale. `memory`: the most activations that a rank may hold, in microbatches summed over its two stages;
    None: any number.
    """

    like: str = "auto"
    memory: float | None = None

    def __call__(
        self, ranks: int, batches: int, microbatches: int, *, costs: Cost = unit_cost, buffer_size: int = 1
    ) -> Program:
        """Return the compute-only program of a window. Raises ScheduleError."""
        require("v_async", ranks=ranks, batches=batches, microbatches=microbatches)
        if self.like not in LIKE:
            raise ScheduleError(
                f"schedule v_async needs like to be one of {', '.join(LIKE)}; got {self.like}"
            )
        memory = self.memory
        if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int | float)):
            raise ScheduleError(f"schedule v_async needs memory to be a number or null; got memory={memory}")
        where = v_placement(ranks)
        possible = _timed(WorkTimes.from_cost(costs, where), buffer_size)
        return _program(self._chosen(possible, ranks), where, batches * microbatches, microbatches)

    def _chosen(self, possible: list[tuple[float, float, Offsets]], ranks: int) -> Offsets:
        """Return the offsets of the order, the same for any window."""
        if self.like != "auto":
            possible = [possible[self.like == "v_half"]]
        if self.memory is not None:
            least = min(activations for _, activations, _ in possible)
            possible = [timed for timed in possible if timed[1] <= 2 * self.memory]
            if not possible:
                raise ScheduleError(
                    f"schedule v_async needs memory >= {least / 2:g} microbatches on {ranks} ranks; got "
                    f"memory={self.memory}"
                )
        fastest = min(period for period, _, _ in possible)
        fast = [offsets for period, _, offsets in possible if period <= _SLOWER * fastest]
        return min(fast, key=lambda offsets: sum(map(offsets.ahead, range(2 * ranks))))


@lru_cache(maxsize=64)
def _timed(times: WorkTimes, buffer_size: int) -> list[tuple[float, float, Offsets]]:
    """Return some offsets, V-Min's and V-Half's first, each with its period and activations at these times.

    The period is the time between microbatches in the simulated steady state; infinite if the channel blocks.
    """
    stages = len(times.f)
    where = v_placement(stages // 2)
    count = stages + 4  # enough to fill the pipeline
    timed: list[tuple[float, float, Offsets]] = []
    for by in (WorkTimes.from_cost(unit_cost, where), times):  # F = I = W, and what the stages take
        for hop in (0.0, 0.25, 0.125):
            candidate = offsets(where, by, hop)
            programs = (lower(_program(candidate, where, n)) for n in (count, 2 * count))
            try:
                once, twice = (
                    simulate(program, 1, buffer_size=buffer_size, cost=times.cost).makespan
                    for program in programs
                )
                period = (twice - once) / count
            except Deadlock:
                period = inf
            timed.append((period, most_open(_program(candidate, where, stages)), candidate))
    return timed


def _program(by: Offsets, where: Sequence[int], total: int, microbatches: int = 1) -> Program:
    return [versioned(order, microbatches, newest) for order in by.orders(where, total)]
