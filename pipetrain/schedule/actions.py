"""The words of a schedule: what one rank does, one action at a time.

A schedule is data. Everything else (check, simulate, draw, the engine) reads the same lists, so what was
proved on paper is what runs. An action reads as text, `1F3@2`: stage 1, forward, microbatch 3, weights
version 2, so that a test and an error message read like the schedule.

Microbatches are numbered through a window (what runs between two drains): microbatch `k` belongs to batch
`k // microbatches`. Versions count from the window's start: version 0 is what the window began with, and the
STEP of batch `n` makes version `n + 1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class ScheduleError(ValueError):
    """A schedule that cannot be made, or a program that is not sound. The message says where and why."""


class Op(StrEnum):
    """What an action does. B is a whole backward; I and W are its two halves, for schedules that split it."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's letter for the input gradient
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    STEP = "STEP"


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})  # uses a microbatch and a weight version
UPDATE = frozenset({Op.REDUCE, Op.STEP})  # `version` is the one that it makes; no microbatch
COMMUNICATION = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})  # a microbatch, no version

_TEXT = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE|STEP|F|B|I|W)(\d+)?(?:@(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One instruction of one rank. `stage` is the slice of the model that it concerns."""

    stage: int
    op: Op
    mb: int = 0
    version: int = 0

    def __str__(self) -> str:
        if self.op in UPDATE:
            return f"{self.stage}{self.op}@{self.version}"
        if self.op in COMMUNICATION:
            return f"{self.stage}{self.op}{self.mb}"
        return f"{self.stage}{self.op}{self.mb}@{self.version}"


Program = list[list[Action]]
"""One list of actions per rank."""

Schedule = Callable[[int, int, int], Program]
"""(ranks, batches, microbatches a batch) -> a compute-only program: F, B (or I and W) and STEP."""


def parse_action(text: str) -> Action:
    """Read `1F3@2`, `0SEND_F3` or `0STEP@1`; the inverse of `str(action)`. Raises ScheduleError."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text!r} is not an action; one looks like 1F3@2, 0SEND_F3 or 0STEP@1")
    stage, op, mb, version = match.groups()
    action = Action(int(stage), Op(op), int(mb or 0), int(version or 0))
    if str(action) != text:
        raise ScheduleError(f"{text!r} is not an action; did you mean {action}?")
    return action


def parse_program(text: str) -> Program:
    """Read a program: a line a rank, actions apart by white space, empty lines and `#` comments skipped."""
    lines = (line.split("#", 1)[0].split() for line in text.splitlines())
    return [[parse_action(word) for word in line] for line in lines if line]


def format_program(program: Program) -> str:
    """Write a program as text: a line a rank. The inverse of `parse_program`."""
    return "".join(" ".join(map(str, actions)) + "\n" for actions in program)


def placement(program: Program) -> list[int]:
    """Say which rank holds each stage: `placement(program)[stage]` is its rank.

    Raises ScheduleError where stages are missing or one stage's actions stand in two ranks' lists.
    """
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(program):
        for action in actions:
            if rank_of.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"stage {action.stage} is on rank {rank_of[action.stage]}, yet rank {rank} has {action}"
                )
    if sorted(rank_of) != list(range(len(rank_of))):
        raise ScheduleError(f"stages must be 0, 1, 2, ... without a gap; the program has {sorted(rank_of)}")
    return [rank_of[stage] for stage in range(len(rank_of))]


def shortened(actions: Sequence[Action], batches: int, microbatches: int) -> list[Action]:
    """Leave out all that a window does for batches from number `batches` on: it then ends before them.

    What is left waits for no more than before, so an order that cannot deadlock still cannot.
    """
    total = batches * microbatches
    return [a for a in actions if (a.version <= batches if a.op in UPDATE else a.mb < total)]


def last_uses(actions: list[Action]) -> dict[tuple[int, int], int]:
    """Map (stage, version) to the position of the last compute action of this rank that reads it.

    This is what tells a STEP whether the weights that it replaces are still needed, ahead of time.
    """
    return {(a.stage, a.version): i for i, a in enumerate(actions) if a.op in COMPUTE}
