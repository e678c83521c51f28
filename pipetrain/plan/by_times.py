"""Cuts by measured times: what the stages of any cut would take and hold, and what they may recompute.

With memory_limit= and recompute=auto each stage is in the fastest mode that fits: it saves all, or it keeps
what is dear to make again, or its inputs alone. A program with an R wherever there may be one says how much
that is, beside the program without any.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from pipetrain.codec import Identity
from pipetrain.network.network import Network
from pipetrain.network.values import ValueSpec
from pipetrain.plan.allowed import cuts_that_may_be
from pipetrain.plan.balance import GIB, balance_times, choose_cuts
from pipetrain.plan.costs import Prediction, Predictor, Recomputation, StageTime
from pipetrain.plan.cut import shared_weights
from pipetrain.plan.estimate import Layer
from pipetrain.plan.profile import Profile, refuse_other_layers
from pipetrain.plan.program import make_program, modes_of
from pipetrain.plan.sizes import assumed_loss
from pipetrain.schedule.actions import Op, Program, Schedule, splits
from pipetrain.schedule.lower import edges
from pipetrain.schedule.memory import Counts, counts, fullest, most
from pipetrain.schedule.policy import Policy
from pipetrain.settings import AUTO, PROFILE, STRATEGIES, Mode, Settings


def predictor_of(
    settings: Settings,
    schedule: Schedule,
    where: list[int],
    lengths: Collection[int],
    profile: Profile,
    layers: Sequence[Layer],
    inputs: ValueSpec,
) -> Predictor:
    """Return what predicts any stage, by what the schedule has it do and hold in any of the windows."""

    def programs(recompute: Collection[int] = ()) -> dict[int, Program]:
        return {n: make_program(schedule, None, n, settings, recompute=recompute) for n in lengths}

    plain, policy = programs(), schedule if isinstance(schedule, Policy) else None
    recompute: list[Recomputation] = []
    if _may_recompute(settings):
        recompute = _recomputations(settings, programs(range(len(where))), len(where), policy)
    return Predictor(
        profile,
        layers,
        inputs,
        placement=where,
        counts=[_held_in(settings, plain, stage, policy) for stage in range(len(where))],
        microbatches=settings.microbatches,
        buffer_size=settings.buffer_size,
        recompute=recompute,
        split=any(splits(program) for program in plain.values()),
        codecs=settings.codecs,
        loss=assumed_loss(layers[-1].output, settings.data_dtype),
        averaged=settings.ema is not None,
    )


def cut_by_times(settings: Settings, network: Network, predictor: Predictor) -> Prediction:
    """Choose the cuts by measured times, and compare them with those of the other strategies."""
    layers, where = predictor.layers, predictor.placement
    refuse_other_layers(predictor.profile, layers)
    limit = None if settings.memory_limit is None else settings.memory_limit * GIB
    way_out = "recompute=auto, " if settings.recompute == Mode.NEVER else ""
    cuts = balance_times(predictor, cuts_that_may_be(network, layers), limit, way_out)
    others = {name: choose_cuts(name, layers, predictor.stages, where=where) for name in STRATEGIES}
    choices = {name: predictor.choice(of, limit) for name, of in ({PROFILE: cuts} | others).items()}
    stages = predictor.stage_times(cuts, predictor.modes_of(cuts, limit))
    return Prediction(
        predictor.profile,
        stages,
        choices,
        predictor.costs(cuts, _tied_bytes(network, cuts), [stage.mode for stage in stages]),
        _reasons(settings, predictor, cuts, stages),
    )


def _tied_bytes(network: Network, cuts: Sequence[int]) -> dict[int, int]:
    """Return the bytes of the weights that each stage shares with others; only of such stages."""
    found: dict[int, int] = {}
    for name, stages in shared_weights(network, cuts).items():
        weight = network.model.get_parameter(name)
        for stage in stages:
            found[stage] = found.get(stage, 0) + weight.nbytes
    return found


def _may_recompute(settings: Settings) -> bool:
    """Return whether a cut by measured times has to weigh what stages recompute."""
    if settings.recompute == AUTO:
        return settings.memory_limit is not None
    return settings.recompute != Mode.NEVER


def _recomputations(
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
        held = _held_in(settings, programs, stage, policy)
        found.append(Recomputation(modes[stage] if share else [Mode.NEVER], share, held))
    return found


def _share(program: Program, stage: int, microbatches: int) -> float:
    recomputed = [a for actions in program for a in actions if (a.stage, a.op) == (stage, Op.R)]
    return len(recomputed) / microbatches


def _held_in(
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


def _reasons(
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
