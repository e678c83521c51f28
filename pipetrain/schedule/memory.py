"""What the stages of a rank hold while it runs its list: how many of each item, times the bytes of one.

How many follows from the order of the actions alone, so it is the same for a simulated and for a measured
timeline; times say when. What an action needs only while it runs (the gradients between its layers,
workspaces) is not counted.

A stage holds a microbatch from its F until the end of its B or W, in one of three states. Receives are posted
`bound` ahead, and a sender keeps what it has sent until `bound` later messages are sent; a sent activation is
a tensor that its microbatch saves anyway, unless that is recomputed or what is sent is a copy. The storage of
old weight versions is used again, and never freed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import mul
from typing import NamedTuple

from pipetrain.schedule.actions import Action, Op, last_uses
from pipetrain.schedule.timeline import Timeline

PARTS = ("activations", "weights", "versions", "gradients", "optimizer", "messages")


class Items(NamedTuple):
    """What one stage holds: how many of each, or the bytes of one of each."""

    saved: int = 0  # a microbatch after F or R: what enters and leaves the stage, and what autograd saves
    before_r: int = 0  # after an F whose R is to come: what enters, and what is not recomputed
    after_i: int = 0  # between I and W
    weights: int = 0  # parameters, buffers, their moving average
    versions: int = 0  # the trained parameters: each older version
    gradients: int = 0  # of a batch, from its first backward until its STEP
    optimizer: int = 0
    inputs: int = 0  # posted receives: of activations,
    grads: int = 0  # and of gradients
    arrived: int = 0  # gradients that wait for their backward
    outputs: int = 0  # sent activations that are no tensors of an open microbatch
    returned: int = 0  # sent gradients
    tied: int = 0  # gradients of weights that other stages have too, from TIE until NORM or STEP


_PART_OF = (*["activations"] * 3, "weights", "versions", "gradients", "optimizer", *["messages"] * 6)

Held = Mapping[str, int]
"""The bytes of one stage at a moment, by part."""
Memory = Sequence[Mapping[int, Sequence[Held]]]
"""By rank and stage, what is held after each action of the rank."""


def held_bytes(counts: Items, sizes: Items) -> int:
    """Return the bytes of a stage that holds so many of each."""
    return sum(map(mul, counts, sizes))


def in_parts(counts: Items, sizes: Items) -> Held:
    """Return the bytes of a stage that holds so many of each, by part."""
    held = dict.fromkeys(PARTS, 0)
    for part, nbytes in zip(_PART_OF, map(mul, counts, sizes), strict=True):
        held[part] += nbytes
    return held


def over_time(
    timeline: Timeline, sizes: Sequence[Items], bound: int, copied: Collection[int] = ()
) -> list[dict[int, list[Held]]]:
    """Return what the stages hold after each action of a timeline; for the rest see `counts`."""
    memory = []
    for row in timeline.rows:
        held: dict[int, list[Held]] = defaultdict(list)
        for now in counts(row.actions, bound, copied):
            for stage, items in now.items():
                held[stage].append(in_parts(items, sizes[stage]))
        memory.append(dict(held))
    return memory


def peaks(memory: Memory) -> list[dict[str, int]]:
    """Return the most that each stage holds, in `total` and of each part, whose peaks are at any moments."""
    found = {stage: held for of_rank in memory for stage, held in of_rank.items()}
    return [
        {"total": max((sum(one.values()) for one in held), default=0)}
        | {part: max((one[part] for one in held), default=0) for part in PARTS}
        for _, held in sorted(found.items())
    ]


def totals(of_rank: Mapping[int, Sequence[Held]], parts: Collection[str] = PARTS) -> list[int]:
    """Return the bytes of a rank's stages together after each of its actions."""
    return [
        sum(held[part] for held in moment for part in parts) for moment in zip(*of_rank.values(), strict=True)
    ]


def counts(actions: Sequence[Action], bound: int, copied: Collection[int] = ()) -> Iterator[dict[int, Items]]:
    """Yield, after each action of a rank's lowered list, how many of each item its stages hold.

    The window is one of many: the storage of the versions is there from its start. `bound`: of the edges;
    `copied`: the stages that send copies of their activations, as by a codec.
    """
    stages = {
        stage: _Stage([a for a in actions if a.stage == stage], bound, stage in copied)
        for stage in sorted({action.stage for action in actions})
    }
    now = {stage: one.items() for stage, one in stages.items()}
    for action in actions:
        stages[action.stage].do(action)
        now = {**now, action.stage: stages[action.stage].items()}
        yield now


class _Stage:
    def __init__(self, actions: Sequence[Action], bound: int, copied: bool) -> None:
        self._bound = bound
        self._recomputed = {action.mb for action in actions if action.op is Op.R}
        self._messages = {action.op for action in actions}
        self._copies = copied or bool(self._recomputed)
        self._begun, self._all = 0, sum(action.op is Op.F for action in actions)
        self._unsent = False  # a gradient that was made just now
        self._held = dict.fromkeys(("saved", "before_r", "after_i", "gradients", "arrived", "tied"), 0)
        self._held |= {"weights": 1, "versions": _older_versions(actions), "optimizer": 1}

    def do(self, action: Action) -> None:
        held, op = self._held, action.op
        if op is Op.F:
            self._begun += 1
            held["before_r" if action.mb in self._recomputed else "saved"] += 1
        elif op is Op.R:
            held["before_r"] -= 1
            held["saved"] += 1
        elif op in (Op.B, Op.I):
            held["saved"] -= 1
            held["after_i"] += op is Op.I
            held["arrived"] = 0
        elif op is Op.W:
            held["after_i"] -= 1
        if op in (Op.B, Op.W, Op.STEP):
            held["gradients"] = int(op is not Op.STEP)
        if op is Op.RECV_B:
            held["arrived"] = 1
        held["tied"] = int(op is Op.TIE)
        self._unsent = op in (Op.B, Op.I)

    def items(self) -> Items:
        held, bound, has = self._held, self._bound, self._messages.__contains__
        open_ones = held["saved"] + held["before_r"]
        ended, to_come = self._begun - open_ones, self._all - self._begun
        return Items(
            **held,
            inputs=min(bound, to_come) * has(Op.RECV_F),
            grads=min(bound, to_come + open_ones - held["arrived"]) * has(Op.RECV_B),
            outputs=min(bound, self._begun) * (has(Op.SEND_F) and self._copies),
            returned=(min(bound, ended - self._unsent) + self._unsent) * has(Op.SEND_B),
        )


def _older_versions(actions: Sequence[Action]) -> int:
    """Return the most weight versions that a stage keeps beside the newest."""
    uses, held, most = last_uses(actions), [0], 0
    for position, action in enumerate(actions):
        if action.op is Op.STEP:
            kept = [v for v in held if uses.get((action.stage, v), -1) > position]
            held, most = [*kept, action.version], max(most, len(kept))
    return most
