"""zb_auto: a flush schedule with an order made for the costs of its stages, under a memory limit.

A list scheduler tries several rules, the fixed zero-bubble schedules are candidates too, and `simulate` at
the same costs chooses among all that keep the limit. So it is never slower than a fixed schedule of its
placement. Every rank makes the same program, as all have the same costs.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from pipetrain.schedule.actions import Op, Program, Schedule, ScheduleError, most_open
from pipetrain.schedule.list_scheduler import ListScheduler, Preference, WorkTimes
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import one_f_one_b, v_half, v_min, zb_h1, zb_h2, zbv
from pipetrain.schedule.programs.order import newest, require, v_placement, versioned
from pipetrain.schedule.simulate import Cost, Deadlock, simulate, unit_cost
from pipetrain.schedule.transforms import joined

FIXED: dict[bool, list[Schedule]] = {
    True: [zbv, v_half, v_min],  # of the V placement
    False: [zb_h1, zb_h2, one_f_one_b],
}

_DEPTHS = (None, 1.0, 1.25, 1.5)
_ORDERS = {
    True: ("F1 I0 F0 I1", "F1 F0 I0 I1", "I1 F1 I0 F0", "I1 I0 F1 F0", "F1 I1 I0 F0"),
    False: ("F0 I0", "I0 F0"),
}
_RULES = {
    v: [
        Preference(tuple((Op(word[0]), int(word[1])) for word in order.split()), patience, depth)
        for order, patience, depth in product(orders, (0.0, 0.5), _DEPTHS if v else (*_DEPTHS, 2.0, 3.0))
    ]
    for v, orders in _ORDERS.items()
}
_SIMULATED = 4  # of the list scheduler's orders, the fastest
_LARGE = 5_000  # from this many works on, orders are compared over fewer batches


@dataclass(frozen=True)
class ZeroBubbleAuto:
    """Makes an order of F, I and W for the costs of the stages; called, it is a Schedule.

    `memory`: the most activations that a rank may hold, in microbatches summed over its stages; None: one
    for each rank, as in 1f1b. `v`: rank r of S holds stages r and 2S-1-r; else stage r alone.
    """

    memory: float | None = None
    v: bool = True

    def __call__(
        self, ranks: int, batches: int, microbatches: int, *, costs: Cost = unit_cost, buffer_size: int = 1
    ) -> Program:
        """Return the compute-only program of a window. Raises ScheduleError."""
        require("zb_auto", ranks=ranks, batches=batches, microbatches=microbatches)
        limit = ranks if self.memory is None else self.memory
        if not isinstance(self.v, bool):
            raise ScheduleError(f"schedule zb_auto needs v to be true or false; got {self.v}")
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 1:
            raise ScheduleError(f"schedule zb_auto needs memory >= 1 microbatch; got memory={limit}")
        where = v_placement(ranks) if self.v else list(range(ranks))
        times, most = WorkTimes.from_cost(costs, where), limit * len(where) // ranks

        def played(rule: Preference, batches: int) -> tuple[Program, float]:
            total = batches * microbatches
            play = ListScheduler(where, total, microbatches, times, most, rule, 2 * buffer_size)
            orders, makespan = play.run()
            return [versioned(order, microbatches, newest) for order in orders], makespan

        def program_by(by: Preference | Schedule, batches: int) -> Program:
            return played(by, batches)[0] if isinstance(by, Preference) else by(ranks, batches, microbatches)

        trial = max(1, min(batches, _LARGE // (3 * len(where) * microbatches)))
        ways: list[Preference | Schedule] = [
            by for by in FIXED[self.v] if most_open(program_by(by, 1)) <= most
        ]
        ways += sorted(_RULES[self.v], key=lambda rule: played(rule, trial)[1])[:_SIMULATED]
        simulated: list[tuple[float, int]] = []
        for number, by in enumerate(ways):
            with suppress(Deadlock):  # with this bound of the channel
                program = lower(joined(program_by(by, trial)))
                run = simulate(program, microbatches, buffer_size=buffer_size, cost=costs)
                simulated.append((run.makespan, number))
        if not simulated:
            raise ScheduleError(
                f"schedule zb_auto found no order of {ranks} ranks and {microbatches} microbatches that does "
                f"with memory={limit} and buffer_size={buffer_size}: raise one of them"
            )
        return program_by(ways[min(simulated)[1]], batches)
