"""Transforms: program -> program, both without communication.

A backward is split because another stage waits for its first half; where no stage does, the halves are
joined.

A stage sends what the updates of other stages wait for as early as it can, and itself waits as late as it
may. The numbers travel meanwhile, and a rank with several stages has sent all of them before it waits.
Replicas wait for each other before they send, so they send as late as they may.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain

from pipetrain.schedule.actions import (
    COMPUTE,
    Action,
    Edge,
    Op,
    Program,
    ScheduleError,
    Ties,
    has_norms,
    ranks_of,
    replicated,
    tied_stages,
)
from pipetrain.schedule.lower import Lowering


def joined(program: Program, routes: Sequence[Edge] | None = None) -> Program:
    """Join each I and its W to one B where nothing is sent between them: one pass costs less than two.

    That is so on stage 0, which sends no gradient, and where the earlier stages are on the same rank.
    Elsewhere `lower` puts a message between the two, which would have to wait for the W. At equal costs the
    program takes the same time. `routes`: see `lower`.
    """
    lowering = Lowering.for_program(program, routes)

    def halves(first: Action, second: Action) -> bool:
        same = (first.op, second.op) == (Op.I, Op.W) and (first.stage, first.mb) == (second.stage, second.mb)
        return same and not lowering.sends(first)

    whole: Program = []
    for actions in program:
        whole.append([])
        for action in actions:
            if whole[-1] and halves(whole[-1][-1], action):
                whole[-1][-1] = replace(action, op=Op.B)
            else:
                whole[-1].append(action)
    return whole


def with_recompute(program: Program, stages: Collection[int]) -> Program:
    """Let `stages` recompute their forwards: each R directly before the backward of its microbatch.

    So `lower` puts it before the RECV_B, and it runs while the rank waits for the gradient. A backward that
    directly follows its forward on the rank has no R, as it needs the activations at once.
    """
    changed: Program = []
    for actions in program:
        changed.append([])
        computed: Action | None = None  # last
        for action in actions:
            again = action.op in (Op.B, Op.I) and action.stage in stages
            if again and computed != replace(action, op=Op.F):
                changed[-1].append(replace(action, op=Op.R))
            changed[-1].append(action)
            computed = action if action.op in COMPUTE else computed
    return changed


def without_first_recompute(program: Program, stages: Collection[int], microbatches: int) -> Program:
    """Remove the R of the first microbatch of each batch in `stages`: its F saves what its backward needs."""

    def spared(action: Action) -> bool:
        return action.op is Op.R and action.stage in stages and action.mb % microbatches == 0

    return [[action for action in actions if not spared(action)] for actions in program]


def with_delays(program: Program, microbatches: int, predicts: bool, rates: bool) -> Program:
    """Set the delays, in updates, for a correction.

    `predicts`: of each computation, so that its forward reads the weights predicted for its own update,
    unless the schedule has set a delay itself; `rates`: of each STEP, that of the latest of its microbatches.
    """
    latest: dict[tuple[int, int], int] = {}  # by stage and the version that an update makes
    for action in chain.from_iterable(program):
        if action.op is Op.F:
            batch = action.mb // microbatches
            key = action.stage, batch + 1
            latest[key] = max(latest.get(key, 0), batch - action.version)

    def delay(action: Action) -> int:
        if action.op is Op.STEP:
            return latest[action.stage, action.version] if rates else 0
        if not predicts or action.op not in COMPUTE:
            return action.delay
        return action.delay or action.mb // microbatches - action.version

    return [[replace(action, delay=delay(action)) for action in actions] for actions in program]


def with_norms(program: Program) -> Program:
    """Let every update wait for the gradient norm of all stages, for clipping by the norm of the whole model.

    A NORM follows the last backward of each batch, and its STEP comes as late as it may: before the first
    forward that reads its version, or the next batch's first backward. The NORM of a stage with a TIE also
    waits, and comes before the first STEP of its rank that waits for it.
    """
    tied, copied = tied_stages(program), replicated(program)
    return [_arranged(actions, tied, copied, norms=True) for actions in program]


def without_norms(program: Program) -> Program:
    """Remove the NORMs; the STEPs stay where they are."""
    return [[action for action in actions if action.op is not Op.NORM] for actions in program]


def with_ties(program: Program, ties: Ties) -> Program:
    """Let the updates of stages that share weights wait for each other's gradient of them.

    `ties`: the stages of each such weight. A TIE follows the last backward of each batch on each of them, and
    the NORM, or STEP in a program without, comes as late as `with_norms` says. The two transforms may be
    applied in any order; without `ties` the TIEs are removed. Raises ScheduleError for an impossible tie.
    """
    stages = len(ranks_of(program))
    for tie in ties:
        if len(set(tie)) < 2 or not set(tie) <= set(range(stages)):
            raise ScheduleError(f"a tie joins two or more stages of 0 to {stages - 1}; got {sorted(tie)}")
    tied, copied = set().union(*ties), replicated(program)
    return [_arranged(actions, tied, copied, has_norms(program)) for actions in program]


def _arranged(
    actions: Sequence[Action], tied: Collection[int], copied: Collection[int], norms: bool
) -> list[Action]:
    """Place the TIEs, NORMs and STEPs of a rank; a STEP that waits for nothing stays where it is.

    `copied`: the stages that have replicas.
    """
    actions = [action for action in actions if action.op not in (Op.TIE, Op.NORM)]
    ends = _batch_ends(actions)
    arranged: list[Action] = []
    unsent: list[Action] = []  # TIEs and NORMs that wait before they are sent
    waiting: dict[int, Action] = {}  # stage -> its STEP

    def step(stage: int) -> None:
        action = waiting.pop(stage)
        due = [update for update in unsent if update.version <= action.version]
        arranged.extend(sorted(due, key=lambda update: (update.version, update.op is Op.NORM, update.stage)))
        unsent[:] = [update for update in unsent if update.version > action.version]
        arranged.append(action)

    for position, action in enumerate(actions):
        stage, ahead = action.stage, waiting.get(action.stage)
        reads = action.op is Op.F and ahead is not None and action.version >= ahead.version
        if ahead is not None and (reads or action.op in (Op.B, Op.W, Op.STEP)):
            step(stage)
        if action.op is Op.STEP and (norms or stage in tied):
            waiting[stage] = action
        else:
            arranged.append(action)
        if position in ends:
            version = ends[position]
            tie = [Action(stage, Op.TIE, version=version)] if stage in tied else []
            norm = [Action(stage, Op.NORM, version=version)] if norms else []
            if stage in copied:
                unsent += tie + norm
            elif tie:
                arranged += tie
                unsent += norm
            else:
                arranged += norm
    for stage in sorted(waiting):
        step(stage)
    return arranged


def _batch_ends(actions: Sequence[Action]) -> dict[int, int]:
    """Map the position of each batch's last backward, or else of its STEP, to the version that it makes."""
    last: dict[int, int] = {}  # by stage
    ends: dict[int, int] = {}
    for position, action in enumerate(actions):
        if action.op in (Op.B, Op.W):
            last[action.stage] = position
        elif action.op is Op.STEP:
            ends[last.pop(action.stage, position)] = action.version
    return ends
