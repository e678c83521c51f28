"""The windows of a run: the program of each length, proven for what joins the stages.

A window is what runs between two drains of the pipeline. Its length comes from the configuration alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, pairwise

from pipetrain.errors import ConfigError
from pipetrain.plan.cut import Cut
from pipetrain.schedule.actions import (
    Action,
    Edge,
    Op,
    Program,
    Schedule,
    ScheduleError,
    has_norms,
    placement,
    splits,
)
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import lower
from pipetrain.schedule.policy import Bounds, Policy, compute_program
from pipetrain.schedule.simulate import Deadlock, simulate
from pipetrain.schedule.timeline import Timeline
from pipetrain.schedule.transforms import joined, with_norms, with_ties
from pipetrain.settings import Settings


@dataclass(frozen=True, slots=True)
class Window:
    """The lowered program of a window of some number of batches, and its properties."""

    program: Program
    simulation: Timeline
    bounds: list[Bounds]  # by stage


def window_lengths(batches: int, window: int | None, done: int = 0) -> list[int]:
    """Return the lengths of an epoch's windows after `done` batches; they end where the whole epoch's do."""
    size = window or batches
    ends = [done, *range(done - done % size + size, batches, size), batches]
    return [end - start for start, end in pairwise(ends) if end > start]


def settle_clipping(settings: Settings, schedule: Schedule, batches: int) -> Settings:
    """Return the settings with clip_grad_norm_over=auto decided by a window of `batches`. Raises ConfigError.

    It becomes model where no forward reads old weights, so that the pipeline is empty at an update anyway.
    """
    over, decides = settings.clip_grad_norm_over, isinstance(schedule, Policy)
    if settings.clip_grad_norm is None or over == "stage":
        return settings
    if over == "model" and decides:
        raise ConfigError(
            f"clip_grad_norm_over=model needs a schedule with a fixed order, and {settings.schedule} decides "
            f"its order while it runs: choose clip_grad_norm_over=stage, or another schedule"
        )
    if over == "auto":
        program = [] if decides else _compute(settings, schedule, batches)
        forwards = [a for actions in program for a in actions if a.op is Op.F]
        flushes = not decides and all(a.version == a.mb // settings.microbatches for a in forwards)
        over = "model" if flushes else "stage"
    return replace(settings, clip_grad_norm_over=over)


def _compute(
    settings: Settings, schedule: Schedule, batches: int, routes: Sequence[Edge] | None = None
) -> Program:
    size = settings.ranks, batches, settings.microbatches
    try:
        program = compute_program(schedule, *size, settings.buffer_size, routes)
    except (ConfigError, ScheduleError):
        raise
    except Exception as error:  # an unknown argument, or a bug in the schedule
        raise ConfigError(
            f"schedule {settings.schedule} cannot be made: {type(error).__name__}: {error}"
        ) from error
    for action in chain.from_iterable(program):
        if not isinstance(action, Action):
            raise ConfigError(
                f"schedule {settings.schedule} gives {action!r} as an action: a program is a list of Action "
                f"for each rank"
            )
    return program


def prove(settings: Settings, schedule: Schedule, batches: int, cut: Cut | None = None) -> Window:
    """Make the program of one window, and check it for soundness and deadlock.

    `cut`: None before there is one; each stage then sends to the next. Raises ScheduleError, ConfigError.
    """
    routes, ties = (cut.edges, cut.ties) if cut else (None, [])
    buffer_size = cut.bounds if cut else settings.buffer_size
    program = lowered(settings, schedule, batches, cut)
    if settings.compile and splits(program):
        raise ConfigError(
            f"schedule {settings.schedule} splits backwards, and torch.compile runs them whole: set "
            f"compile=false, or choose a schedule without I and W"
        )
    if settings.cuda_graphs and splits(program):
        raise ConfigError(
            f"schedule {settings.schedule} splits backwards, and cuda_graphs=true captures whole ones: set "
            f"cuda_graphs=false, or choose a schedule without I and W"
        )
    placement(program)  # one rank a stage: the engine has no replicas yet
    check(program, batches, settings.microbatches, routes, _norms(settings), ties)
    try:
        run = simulate(program, settings.microbatches, buffer_size=buffer_size, routes=routes, ties=ties)
    except Deadlock as blocked:
        if not has_norms(program) and not ties:
            raise
        raise _refused_waits(settings, has_norms(program)) from blocked
    bounds = [*map(Bounds, run.activations, run.versions, run.staleness)]
    if isinstance(schedule, Policy):
        stages = len(program)
        bounds = [schedule.bounds(stage, stages, batches, settings.microbatches) for stage in range(stages)]
    return Window(program, run, bounds)


def _refused_waits(settings: Settings, norms: bool) -> ConfigError:
    """Return the error for updates that would wait for each other for good."""
    waits, way = (
        ("the norm of the model", "set clip_grad_norm_over=stage")
        if norms
        else ("weights that stages share", "keep the layers that share a weight in one stage by partition=")
    )
    return ConfigError(
        f"schedule {settings.schedule} steps a stage while others still have work of that batch, so that its "
        f"updates cannot wait for {waits}: {way}, or choose another schedule"
    )


def _norms(settings: Settings) -> bool:
    """Return whether updates wait for the gradient norm of all stages."""
    return settings.clip_grad_norm is not None and settings.clip_grad_norm_over == "model"


def lowered(settings: Settings, schedule: Schedule, batches: int, cut: Cut | None) -> Program:
    """Return the lowered program of one window, with the norms and ties that its updates wait for."""
    routes, ties = (cut.edges, cut.ties) if cut else (None, [])
    compute = joined(_compute(settings, schedule, batches, routes), routes)
    if _norms(settings):
        compute = with_norms(compute)
    return lower(with_ties(compute, ties) if ties else compute, routes)


def refuse_ties(settings: Settings, schedule: Schedule, cut: Cut) -> None:
    """Refuse shared weights whose copies would come apart. Raises ConfigError."""
    if not cut.ties:
        return
    name, stages = next(iter(cut.shared.items()))
    several = f"{name} is a weight of stages {' and '.join(map(str, stages))}"
    together = "keep the layers that share it in one stage by partition="
    if isinstance(schedule, Policy):
        raise ConfigError(
            f"{several}, which step it by one gradient, and {settings.schedule} decides its order while it "
            f"runs: {together}, or choose a schedule with a fixed order"
        )
    if settings.clip_grad_norm is not None and settings.clip_grad_norm_over == "stage":
        raise ConfigError(
            f"{several}, and clip_grad_norm_over=stage would scale its gradient by the norm of each: choose "
            f"clip_grad_norm_over=model, or {together}"
        )
    chained = [(a, b) for a, b in combinations(cut.ties, 2) if not set(a).isdisjoint(b)]
    if chained and settings.on_nan == "skip" and settings.clip_grad_norm is None:
        (first, *_), (*_, last) = chained[0]
        raise ConfigError(
            f"stages {first} to {last} share weights by way of another one, and with on_nan=skip some could "
            f"leave an update out that others make: set clip_grad_norm, by which all stages leave it out, or "
            f"{together}"
        )
