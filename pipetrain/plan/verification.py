"""The programs of a run, and their verification: each is sound, and ends within the channel's bounds.

A Draft is what a schedule determines before the model is known. A window of the cut model, for training or
evaluation, is verified once: with the plan, or at its first use.

A window is what runs between two drains of the pipeline. Its length comes from the configuration alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, combinations
from typing import Any

from pipetrain.config.settings import AUTO, Mode, Settings
from pipetrain.correction import Auto, Correction
from pipetrain.errors import ConfigError
from pipetrain.plan.cut import Cut
from pipetrain.schedule.actions import (
    Action,
    Edge,
    Op,
    Placement,
    Program,
    Schedule,
    ScheduleError,
    Ties,
    asks_for,
    has_norms,
    ranks_of,
    reads_old,
    splits,
)
from pipetrain.schedule.buffer_bounds import edge_bounds, widest
from pipetrain.schedule.check import check
from pipetrain.schedule.fixed_program import FixedProgram
from pipetrain.schedule.lower import Lowering, lower
from pipetrain.schedule.policy import ForwardBackward
from pipetrain.schedule.posting_order import Posts, make_posts
from pipetrain.schedule.programs import forward_only
from pipetrain.schedule.replicas import spread_program
from pipetrain.schedule.simulate import SHOWN, Cost, Deadlock, simulate
from pipetrain.schedule.text import counted
from pipetrain.schedule.timeline import Bounds, Timeline
from pipetrain.schedule.transforms import (
    joined,
    with_delays,
    with_norms,
    with_recompute,
    with_ties,
    without_first_recompute,
)

TOGETHER = "keep the layers that share it in one stage by partition="
DRAFTED = 2  # batches: the second shows whether weights are read late


@dataclass(frozen=True, slots=True)
class Window:
    """The lowered program of a window of so many batches, or of a whole evaluation, and its properties."""

    program: Program
    simulation: Timeline
    bounds: list[Bounds]  # by stage
    home: Callable[[int, int], int]  # the rank that runs a (stage, microbatch)
    posts: Posts | None = None  # None: the order is decided at run time, and messages are staged


class VerifiedWindows(dict[int, Window]):
    """The windows of a plan, by their number of batches; `verified` verifies a new one at its first use.

    `examples`: the given windows are only examples, which are dropped at the first use.
    """

    def __init__(
        self, windows: Mapping[int, Window], verify: Callable[[int], Window], examples: bool = False
    ) -> None:
        super().__init__(windows)
        self._verify = verify
        self._examples = examples

    def verified(self, batches: int) -> Window:
        """Return the window of so many batches. Raises ScheduleError and ConfigError."""
        window = self.get(batches) or self._verify(batches)
        if self._examples:
            self.clear()
            self._examples = False
        self[batches] = window
        return window


@dataclass(frozen=True)
class Draft:
    """What settings and a schedule determine before the model is known, with a program of some batches.

    `settings`: with what follows from the program. Programs of any length have its `placement`: the ranks of
    each stage. `least`: the batches of the shortest window. With replicas=auto this is the longest straight
    pipeline that the schedule can have, which shows what it reads; the chosen replicas have their own draft.
    """

    settings: Settings
    schedule: Schedule = field(compare=False)
    batches: int
    program: Program
    placement: Placement
    least: int = 1

    @classmethod
    def from_settings(cls, settings: Settings, schedule: Schedule) -> Draft:
        """Return the draft of a schedule. Raises ScheduleError and ConfigError."""
        least = schedule.batches if isinstance(schedule, FixedProgram) else 1
        batches = DRAFTED if least == 1 else least
        make = _longest if settings.replicas == AUTO else _compute_only
        program = make(settings, schedule, batches)
        draft = cls(settings, schedule, batches, program, ranks_of(program), least)
        _refuse_undecided(draft)
        _refuse_replicas(draft)
        return draft if settings.replicas == AUTO else replace(draft, settings=_with_clipping_decided(draft))

    @property
    def policy(self) -> ForwardBackward | None:
        """The policy that decides the order at run time; all programs are then examples."""
        return self.schedule if isinstance(self.schedule, ForwardBackward) else None

    @cached_property
    def reads_late(self) -> bool:
        """Whether some forwards read weights that lack updates of earlier batches."""
        size = len(self.placement), self.batches, self.settings.microbatches
        if self.policy:
            return any(self.policy.bounds(stage, *size).staleness for stage in range(len(self.placement)))
        return reads_old(self.program, self.settings.microbatches)

    @property
    def shown(self) -> int:
        """The batches of a window that is typical of an epoch's windows."""
        whole = min(self.settings.window or SHOWN, SHOWN) if self.reads_late else 1
        return max(whole, self.least)

    def refuse_unsound(self) -> None:
        """Refuse what works on no cut, before there is a model's. Raises ScheduleError and ConfigError."""
        batches = max(self.least, min(self.settings.window or self.shown, self.batches))
        program, m = make_program(self, None, batches), self.settings.microbatches
        _refuse_compile(self.settings, program)
        check(program, batches, m, norms=has_norms(program))
        with _explained(self, has_norms(program), ties=()):
            simulate(program, m, buffer_size=edge_bounds(program, None, self.settings.buffer_sizes))


def _compute_only(settings: Settings, schedule: Schedule, batches: int, **offered: Any) -> Program:
    """Return the compute-only program of a window. Raises ScheduleError and ConfigError.

    `offered`: what depends on the cut model. Placement and weight versions do not depend on it.
    """
    size = settings.places, batches, settings.microbatches
    try:
        program = spread_program(schedule, *size, buffer_size=min(settings.buffer_sizes), **offered)
        actions = [*chain.from_iterable(program)]
        if not actions or not all(isinstance(action, Action) for action in actions):
            raise TypeError("a program is a list of Action for each rank")
    except (ConfigError, ScheduleError):
        raise
    except Exception as error:  # an unknown argument, or a bug in the schedule
        raise ConfigError(
            f"schedule {settings.schedule} cannot be made: {type(error).__name__}: {error}; let it be a "
            f"function of (ranks, batches, microbatches) that returns a list of Action for each rank"
        ) from error
    return program


def _longest(settings: Settings, schedule: Schedule, batches: int) -> Program:
    """Return the program of the longest possible straight pipeline, of at most all ranks."""
    for ranks in range(settings.ranks, 1, -1):
        with suppress(ConfigError, ScheduleError):
            return _compute_only(replace(settings, ranks=ranks, replicas=None), schedule, batches)
    return _compute_only(replace(settings, ranks=1, replicas=None), schedule, batches)


def make_program(
    draft: Draft, cut: Cut | None, batches: int, costs: Cost | None = None, modes: Sequence[Mode] = ()
) -> Program:
    """Return the lowered program of a window, with the norms and ties that its updates wait for.

    `cut`: None for stages that each send to the next one. `costs`: None if unknown; `modes`: of recompute, of
    each stage; none: nothing is recomputed. Raises ScheduleError and ConfigError.
    """
    (routes, ties), settings = _joins(cut), draft.settings
    recompute = [stage for stage, mode in enumerate(modes) if mode is not Mode.NEVER]
    spared = [stage for stage, mode in enumerate(modes) if mode is Mode.EXCEPT_FIRST_MICROBATCH]
    offered = {"routes": routes, "recompute": recompute} | ({} if costs is None else {"costs": costs})
    compute = _compute_only(settings, draft.schedule, batches, **offered)
    if "recompute" not in asks_for(draft.schedule):
        compute = with_recompute(compute, recompute)
    compute = without_first_recompute(compute, spared, settings.microbatches)
    compute, correction = joined(compute, routes), settings.correction
    if correction.predicts or correction.rates:
        compute = with_delays(compute, settings.microbatches, correction.predicts, correction.rates)
    if settings.clip_grad_norm is not None and settings.clip_grad_norm_over == "model":
        compute = with_norms(compute)
    return lower(with_ties(compute, ties) if ties else compute, routes)


def _joins(cut: Cut | None) -> tuple[list[Edge] | None, Ties]:
    return (cut.edges, cut.ties) if cut else (None, [])


# Verification


def verify(
    draft: Draft,
    cut: Cut,
    lengths: Sequence[int],
    evaluated: int,
    costs: Cost,
    modes: Sequence[Mode] = (),
    examples: bool = False,
) -> tuple[Cut, VerifiedWindows, VerifiedWindows]:
    """Return the cut with the bounds of its edges, the windows of these `lengths`, and those of evaluations.

    `evaluated`: the microbatches of an evaluation; `costs`, `modes`: see `make_program`; `examples`: see
    VerifiedWindows. Raises ScheduleError and ConfigError.
    """
    make = partial(make_program, draft, cut, costs=costs, modes=modes)

    def evaluating(batches: int) -> Program:
        return lower(forward_only(draft.placement, batches), cut.edges)

    evaluation = evaluating(evaluated)
    programs = {batches: _sound(draft, batches, make(batches), cut) for batches in lengths}
    all_programs = [evaluation, *programs.values()]
    with _explained(draft, any(map(has_norms, all_programs)), cut.ties):
        bounds = [
            edge_bounds(lowered, cut.edges, draft.settings.buffer_sizes, cut.ties) for lowered in all_programs
        ]
        bounded = cut.bounded(widest(bounds))
        first = {evaluated: _simulated(draft, evaluated, evaluation, bounded, trains=False)}
        training = {n: _simulated(draft, n, program, bounded) for n, program in programs.items()}

    windows = VerifiedWindows(training, lambda n: _verified(draft, n, make(n), bounded), examples)
    played = VerifiedWindows(first, lambda n: _simulated(draft, n, evaluating(n), bounded, trains=False))
    return bounded, windows, played


def _verified(draft: Draft, batches: int, program: Program, cut: Cut) -> Window:
    """Return a program's window; `cut`: with its bounds. Raises ScheduleError and ConfigError."""
    with _explained(draft, has_norms(program), cut.ties):
        return _simulated(draft, batches, _sound(draft, batches, program, cut), cut)


def _sound(draft: Draft, batches: int, program: Program, cut: Cut) -> Program:
    """Check a program, and return it. Raises ScheduleError and ConfigError."""
    _refuse_unlike_rates(draft.settings, program, cut.ties)
    _refuse_compile(draft.settings, program)
    check(program, batches, draft.settings.microbatches, cut.edges, has_norms(program), cut.ties)
    return program


def _refuse_unlike_rates(settings: Settings, program: Program, ties: Ties) -> None:
    steps = [action for action in chain.from_iterable(program) if action.op is Op.STEP]
    delays = [{(a.version, a.delay) for a in steps if a.stage in tie} for tie in ties]
    if any(len(delays_of_tie) > len({version for version, _ in delays_of_tie}) for delays_of_tie in delays):
        raise ConfigError(
            f"the correction sets the rate by how late a stage is, and with schedule {settings.schedule} "
            f"stages that share a weight are not equally late: leave the correction out, or {TOGETHER}"
        )


def _simulated(draft: Draft, batches: int, program: Program, cut: Cut, trains: bool = True) -> Window:
    """Simulate a sound program, and return its window. Raises Deadlock."""
    m, policy, ranks = draft.settings.microbatches if trains else 1, draft.policy, len(program)
    run = simulate(program, m, buffer_size=cut.bounds, routes=cut.edges, ties=cut.ties)
    home = Lowering.for_program(program).rank
    if policy and trains:  # the program is one of many
        peaks = [policy.bounds(stage, ranks, batches, m) for stage in range(ranks)]
        return Window(program, run, peaks, home)
    peaks = [*map(Bounds, run.activations, run.versions, run.staleness)]
    return Window(program, run, peaks, home, make_posts(run, cut.bounds, cut.ties))


@contextmanager
def _explained(draft: Draft, norms: bool, ties: Ties) -> Iterator[None]:
    """Raise ConfigError with advice if updates would wait for each other forever."""
    try:
        yield
    except Deadlock as blocked:
        if not norms and not ties:
            raise
        way = "set clip_grad_norm_over=stage" if norms else TOGETHER
        raise ConfigError(
            f"schedule {draft.settings.schedule} steps a stage while others still have work of that batch, "
            f"so its updates cannot wait for {'the norm of the model' if norms else 'each other'}: {way}, or "
            f"choose another schedule"
        ) from blocked


# What settings require of a program


def _refuse_compile(settings: Settings, program: Program) -> None:
    """Refuse torch.compile of stages whose backwards are split."""
    if settings.compile and splits(program):
        raise ConfigError(
            f"schedule {settings.schedule} splits backwards, and compile runs them whole: leave "
            f"compile out, or choose a schedule without I and W"
        )


def _refuse_replicas(draft: Draft) -> None:
    """Refuse more replicas than microbatches."""
    settings, most = draft.settings, max(map(len, draft.placement))
    if most > settings.microbatches and settings.batchnorm == "batch":
        raise ConfigError(
            f"batchnorm=batch needs a microbatch of each batch on every replica: choose microbatches={most}"
        )
    window = settings.window or most if draft.reads_late else 1
    if most > settings.microbatches * window:
        few = counted(settings.microbatches * window, "microbatch")
        raise ConfigError(
            f"a stage has {most} replicas, and a {'window' if draft.reads_late else 'batch'} has {few}, so "
            f"that some would have nothing to do: choose microbatches={most}, or fewer replicas"
        )


def _refuse_undecided(draft: Draft) -> None:
    """Refuse what needs a fixed order, of a schedule that decides its order while it runs."""
    if not draft.policy:
        return
    settings, correction = draft.settings, draft.settings.correction
    straight = draft.placement == [(rank,) for rank in range(settings.ranks)]
    decides = f"{settings.schedule} decides its order while it runs"
    if settings.replicas == AUTO or not straight:
        raise ConfigError(
            f"schedule {decides}, and replicas take turns in a fixed one: choose another schedule, or leave "
            f"replicas and placement out"
        )
    if correction != Correction() and not isinstance(correction, Auto):  # which is then none
        raise ConfigError(
            f"correction goes by the delays that a program says, and {decides}: choose another schedule, or "
            f"correction=none"
        )
    if settings.clip_grad_norm is not None and settings.clip_grad_norm_over == "model":
        raise ConfigError(
            f"clip_grad_norm_over=model needs a schedule with a fixed order, and {decides}: choose "
            f"clip_grad_norm_over=stage, or another schedule"
        )


def _with_clipping_decided(draft: Draft) -> Settings:
    """Return the settings with clip_grad_norm_over=auto decided by the program. Raises ConfigError.

    It becomes model if no forward reads old weights: the pipeline is then empty at an update anyway.
    """
    settings = draft.settings
    over = settings.clip_grad_norm_over
    if settings.clip_grad_norm is None or over == "stage":
        return settings
    if over == "auto":
        over = "stage" if draft.policy or draft.reads_late else "model"
    return replace(settings, clip_grad_norm_over=over)


def refuse_ties(draft: Draft, cut: Cut) -> None:
    """Refuse shared weights if their copies would diverge. Raises ConfigError."""
    if not cut.ties:
        return
    settings = draft.settings
    name, stages = next(iter(cut.shared.items()))
    by_stage = settings.clip_grad_norm is not None and settings.clip_grad_norm_over == "stage"
    chained = any(not set(a).isdisjoint(b) for a, b in combinations(cut.ties, 2))
    if draft.policy:
        why = f"{settings.schedule} decides its order while it runs: choose a schedule with a fixed one"
    elif by_stage:
        why = "clip_grad_norm_over=stage scales it by another norm on each: choose clip_grad_norm_over=model"
    elif chained and settings.on_nan == "skip" and settings.clip_grad_norm is None:
        why = (
            "some of these share others too, so that with on_nan=skip one could leave an update out that "
            "another makes: set clip_grad_norm, by which all leave it out"
        )
    else:
        return
    raise ConfigError(
        f"{name} is a weight of stages {' and '.join(map(str, stages))}, which step it alike, and {why}, or "
        f"{TOGETHER}"
    )
