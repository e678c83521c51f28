"""The parts of schedules: the order of a rank's work, and the versions that it reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import ceil

from pipetrain.schedule.actions import Action, Op, ScheduleError

Work = tuple[Op, int, int]  # (F, B, I or W, stage, microbatch), still without weight version
Reads = Callable[[int, int], int]  # (batch, newest version of the stage) -> the version that a forward reads


def one_stage(stage: int, mbs: range, ahead: int) -> list[Work]:
    """Return the work of a rank with a single stage, see `alternate`."""
    return alternate([(Op.F, stage, mb) for mb in mbs], [(Op.B, stage, mb) for mb in mbs], ahead)


def alternate(forwards: Sequence[Work], backwards: Sequence[Work], ahead: int) -> list[Work]:
    """Order the work: `ahead` forwards, then one forward and one backward in turn, then backwards."""
    ahead = min(ahead, len(forwards))
    order = list(forwards[:ahead])
    for pair in zip(forwards[ahead:], backwards, strict=False):
        order += pair
    return order + list(backwards[len(forwards) - ahead :])


def repeated(order: Sequence[Work], size: int, batches: int, microbatches: int) -> list[Action]:
    """Return the actions of a rank that repeats the work of `size` microbatches.

    `size` divides a batch's microbatches; forwards read the newest weights.
    """
    firsts = range(0, batches * microbatches, size)
    whole = [(op, stage, first + mb) for first in firsts for op, stage, mb in order]
    return versioned(whole, microbatches, newest)


def versioned(order: Iterable[Work], microbatches: int, reads: Reads) -> list[Action]:
    """Add to each action the version that it reads, and a STEP after the last backward of each batch."""
    latest: dict[int, int] = defaultdict(int)  # the newest version of each stage
    read: dict[tuple[int, int], int] = {}
    actions: list[Action] = []
    for op, stage, mb in order:
        if op is Op.F:
            read[stage, mb] = reads(mb // microbatches, latest[stage])
        actions.append(Action(stage, op, mb, read[stage, mb]))
        if op in (Op.B, Op.W) and (mb + 1) % microbatches == 0:
            latest[stage] += 1
            actions.append(Action(stage, Op.STEP, version=latest[stage]))
    return actions


def in_flight(replicas: Sequence[int]) -> list[int]:
    """Return how many microbatches each stage has open, over all its replicas, so that all are busy.

    A replica has one for each replica of its stage and of later stages, divided among those of its stage
    (PipeDream, section 3.2: with one replica each, S - s at stage s); no stage has fewer than a later one.
    """
    depths: list[int] = []
    ranks = 0
    for count in reversed(replicas):
        ranks += count
        depths.append(count * ceil(max([ranks, *depths[-1:]]) / count))
    return depths[::-1]


def v_placement(ranks: int) -> list[int]:
    """Return the rank of each of 2S stages: rank r of S holds stages r and 2S-1-r."""
    return [*range(ranks), *reversed(range(ranks))]


def newest(batch: int, latest: int) -> int:
    """Read the newest weights of the stage."""
    return latest


def require(schedule: str, **counts: int) -> None:
    """Raise ScheduleError unless every count is a whole number from 1 on."""
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ScheduleError(f"schedule {schedule} needs {name} >= 1; got {name}={count}")
