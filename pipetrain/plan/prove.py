"""The proof of a program: it is sound, it ends within the channel's bounds, and what its stages hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipetrain.errors import ConfigError
from pipetrain.plan.cut import Cut
from pipetrain.schedule.actions import Program, Schedule, has_norms, placement, splits
from pipetrain.schedule.bounds import edge_bounds, widest
from pipetrain.schedule.check import check
from pipetrain.schedule.policy import Bounds, Policy
from pipetrain.schedule.simulate import Deadlock, simulate
from pipetrain.schedule.timeline import Timeline
from pipetrain.settings import Settings


@dataclass(frozen=True, slots=True)
class Window:
    """The lowered program of a window of some number of batches, and its properties."""

    program: Program
    simulation: Timeline
    bounds: list[Bounds]  # by stage


def prove(
    settings: Settings,
    schedule: Schedule,
    cut: Cut,
    programs: Mapping[int, Program],
    evaluation: Program,
) -> tuple[Cut, dict[int, Window]]:
    """Return the cut with the bounds of its edges, and the window of each program.

    `programs`: by number of batches. Raises ScheduleError and ConfigError.
    """
    for batches, program in programs.items():
        refuse_unsound(settings, batches, program, cut)
    bounds = [
        edge_bounds(program, cut.edges, settings.buffer_size, cut.ties)
        for program in (evaluation, *programs.values())
    ]
    cut = cut.bounded(widest(bounds))
    simulate(evaluation, 1, buffer_size=cut.bounds, routes=cut.edges)
    return cut, {n: played(settings, schedule, n, program, cut) for n, program in programs.items()}


def prove_window(
    settings: Settings, schedule: Schedule, batches: int, program: Program, cut: Cut | None = None
) -> Window:
    """Return the window of one program. `cut`: None for stages of which each sends to the next."""
    refuse_unsound(settings, batches, program, cut)
    return played(settings, schedule, batches, program, cut)


def refuse_unsound(settings: Settings, batches: int, program: Program, cut: Cut | None) -> None:
    """Refuse a program that is wrong, or that the engine cannot run. Raises ScheduleError and ConfigError."""
    routes, ties = (cut.edges, cut.ties) if cut else (None, [])
    if splits(program):
        _refuse_splits(settings)
    placement(program)  # one rank a stage: the engine has no replicas yet
    check(program, batches, settings.microbatches, routes, has_norms(program), ties)


def played(settings: Settings, schedule: Schedule, batches: int, program: Program, cut: Cut | None) -> Window:
    """Return the window of a sound program as it is simulated. Raises Deadlock and ConfigError."""
    routes, ties = (cut.edges, cut.ties) if cut else (None, [])
    buffer_size = cut.bounds if cut else settings.buffer_size
    try:
        run = simulate(program, settings.microbatches, buffer_size=buffer_size, routes=routes, ties=ties)
    except Deadlock as blocked:
        if not has_norms(program) and not ties:
            raise
        raise _refused_waits(settings, has_norms(program)) from blocked
    if isinstance(schedule, Policy):  # whose program is one of many
        size = len(program), batches, settings.microbatches
        return Window(program, run, [schedule.bounds(stage, *size) for stage in range(len(program))])
    return Window(program, run, [*map(Bounds, run.activations, run.versions, run.staleness)])


def _refuse_splits(settings: Settings) -> None:
    """Refuse what runs whole backwards only. Raises ConfigError."""
    for on, whole, option in (
        (settings.compile, "torch.compile runs them whole", "compile"),
        (settings.cuda_graphs, "cuda_graphs=true captures whole ones", "cuda_graphs"),
    ):
        if on:
            raise ConfigError(
                f"schedule {settings.schedule} splits backwards, and {whole}: set {option}=false, or choose "
                f"a schedule without I and W"
            )


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
