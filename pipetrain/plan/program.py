"""The programs of a run: what a schedule orders for a window, and what cut and settings add to it.

A window is what runs between two drains of the pipeline. Its length comes from the configuration alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain, combinations, pairwise
from typing import Any

from pipetrain.errors import ConfigError
from pipetrain.plan.cut import Cut
from pipetrain.schedule.actions import (
    Action,
    Program,
    Schedule,
    ScheduleError,
    asks_for,
    compute_program,
    reads_old,
)
from pipetrain.schedule.lower import lower
from pipetrain.schedule.policy import ForwardBackward
from pipetrain.schedule.simulate import Cost
from pipetrain.schedule.transforms import joined, with_norms, with_recompute, with_ties
from pipetrain.settings import AUTO, RECOMPUTE, Mode, Settings


def window_lengths(batches: int, window: int | None, done: int = 0) -> list[int]:
    """Return the lengths of an epoch's windows after `done` batches; they end where the whole epoch's do."""
    size = window or batches
    ends = [done, *range(done - done % size + size, batches, size), batches]
    return [end - start for start, end in pairwise(ends) if end > start]


def settle_clipping(settings: Settings, schedule: Schedule, draft: Program) -> Settings:
    """Return the settings with clip_grad_norm_over=auto decided by a window's program. Raises ConfigError.

    It becomes model where no forward reads old weights, so that the pipeline is empty at an update anyway.
    """
    over, decides = settings.clip_grad_norm_over, isinstance(schedule, ForwardBackward)
    if settings.clip_grad_norm is None or over == "stage":
        return settings
    if over == "model" and decides:
        raise ConfigError(
            f"clip_grad_norm_over=model needs a schedule with a fixed order, and {settings.schedule} decides "
            f"its order while it runs: choose clip_grad_norm_over=stage, or another schedule"
        )
    if over == "auto":
        over = "stage" if decides or reads_old(draft, settings.microbatches) else "model"
    return replace(settings, clip_grad_norm_over=over)


def make_program(
    schedule: Schedule,
    cut: Cut | None,
    batches: int,
    settings: Settings,
    costs: Cost | None = None,
    recompute: Collection[int] = (),
) -> Program:
    """Return the lowered program of a window, with the norms and ties that its updates wait for.

    `cut`: None for stages of which each sends to the next. `costs`: None if they are not known yet;
    `recompute`: the stages that recompute their forwards. Raises ScheduleError and ConfigError.
    """
    routes, ties = (cut.edges, cut.ties) if cut else (None, [])
    known = {} if costs is None else {"costs": costs}
    compute = draft_program(settings, schedule, batches, routes=routes, recompute=recompute, **known)
    if "recompute" not in asks_for(schedule):
        compute = with_recompute(compute, recompute)
    compute = joined(compute, routes)
    if settings.clip_grad_norm is not None and settings.clip_grad_norm_over == "model":
        compute = with_norms(compute)
    return lower(with_ties(compute, ties) if ties else compute, routes)


def draft_program(settings: Settings, schedule: Schedule, batches: int, **offered: Any) -> Program:
    """Return the compute-only program of a window; `offered`: what is known of the cut model, if it is cut.

    Without, it has the placement and the weight versions that it will have. Raises ScheduleError and
    ConfigError.
    """
    size = settings.ranks, batches, settings.microbatches
    try:
        program = compute_program(schedule, *size, buffer_size=settings.buffer_size, **offered)
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


def refuse_ties(settings: Settings, schedule: Schedule, cut: Cut) -> None:
    """Refuse shared weights whose copies would come apart. Raises ConfigError."""
    if not cut.ties:
        return
    name, stages = next(iter(cut.shared.items()))
    several = f"{name} is a weight of stages {' and '.join(map(str, stages))}"
    together = "keep the layers that share it in one stage by partition="
    if isinstance(schedule, ForwardBackward):
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


def modes_of(recompute: str | Sequence[str], stages: int) -> list[Mode]:
    """Return the mode of each stage for a value of recompute=; auto is never. Raises ConfigError."""
    if not isinstance(recompute, str):
        if len(recompute) != stages:
            raise ConfigError(
                f"recompute=[{','.join(recompute)}] has modes of {len(recompute)} stages, and there are "
                f"{stages}: give one for each, or one of {', '.join(RECOMPUTE)}"
            )
        return [Mode(mode) for mode in recompute]
    if recompute == AUTO:
        return [Mode.NEVER] * stages
    if recompute == "except_last":
        return [Mode.ALWAYS] * (stages - 1) + [Mode.NEVER]
    return [Mode(recompute)] * stages


def recomputing(modes: Sequence[Mode]) -> list[int]:
    """Return the stages that recompute their forwards."""
    return [stage for stage, mode in enumerate(modes) if mode is not Mode.NEVER]
