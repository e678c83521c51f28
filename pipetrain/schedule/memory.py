"""What the stages of a rank hold while it runs its list: the number of each item, times the bytes of one.

The numbers follow from the order of the actions alone, so they are the same for a simulated and a measured
timeline. What an action needs only while it runs (gradients between its layers, workspaces) is not counted.

A stage holds a microbatch from its F until the end of its B or W, in one of three states. Receives are posted
ahead, as many as the bound of their direction, and a sender holds a sent message until as many later ones are
sent. A sent activation is a tensor that its microbatch saves anyway, unless it is recomputed or a copy is
sent. The storage of old weight versions is reused, and never freed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import mul
from typing import NamedTuple

from pipetrain.schedule.actions import Action, BothWays, Op, Read, last_backwards, most_versions, replicated
from pipetrain.schedule.timeline import Timeline

GIB = 2**30
PARTS = ("activations", "weights", "versions", "gradients", "optimizer", "messages")


class Items(NamedTuple):
    """What one stage holds: the number of each item, or the bytes of one."""

    saved: int = 0  # a microbatch after F or R: inputs and outputs of the stage, and what autograd saves
    before_r: int = 0  # a microbatch after an F whose R is to come: inputs, and what is not recomputed
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
    tied: int = 0  # gradients of weights that other stages share, from TIE until NORM or STEP
    adding: int = 0  # gradients of a microbatch, added to the batch's at the end of its B or W
    reduced: int = (
        0  # the replicas' sum, besides the rank's own gradients, from the last B or W until REDUCE ends
    )
    apart: int = 0  # gradients with respect to other weights than the batch's first, until REDUCE


_OF_WEIGHTS = ("weights", "versions", "gradients", "optimizer")
_PART_OF = (*["activations"] * 3, *_OF_WEIGHTS, *["messages"] * 6, *["gradients"] * 3)

PartBytes = Mapping[str, int]
"""The bytes that one stage holds at a moment, by part."""
Memory = Sequence[Mapping[int, Sequence[PartBytes]]]
"""By rank and stage, the bytes after each action of the rank."""


def held_bytes(counts: Items, sizes: Items) -> int:
    """Return the bytes of a stage that holds these items."""
    return sum(map(mul, counts, sizes))


def in_parts(counts: Items, sizes: Items) -> PartBytes:
    """Return the bytes of a stage that holds these items, by part."""
    sums = dict.fromkeys(PARTS, 0)
    for part, nbytes in zip(_PART_OF, map(mul, counts, sizes), strict=True):
        sums[part] += nbytes
    return sums


def over_time(
    timeline: Timeline, sizes: Sequence[Items], bounds: BothWays, copied: Collection[int] = ()
) -> list[dict[int, list[PartBytes]]]:
    """Return what the stages hold after each action of a timeline; for the arguments see `counts`."""
    memory, replicas = [], replicated([row.actions for row in timeline.rows])
    for row in timeline.rows:
        moments = list(counts(row.actions, bounds, copied, replicas))
        stages = moments[0] if moments else ()
        memory.append(
            {stage: [in_parts(moment[stage], sizes[stage]) for moment in moments] for stage in stages}
        )
    return memory


def peaks(memory: Memory) -> list[dict[str, int]]:
    """Return the most that each stage holds, in `total` and by part, each at its own moment."""
    by_stage: dict[int, list[PartBytes]] = defaultdict(list)  # of all replicas
    for of_rank in memory:
        for stage, moments in of_rank.items():
            by_stage[stage] += moments
    return [
        {"total": max((sum(parts.values()) for parts in moments), default=0)}
        | {part: max((parts[part] for parts in moments), default=0) for part in PARTS}
        for _, moments in sorted(by_stage.items())
    ]


def totals(of_rank: Mapping[int, Sequence[PartBytes]], parts: Collection[str] = PARTS) -> list[int]:
    """Return the total bytes of a rank's stages after each of its actions."""
    moments = zip(*of_rank.values(), strict=True)
    return [sum(by_part[part] for by_part in moment for part in parts) for moment in moments]


def counts(
    actions: Sequence[Action],
    bounds: BothWays,
    copied: Collection[int] = (),
    replicas: Collection[int] = (),
) -> Iterator[dict[int, Items]]:
    """Yield, after each action of a rank's lowered list, how many of each item its stages hold.

    The window is one of many: the storage of the versions exists from its start. `bounds`: of edges, for
    activations and for gradients; `copied`: stages that send copies of their activations, as with a codec;
    `replicas`: stages with replicas.
    """
    by_stage = {
        stage: [a for a in actions if a.stage == stage] for stage in sorted({a.stage for a in actions})
    }
    items = {
        stage: _items(stage_items, bounds, stage in copied, stage in replicas)
        for stage, stage_items in by_stage.items()
    }
    latest = {stage: next(stage_items) for stage, stage_items in items.items()}
    for action in actions:
        latest = {**latest, action.stage: next(items[action.stage])}
        yield latest


def _items(actions: Sequence[Action], bounds: BothWays, copied: bool, summed: bool) -> Iterator[Items]:
    """Yield what a stage holds before its first action, and after each."""
    up, down = bounds
    recomputed = {action.mb for action in actions if action.op is Op.R}
    has = {op: any(action.op is op for action in actions) for op in Op}
    forwards, versions = sum(action.op is Op.F for action in actions), max(most_versions(actions).values())
    done: Counter[Op] = Counter()
    saved = before_r = gradients = adding = arrived = reduced = 0
    ending = {last for last, _ in last_backwards(actions)}
    reads = set[Read]()  # of the batch's gradients
    op: Op | None = None
    for action in [None, *actions]:
        if action is not None:
            reduced = action in ending or (reduced and op is not Op.REDUCE) or action.op is Op.REDUCE
            op = action.op
            done[op] += 1
            later = op is Op.F and action.mb in recomputed
            before_r += later - (op is Op.R)
            saved += (op in (Op.F, Op.R) and not later) - (op in (Op.B, Op.I))
            adding = op in (Op.B, Op.W) and gradients
            gradients = op in (Op.B, Op.W) or (gradients and op is not Op.STEP)
            reads = {*reads, action.read} if op in (Op.B, Op.W) else set() if op is Op.REDUCE else reads
            arrived = op is Op.RECV_B or (arrived and op not in (Op.B, Op.I))
        back = done[Op.B] + done[Op.I]
        unsent = op in (Op.B, Op.I)  # a gradient that was made just now
        yield Items(
            saved=saved,
            before_r=before_r,
            after_i=done[Op.I] - done[Op.W],
            weights=1,
            versions=versions - 1,  # the older ones
            gradients=int(gradients),
            optimizer=1,
            inputs=min(up, forwards - done[Op.F]) * has[Op.RECV_F],
            grads=min(down, forwards - back - arrived) * has[Op.RECV_B],
            arrived=int(arrived),
            outputs=min(up, done[Op.F]) * (has[Op.SEND_F] and (copied or bool(recomputed))),
            returned=(min(down, back - unsent) + unsent) * has[Op.SEND_B],
            tied=int(op is Op.TIE),
            adding=int(adding),
            reduced=int(summed and reduced),
            apart=int(len(reads) > 1),
        )
