"""Simulated times of an update, and what the fullest rank holds, by schedule, on equal stages.

Times are in what a rank computes for a batch: 1 has no bubble. A schedule has times of an update after which
the pipeline drains, and of one in a long window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import ceil, sqrt
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from pipetrain.schedule.actions import (
    SENDS,
    Action,
    Op,
    Program,
    Schedule,
    most_open,
    most_versions,
    ranks_of,
)
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import (
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    v_half,
    zb_h1,
    zb_h2,
    zbv,
)
from pipetrain.schedule.simulate import Cost, simulate
from pipetrain.schedule.transforms import with_delays

EXACT: Mapping[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zbv": zbv,
    "v_half": v_half,
}
LATE: Mapping[str, Schedule] = {"pipedream_2bw": pipedream_2bw, "pipedream": pipedream}
SEEDS, DRAINS, BUFFER = 3, 2, 2  # of jitter; more batches that drain, for each; `buffer_size`


class Case(NamedTuple):
    """What takes time. `messages`: of a stage's forward; `jitter`: deviation of an action's time, as a share.

    `halves`: the time of I over that of W; together they take two forwards.
    """

    messages: float = 0.0
    jitter: float = 0.0
    halves: float = 1.0

    def __str__(self) -> str:
        return f"messages {100 * self.messages:g} %, jitter {100 * self.jitter:g} %, I:W {self.halves:g}"

    def cost(self, slices: int, chance: Random) -> Cost:
        """Return the cost of an action, drawn evenly about its mean, where a rank has so many slices."""
        whole, half = 2.0, 2 * self.halves / (1 + self.halves)
        times = {Op.F: 1 / slices, Op.B: whole / slices, Op.I: half / slices, Op.W: (whole - half) / slices}
        off = sqrt(3) * self.jitter

        def cost(action: Action) -> float:
            if action.op in SENDS:
                return self.messages
            mean = times.get(action.op, 0.0)
            return mean * chance.uniform(1 - off, 1 + off) if off and mean else mean

        return cost


STILL = [Case(messages, 0.0, halves) for messages, halves in product((0.0, 0.1, 0.3), (1.0, 2.0, 0.5))]
SHAKEN = [Case(0.1, 0.1), *(Case(messages, 0.3) for messages in (0.0, 0.1, 0.3))]
CASES = {str(case): case for case in (*STILL, *SHAKEN)}


def simulated(stages: int, pieces: Sequence[int], cases: Sequence[str]) -> dict[str, Any]:
    """Return of all schedules, by microbatches a batch and name, what they hold and take.

    `held`: microbatches of a rank's part, and weights with old and predicted ones, on the fullest rank;
    `times`: by case and seed, of an update that drains and of one in a long window.
    """
    result: dict[str, Any] = {}
    for count in pieces:
        result[str(count)] = {
            name: held_and_times(schedule, stages, count, cases)
            for name, schedule in {**EXACT, **LATE}.items()
            if name not in LATE or name == late_of(stages, count)
        }
    return result


def late_of(stages: int, pieces: int) -> str:
    return "pipedream_2bw" if pieces >= stages else "pipedream"


def held_and_times(schedule: Schedule, stages: int, pieces: int, cases: Sequence[str]) -> dict[str, Any]:
    """Return what a schedule holds and takes; the last half of a window is steady, as the first one fills."""
    batches = max(3, ceil(2 * stages / pieces))
    compute = schedule(stages, batches, pieces)
    program, one = lower(compute), lower(schedule(stages, 1, pieces))
    slices, first = len(ranks_of(compute)) // stages, ceil(batches / 2)
    times: dict[str, list[list[float]]] = {}
    for name in cases:
        seeds, drains = (SEEDS, DRAINS) if CASES[name].jitter else (1, 0)
        drained, steady = list[float](), list[float]()
        for seed in range(seeds):
            cost = CASES[name].cost(slices, Random(seed))
            done = ends(program, pieces, cost)
            steady.append((done[-1] - done[first - 1]) / (batches - first))
            drained.append(fmean([done[0], *(ends(one, pieces, cost)[0] for _ in range(drains))]))
        times[name] = [[round(of / (3 * pieces), 4) for of in values] for values in (drained, steady)]
    predicted = with_delays(compute, pieces, predicts=True, rates=False)
    weights = max(max(most_versions(actions).values()) for actions in predicted)
    return {"held": [most_open(compute) / slices, weights], "times": times}


def ends(program: Program, pieces: int, cost: Cost) -> list[float]:
    """Return when the updates of a simulated window are done on all ranks."""
    done: dict[int, float] = {}
    for row in simulate(program, pieces, buffer_size=BUFFER, cost=cost).rows:
        for span in row.spans:
            if span.action is not None and span.action.op is Op.STEP:
                done[span.action.version] = max(span.end, done.get(span.action.version, 0.0))
    return [done[version] for version in sorted(done)]
