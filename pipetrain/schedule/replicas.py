"""Replicas: a program with one rank per place, spread over the ranks that each place has.

Microbatch k of a batch runs on replica k % r of its place, at forward and at backward (the round robin of
PipeDream, Narayanan et al. 2019, section 3.1); if forwards read old weights, k counts through the window.
Every replica makes each update, from the gradient that REDUCE sums over all of them. A rank may belong to
several places; the order of its actions is then that of a simulation in which each place has a rank of its
own, so no such program can deadlock.

A schedule that names `replicas` decides itself how many microbatches are open so that all are busy. In any
other schedule, each action is repeated for as many microbatches as give every replica equally many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import ceil, lcm
from typing import Any

from pipetrain.schedule.actions import (
    COMPUTE,
    UPDATE,
    Action,
    Placement,
    Program,
    Schedule,
    asks_for,
    compute_program,
    ranks_of,
    reads_old,
    rounds,
)
from pipetrain.schedule.lower import ADDED, lower
from pipetrain.schedule.simulate import simulate


def spread_program(
    schedule: Schedule, places: Placement, batches: int, microbatches: int, **offered: Any
) -> Program:
    """Return a schedule's compute-only program (see `compute_program`), over the ranks of its places."""
    counts = [len(ranks) for ranks in places]
    wide, size = lcm(*counts), (len(places), batches)
    if "replicas" in asks_for(schedule) and wide > 1:
        offered["replicas"] = counts
    program = compute_program(schedule, *size, microbatches, **offered)
    if wide == 1 or "replicas" in offered:
        return spread(program, places, batches, microbatches)
    if not reads_old(program, microbatches) or microbatches % wide == 0:
        if (costs := offered.get("costs")) is not None:
            slowdown = {stage: wide / counts[place] for stage, (place,) in enumerate(ranks_of(program))}
            offered["costs"] = lambda action: costs(action) * slowdown[action.stage]
        narrow = compute_program(schedule, *size, ceil(microbatches / wide), **offered)
        program = [_widened(actions, wide, microbatches) for actions in narrow]
    return spread(program, places, batches, microbatches)


def spread(program: Program, places: Placement, batches: int, microbatches: int) -> Program:
    """Spread a compute-only program, one list per place, over the ranks of each place."""
    if places == [(rank,) for rank in range(len(places))]:
        return program
    round_ = rounds(program, batches, microbatches)
    lists = [
        [a for a in actions if a.op in UPDATE or a.mb % round_ % len(ranks) == index]
        for actions, ranks in zip(program, places, strict=True)
        for index in range(len(ranks))
    ]
    ranks = list(chain.from_iterable(places))
    if len(set(ranks)) == len(ranks):
        return [
            actions for _, actions in sorted(zip(ranks, lists, strict=True), key=lambda ranked: ranked[0])
        ]
    lowered = lower(lists)
    run = simulate(lowered, microbatches, buffer_size=batches * microbatches)
    left, merged = [iter(actions) for actions in lowered], Program([] for _ in set(ranks))
    for place in run.order:
        if (action := next(left[place])).op not in ADDED:
            merged[ranks[place]].append(action)
    return merged


def _widened(actions: Sequence[Action], wide: int, microbatches: int) -> list[Action]:
    """Repeat each action for `wide` microbatches of its batch; the last one of a batch may have fewer."""
    narrow, widened = ceil(microbatches / wide), list[Action]()
    for action in actions:
        if action.op not in COMPUTE:
            widened.append(action)
            continue
        batch, number = divmod(action.mb, narrow)
        for mb in range(number * wide, min(number * wide + wide, microbatches)):
            widened.append(replace(action, mb=batch * microbatches + mb))
    return widened
