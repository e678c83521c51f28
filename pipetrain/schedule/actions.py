"""The instructions of a schedule: the actions of one rank, in order.

A schedule is data: check, simulate, draw and the engine read the same lists. The text of an action is, for
example, `1F3@2`: stage 1, forward, microbatch 3, weight version 2. `1F3@2+1` reads a prediction made from
version 2, 1 update ahead.

Microbatches are numbered through a window (from one drain to the next): number `k` belongs to batch
`k // microbatches`. Versions count from the window's start: version 0 is the initial one, and the STEP of
batch `n` makes version `n + 1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from inspect import signature
from itertools import islice
from typing import Any, NamedTuple


class ScheduleError(ValueError):
    """A schedule that cannot be made, or an invalid program; the text says where and why."""


class Op(StrEnum):
    """The operation of an action. B is a whole backward; I and W are its two halves. R recomputes a forward.

    REDUCE sums the gradients of a stage's replicas. TIE sends the gradient of shared weights to the other
    stages that share them; the NORM or STEP that follows waits for their TIEs. NORM sends the norm of a
    stage's gradient to all stages; in a program with NORMs, STEP waits for all of them.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the usual letter for the input gradient
    W = "W"
    R = "R"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    TIE = "TIE"
    NORM = "NORM"
    STEP = "STEP"


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W, Op.R})  # uses a microbatch and a weight version
UPDATE = frozenset({Op.REDUCE, Op.TIE, Op.NORM, Op.STEP})  # `version` is the new one; no microbatch
COMMUNICATION = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})  # a microbatch, no version

SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})

NO_PEER = -1
_NEIGHBOUR = {Op.SEND_F: 1, Op.RECV_F: -1, Op.SEND_B: -1, Op.RECV_B: 1}  # from the stage
_OPS = "|".join(sorted(Op, key=len, reverse=True))
_TEXT = re.compile(rf"(\d+)({_OPS})(\d+)?(?:@(\d+)(?:\+(\d+))?)?(?:>(\d+))?")


class Predicted(NamedTuple):
    """A weight version, extrapolated by some updates."""

    version: int
    ahead: int


Read = int | Predicted
"""The weights that an action computes with: a version, or a prediction made from it."""


@dataclass(frozen=True, slots=True)
class Action:
    """One instruction of one rank, for one stage.

    `peer` is the other stage of a message, by default the neighbour, which the text leaves out: `0SEND_F3`
    goes to stage 1, `0SEND_F3>2` to stage 2. `delay`: updates between the version and the microbatch's own
    update; a correction predicts weights by it, or lowers the rate of a STEP. 0 without a correction.
    """

    stage: int
    op: Op
    mb: int = 0
    version: int = 0
    peer: int = NO_PEER
    delay: int = 0

    def __post_init__(self) -> None:
        if self.peer == NO_PEER and self.op in _NEIGHBOUR:
            object.__setattr__(self, "peer", self.stage + _NEIGHBOUR[self.op])

    @property
    def edge(self) -> Edge:
        """The (source, destination) stages of a message."""
        return (self.stage, self.peer) if self.op in SENDS else (self.peer, self.stage)

    @property
    def read(self) -> Read:
        """The weights that it computes with."""
        return Predicted(self.version, self.delay) if self.delay else self.version

    def __str__(self) -> str:
        version = f"@{self.version}+{self.delay}" if self.delay else f"@{self.version}"
        if self.op in UPDATE:
            return f"{self.stage}{self.op}{version}"
        if self.op in COMMUNICATION:
            to = "" if self.peer == self.stage + _NEIGHBOUR[self.op] else f">{self.peer}"
            return f"{self.stage}{self.op}{self.mb}{to}"
        return f"{self.stage}{self.op}{self.mb}{version}"


Program = list[list[Action]]  # one list of actions per rank

Edge = tuple[int, int]  # (source stage, target stage) of messages; gradients go from a later stage
BothWays = tuple[int, int]  # a number for activations, and one for gradients
Tie = tuple[int, ...]  # the stages that share some weights, ascending
Ties = Sequence[Collection[int]]  # the stages that share each weight; a stage may share several
ALL: Tie = ()  # stands for the stages of all ranks, which share one gradient norm

Schedule = Callable[..., Program]
"""(ranks, batches, microbatches a batch) -> a compute-only program: F, B (or I and W), R and STEP.

A schedule receives more if it names keywords with a default: `costs` of each action, once they are measured;
`buffer_size`, the bound of the channel, the smaller one if its directions have two; `routes` between stages,
see `lower`; `recompute`, the stages that recompute their forwards, for a schedule that places each R itself.
"""


def both_ways(buffer_size: int | Sequence[int]) -> BothWays:
    """Return the bounds of activations and of gradients that a buffer_size= gives: one for both, or two."""
    activations, gradients = [buffer_size] * 2 if isinstance(buffer_size, int) else buffer_size
    return activations, gradients


def asks_for(schedule: Schedule) -> set[str]:
    """Return the keywords that a schedule accepts after its three numbers and that are not bound."""
    try:
        parameters = signature(schedule).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return set()
    bound = schedule.keywords if isinstance(schedule, partial) else {}
    return set(islice(parameters, 3, None)) - set(bound)


def compute_program(
    schedule: Schedule, ranks: int, batches: int, microbatches: int, **offered: Any
) -> Program:
    """Return a schedule's compute-only program; it gets the keywords of `offered` that it accepts."""
    accepted = {name: value for name, value in offered.items() if name in asks_for(schedule)}
    return [list(actions) for actions in schedule(ranks, batches, microbatches, **accepted)]


def parse_action(text: str) -> Action:
    """Read `1F3@2`, `0SEND_F3` or `0STEP@1`; the inverse of `str(action)`. Raises ScheduleError."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text!r} is not an action; one looks like 1F3@2, 0SEND_F3 or 0STEP@1")
    stage, op, mb, version, delay, peer = match.groups()
    action = Action(
        int(stage), Op(op), int(mb or 0), int(version or 0), int(peer or NO_PEER), int(delay or 0)
    )
    if str(action) != text:
        raise ScheduleError(f"{text!r} is not an action; did you mean {action}?")
    return action


def parse_program(text: str) -> Program:
    """Read a program: a line per rank, actions separated by white space; `#` starts a comment."""
    lines = (line.split("#", 1)[0].split() for line in text.splitlines())
    return [[parse_action(word) for word in line] for line in lines if line]


def format_program(program: Program) -> str:
    """Write a program as text, a line per rank. The inverse of `parse_program`."""
    return "".join(" ".join(map(str, actions)) + "\n" for actions in program)


Placement = list[tuple[int, ...]]
"""The ranks that hold each stage, ascending: one, or its replicas."""


def ranks_of(program: Program) -> Placement:
    """Return the ranks of each stage. Raises ScheduleError if stages are missing."""
    holders: dict[int, list[int]] = {}
    for rank, actions in enumerate(program):
        for stage in {action.stage for action in actions}:
            holders.setdefault(stage, []).append(rank)
    if sorted(holders) != list(range(len(holders))):
        raise ScheduleError(f"stages must be 0, 1, 2, ... without a gap; the program has {sorted(holders)}")
    return [tuple(holders[stage]) for stage in range(len(holders))]


def replicated(program: Program) -> set[int]:
    """Return the stages with several ranks."""
    return {stage for stage, ranks in enumerate(ranks_of(program)) if len(ranks) > 1}


def homes(program: Program) -> dict[tuple[int, int], int]:
    """Return the rank that runs each (stage, microbatch)."""
    return {
        (action.stage, action.mb): rank
        for rank, actions in enumerate(program)
        for action in actions
        if action.op is Op.F
    }


def rounds(program: Program, batches: int, microbatches: int) -> int:
    """Return after how many microbatches of a window the replicas' turns start again.

    After each batch if no forward reads old weights, so that windows may be cut anywhere; else per window.
    """
    return batches * microbatches if reads_old(program, microbatches) else microbatches


def has_norms(program: Program) -> bool:
    """Return whether updates wait for the gradient norm of all stages."""
    return any(action.op is Op.NORM for actions in program for action in actions)


def splits(program: Program) -> bool:
    """Return whether some backwards come in two halves."""
    return any(action.op is Op.I for actions in program for action in actions)


def reads_old(program: Program, microbatches: int) -> bool:
    """Return whether some forwards read weights that lack updates of earlier batches."""
    forwards = (action for actions in program for action in actions if action.op is Op.F)
    return any(action.version < action.mb // microbatches for action in forwards)


def tied_stages(program: Program) -> set[int]:
    """Return the stages whose updates wait for the gradients of weights that they share with others."""
    return {action.stage for actions in program for action in actions if action.op is Op.TIE}


def most_open(program: Program) -> int:
    """Return the most microbatches that a rank holds at once, over all its stages, from F to B or W."""
    most = 0
    for actions in program:
        opened = 0
        for action in actions:
            opened += (action.op is Op.F) - (action.op in (Op.B, Op.W))
            most = max(most, opened)
    return most


def shortened(actions: Sequence[Action], batches: int, microbatches: int) -> list[Action]:
    """Leave out the batches from `batches` on. The rest waits for no more than before: no new deadlock."""
    total = batches * microbatches
    return [a for a in actions if (a.version <= batches if a.op in UPDATE else a.mb < total)]


def last_uses(actions: Sequence[Action]) -> dict[tuple[int, Read], int]:
    """Map (stage, weights) to the position of the last compute action that reads them."""
    return {(a.stage, a.read): i for i, a in enumerate(actions) if a.op in COMPUTE}


def predictions(uses: Iterable[tuple[int, Read]]) -> dict[tuple[int, int], list[Predicted]]:
    """Map (stage, version) to the predictions made from it, as soon as it exists. See `last_uses`."""
    by_version: dict[tuple[int, int], list[Predicted]] = {}
    for stage, read in uses:
        if isinstance(read, Predicted):
            by_version.setdefault((stage, read.version), []).append(read)
    return by_version


def last_backwards(actions: Sequence[Action]) -> list[tuple[Action, Action]]:
    """Return the last B or W of each stage's batches on a rank, each with the REDUCE of its gradient."""
    last, pairs = dict[int, Action](), list[tuple[Action, Action]]()
    for action in actions:
        if action.op in (Op.B, Op.W):
            last[action.stage] = action
        elif action.op is Op.REDUCE and action.stage in last:
            pairs.append((last.pop(action.stage), action))
    return pairs


def most_versions(actions: Sequence[Action]) -> dict[int, int]:
    """Return, by stage, the most weights at once: newest version, older ones still read, predictions."""
    uses = last_uses(actions)
    predicted = predictions(uses)
    versions: dict[int, list[Read]] = {a.stage: [0, *predicted.get((a.stage, 0), ())] for a in actions}
    most = {stage: len(first) for stage, first in versions.items()}
    for position, action in enumerate(actions):
        if action.op is Op.STEP:
            stage = action.stage
            still_read = [version for version in versions[stage] if uses.get((stage, version), -1) > position]
            versions[stage] = [*still_read, action.version, *predicted.get((stage, action.version), ())]
            most[stage] = max(most[stage], len(versions[stage]))
    return most
