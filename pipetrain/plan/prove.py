"""The proof of a program: it is sound, it ends within the channel's bounds, and what its stages hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pipetrain.errors import ConfigError
from pipetrain.plan.cut import Cut
from pipetrain.schedule.actions import Program, Schedule, has_norms, placement, splits
from pipetrain.schedule.bounds import edge_bounds, widest
from pipetrain.schedule.check import check
from pipetrain.schedule.policy import Bounds, ForwardBackward
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
        _refuse_unsound(settings, batches, program, cut)
    every = [evaluation, *programs.values()]
    with _named_waits(settings, every, cut):
        cut = cut.bounded(
            widest([edge_bounds(one, cut.edges, settings.buffer_size, cut.ties) for one in every])
        )
        simulate(evaluation, 1, buffer_size=cut.bounds, routes=cut.edges)
        return cut, {n: _played(settings, schedule, n, program, cut) for n, program in programs.items()}


def prove_window(
    settings: Settings, schedule: Schedule, batches: int, program: Program, cut: Cut | None = None
) -> Window:
    """Return the window of one program. `cut`: None for stages of which each sends to the next.

    Raises ScheduleError and ConfigError.
    """
    _refuse_unsound(settings, batches, program, cut)
    with _named_waits(settings, [program], cut):
        return _played(settings, schedule, batches, program, cut)


def _refuse_unsound(settings: Settings, batches: int, program: Program, cut: Cut | None) -> None:
    """Refuse a program that is wrong, or that the engine cannot run. Raises ScheduleError and ConfigError."""
    routes, ties = (cut.edges, cut.ties) if cut else (None, [])
    if splits(program):
        _refuse_splits(settings)
    placement(program)  # one rank a stage: the engine has no replicas yet
    check(program, batches, settings.microbatches, routes, has_norms(program), ties)


def _played(
    settings: Settings, schedule: Schedule, batches: int, program: Program, cut: Cut | None
) -> Window:
    """Return the window of a sound program. Raises Deadlock."""
    routes, ties = (cut.edges, cut.ties) if cut else (None, [])
    buffer_size = cut.bounds if cut else settings.buffer_size
    run = simulate(program, settings.microbatches, buffer_size=buffer_size, routes=routes, ties=ties)
    if isinstance(schedule, ForwardBackward):  # whose program is one of many
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


@contextmanager
def _named_waits(settings: Settings, programs: Sequence[Program], cut: Cut | None) -> Iterator[None]:
    """Say it in a sentence where updates would wait for each other for good. Raises ConfigError."""
    try:
        yield
    except Deadlock as blocked:
        if any(map(has_norms, programs)):
            waits, way = "the norm of the model", "set clip_grad_norm_over=stage"
        elif cut and cut.ties:
            waits = "weights that stages share"
            way = "keep the layers that share a weight in one stage by partition="
        else:
            raise
        raise ConfigError(
            f"schedule {settings.schedule} steps a stage while others still have work of that batch, so that "
            f"its updates cannot wait for {waits}: {way}, or choose another schedule"
        ) from blocked
