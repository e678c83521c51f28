"""What a stage holds, and what it may recompute so that it holds less.

With memory_limit= and recompute=auto each stage is in the fastest mode that fits: it saves all, or it keeps
what is dear to make again, or its inputs alone. A program with an R wherever there may be one says how much
that is, beside the program without any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pipetrain.codec import Identity
from pipetrain.plan.balance import GIB
from pipetrain.plan.recompute import AUTO, Mode, modes_of
from pipetrain.plan.stages import Predictor, Recomputation, StageTime
from pipetrain.schedule.actions import Op, Program
from pipetrain.schedule.lower import edges
from pipetrain.schedule.memory import Counts, counts, fullest, most
from pipetrain.schedule.policy import Policy
from pipetrain.settings import Settings


def may_recompute(settings: Settings) -> bool:
    """Return whether a cut by measured times has to weigh what stages recompute."""
    if settings.recompute == AUTO:
        return settings.memory_limit is not None
    return settings.recompute != Mode.NEVER


def recomputations(
    settings: Settings, programs: Mapping[int, Program], stages: int, policy: Policy | None
) -> list[Recomputation]:
    """Return what each stage may recompute. `programs`: by number of batches, with R wherever it may be."""
    if settings.recompute != AUTO:
        modes = [[mode] for mode in modes_of(settings.recompute, stages)]
    else:  # torch.compile leaves no operations to choose from
        modes = [[mode for mode in Mode if mode is not Mode.SELECTIVE or not settings.compile]] * stages
    found = []
    for stage in range(stages):
        share = max(_share(program, stage, n * settings.microbatches) for n, program in programs.items())
        held = held_in(settings, programs, stage, policy)
        found.append(Recomputation(modes[stage] if share else [Mode.NEVER], share, held))
    return found


def _share(program: Program, stage: int, microbatches: int) -> float:
    recomputed = [a for actions in program for a in actions if (a.stage, a.op) == (stage, Op.R)]
    return len(recomputed) / microbatches


def held_in(
    settings: Settings, programs: Mapping[int, Program], stage: int, policy: Policy | None
) -> list[Counts]:
    """Return the counts of a stage, over all programs, of which one is the peak whatever its sizes."""
    return most(
        [one for n, program in programs.items() for one in _counts(settings, program, n, stage, policy)]
    )


def _counts(
    settings: Settings, program: Program, batches: int, stage: int, policy: Policy | None
) -> list[Counts]:
    """Return what a stage holds in a window; where a policy decides its order, the most that it may."""
    bounds = dict.fromkeys(edges(program), settings.buffer_size)
    if policy is not None:
        held = policy.bounds(stage, len(program), batches, settings.microbatches)
        full = fullest(stage, held.activations, held.versions, bounds)
        recomputes = any(a.op is Op.R for a in program[stage])
        return [full._replace(saved=1, before_r=full.saved - 1) if recomputes else full]
    coded = not isinstance(settings.codecs.forward, Identity)
    copied = [edge for edge in bounds if edge[0] < edge[1]] if coded else []
    (actions,) = (row for row in program if any(action.stage == stage for action in row))
    return [held[stage] for _, held in counts(actions, bounds, copied=copied)]


def reasons(
    settings: Settings, predictor: Predictor, cuts: Sequence[int], stages: Sequence[StageTime]
) -> list[str]:
    """Say in sentences why stages recompute that were free to choose."""
    if settings.recompute != AUTO or settings.memory_limit is None:
        return []
    limit = f"memory_limit={settings.memory_limit:g}"
    said = []
    for stage, (start, end) in enumerate(pairwise([0, *cuts, len(predictor.layers)])):
        if (mode := stages[stage].mode) is not Mode.NEVER:
            modes = predictor.modes(stage)
            less = modes[modes.index(mode) - 1]
            other = predictor.held_bytes(stage, start, end, less) / GIB
            said.append(
                f"stage {stage} recomputes, {mode.value}: it holds {stages[stage].held_bytes / GIB:.4f} GiB, "
                f"and with {less.value} {other:.4f}, above {limit}"
            )
    return said or [f"no stage recomputes: each fits into {limit}"]
