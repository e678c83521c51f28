"""Which schedule to choose: compares the possible schedules by a model's costs, and recommends the fastest.

Time, bubble and memory are those of each schedule's plan. A plan does not contain what late gradients cost,
so that comes from a study of some small models (see staleness_advice.py). A schedule with late gradients is
planned with the correction that lost least there.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from pipetrain.config.choices import shipped
from pipetrain.config.settings import AUTO, Mode
from pipetrain.errors import ConfigError
from pipetrain.plan.memory_fit import WAYS, peaks_by_rank
from pipetrain.plan.paper_plan import planned
from pipetrain.plan.plan import Plan
from pipetrain.plan.staleness_advice import NONE, Loss, best_of, joined, losses, option
from pipetrain.rules import POSITIVE
from pipetrain.schedule.actions import ScheduleError
from pipetrain.schedule.memory import GIB
from pipetrain.schedule.text import aligned, counted

WORK = 3  # a microbatch's forward and backward, in forwards
CLOSE = 1.01  # times the fastest: counts as equally fast
# How far the speed beside 1f1b is from the predicted one: about the median of docs/results/advice.md, for
# times measured in as many processes as run then. By estimated work it is no less.
ERROR = 0.03
BESIDE = "1f1b"  # the schedule to which others are compared
TRIED = (Mode.SELECTIVE.value, Mode.ALWAYS.value)  # for recompute=auto, if memory_limit= requires it


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with its plan. `best`: the loss with the best correction, `configured`: with the given one.

    `peak`: the bytes of the fullest rank; `seconds`: of an update, or without times in units of a rank's
    computation for a batch; `words`: the rest of the command line that runs it; empty: nothing runs it.
    """

    name: str
    plan: Plan
    peak: int
    seconds: float
    best: Loss | None
    configured: Loss | None
    words: Sequence[str]

    @classmethod
    def from_config(
        cls, name: str, cfg: Mapping[str, Any], batches: int, stages: int, words: Sequence[str]
    ) -> Candidate:
        """Plan a schedule with its own configuration. Raises ConfigError and ScheduleError."""
        studied = losses(str(cfg["optim"].get("_target_")).rpartition(".")[2].lower(), name, stages)
        best, configured = best_of(studied), studied.get(joined("+".join(cfg.get("correction") or [NONE])))
        if best is not None and best is not configured:
            cfg = {**cfg, "correction": shipped("correction", "auto")}
        plan, peak = _fitting(cfg, name, batches)
        if plan.draft.policy:
            raise ScheduleError("decides its order while it runs")
        return cls(name, plan, peak, _seconds(plan), best, configured, words)

    @property
    def late(self) -> int:
        """The most updates between the weights that a gradient was computed with and its own."""
        return max(self.plan.peaks(stage).staleness for stage in range(self.plan.stages))

    @property
    def risk(self) -> float:
        """The loss of accuracy, in units of what is tolerated."""
        return max(self.best.share, 0.0) if self.best else inf if self.late else 0.0

    @property
    def rated(self) -> float:
        """The time by which it is chosen: a late one has to be faster by more than the error."""
        return self.seconds * (1 + ERROR * bool(self.late))

    @property
    def accuracy(self) -> str:
        """What late gradients cost, in words."""
        if self.best is None:
            return "not studied" if self.late else "as one process"
        return f"{self.best} (worst of {counted(self.best.tasks, 'task')}, S={self.best.stages})"

    @property
    def command(self) -> str:
        """The command line that runs it, or its options alone."""
        options = {"schedule": self.name, "microbatches": str(self.plan.settings.microbatches)}
        if self.plan.settings.recompute in TRIED:
            options["recompute"] = str(self.plan.settings.recompute)
        if self.best is not None and self.best is not self.configured:
            options["correction"] = option(self.best.correction)
        words = [f"{key}={value}" for key, value in options.items()]
        if self.words:
            start = ["torchrun", f"--nproc_per_node={self.plan.settings.ranks}", "-m", "pipetrain"]
            words = [*start, *(word for word in self.words if word.partition("=")[0] not in options), *words]
        return shlex.join(words)


def _fitting(cfg: Mapping[str, Any], name: str, batches: int) -> tuple[Plan, int]:
    """Return a schedule's plan with as little recompute as fits memory_limit=, or without if none fits.

    Also the bytes of the fullest rank. Raises ConfigError and ScheduleError.
    """
    limit = POSITIVE.read("memory_limit", cfg["memory_limit"], null=True) or inf
    first = _with_peak(planned({**cfg, "memory_limit": None}, name, batches))
    if first[-1] <= limit * GIB:
        return first
    for recompute in (AUTO, *TRIED) if cfg["recompute"] == AUTO else ():
        with suppress(ConfigError, ScheduleError):
            other = _with_peak(planned({**cfg, "recompute": recompute}, name, batches))
            if other[-1] <= limit * GIB:
                return other
    return first


def _with_peak(plan: Plan) -> tuple[Plan, int]:
    return plan, max(peaks_by_rank(plan.memory()))


def _seconds(plan: Plan) -> float:
    """Return the time of an update; with a correction, including its share of synchronous updates."""
    alone = plan.table.times.alone
    batch = plan.timeline().makespan_shared(alone) / max(plan.windows)
    if share := plan.settings.correction.flushed:
        batch += share * (plan.timeline(1).makespan_shared(alone) - batch)
    return batch if plan.costs else batch / (WORK * plan.settings.microbatches)


# The text


def advice(
    schedules: Mapping[str, tuple[Sequence[Mapping[str, Any]], int, Sequence[str]]],
    stages: int,
    begins: Callable[[str], None] = lambda name: None,
) -> str:
    """Return a row for each schedule, and which one to choose.

    `schedules`: for each name, configurations to try in turn until one can be planned, the batches of a
    window, and the words of the command line that runs it; empty: nothing runs it. `begins`: is called with
    the name that is planned next. Raises ConfigError if none can be planned.
    """
    candidates: dict[str, Candidate] = {}
    refused: dict[str, str] = {}
    for name, (configurations, batches, words) in schedules.items():
        begins(name)
        for cfg in configurations:
            try:
                candidates[name] = Candidate.from_config(name, cfg, batches, stages, words)
                break
            except (ConfigError, ScheduleError) as error:
                refused.setdefault(name, str(error).removeprefix(f"schedule {name} "))
    if not candidates:
        raise ConfigError(f"no schedule can be planned with these settings: {next(iter(refused.values()))}")
    plan, limit = next(iter(candidates.values())).plan, cfg["memory_limit"]
    title = f"{plan.settings.model} on {counted(plan.settings.ranks, 'rank')}, batches of "
    head = ["schedule", "microbatches", "ms an update" if plan.costs else "update", f"x {BESIDE}", "bubble"]
    rows = [[*head, "MiB", *([f"fits {limit:g} GiB"] if limit else []), "late", "accuracy"]]
    for name in schedules:
        if name in candidates:
            rows.append(_row(candidates[name], candidates.get(BESIDE), limit))
        else:
            rows.append([name, *["-"] * (len(rows[0]) - 2), refused[name].split("; ")[0].split(": ")[0]])
    unit = "" if plan.costs else "update: its time, where 1 is what a rank computes for a batch\n"
    return (
        f"{title}{plan.settings.batch_size}\n\n{aligned(rows)}\n\n{unit}MiB: of the fullest rank; late: the "
        f"most updates between the weights of a gradient and its own; accuracy: against one process\n\n"
        f"{_recommended([*candidates.values()], candidates.get(BESIDE), limit)}"
    )


def _row(candidate: Candidate, reference: Candidate | None, limit: float | None) -> list[str]:
    time = f"{1e3 * candidate.seconds:.2f}" if candidate.plan.costs else f"{candidate.seconds:.3f}"
    speed = f"{reference.seconds / candidate.seconds:.2f}" if reference else "-"
    modes = list(dict.fromkeys(mode.value for mode in candidate.plan.modes if mode is not Mode.NEVER))
    fits = f"recompute {', '.join(modes)}" if modes else "yes"
    configured = candidate.configured if candidate.configured is not candidate.best else None
    return [
        candidate.name,
        str(candidate.plan.settings.microbatches),
        time,
        speed,
        f"{candidate.plan.timeline().bubble:.1%}",
        f"{candidate.peak / 2**20:.1f}",
        *([fits if candidate.peak <= limit * GIB else "no"] if limit else []),
        str(candidate.late),
        f"{configured}; {candidate.accuracy}" if configured else candidate.accuracy,
    ]


def _recommended(candidates: Sequence[Candidate], reference: Candidate | None, limit: float | None) -> str:
    """Return which schedule is the fastest that fits and loses little, and which is faster at more risk."""

    def said(candidate: Candidate) -> str:
        speed = (
            f"{reference.seconds / candidate.seconds:.2f} times as fast as {BESIDE}, " if reference else ""
        )
        return f"{candidate.name}, {speed if candidate is not reference else ''}{candidate.accuracy}"

    fit = [candidate for candidate in candidates if candidate.peak <= (limit or inf) * GIB]
    if not fit:
        least = min(candidates, key=lambda candidate: candidate.peak)
        needs = f"{least.name} needs least, {least.peak / GIB:.4g} GiB on its fullest rank"
        return f"None fits memory_limit={limit:g}: {needs}; {WAYS}\n"
    safe = [candidate for candidate in fit if candidate.risk <= 1]
    fastest = min((candidate.rated for candidate in safe), default=inf)
    close = [candidate for candidate in safe if candidate.rated <= CLOSE * fastest]
    best = min(close, key=lambda candidate: (candidate.risk, candidate.peak), default=None)
    text = f"Recommended: {said(best)}:\n  {best.command}\n" if best else "None is known to lose little.\n"
    if best is not None:
        text += _within_error(best, safe) + _against_exact(fit, safe) + _processes(best.plan)
        fastest = min(fastest, best.seconds)
    risky = [candidate for candidate in fit if candidate.risk > 1 and CLOSE * candidate.seconds < fastest]
    if risky:
        other = min(risky, key=lambda candidate: (candidate.seconds, candidate.risk))
        text += f"Faster, at more risk: {said(other)}.\n"
    return text


def _within_error(best: Candidate, safe: Sequence[Candidate]) -> str:
    """Name the schedules that may as well be the fastest."""
    near = [candidate for candidate in safe if candidate is not best]
    near = [candidate for candidate in near if abs(candidate.seconds / best.seconds - 1) <= ERROR]
    if not near:
        return ""
    names = ", ".join(candidate.name for candidate in sorted(near, key=lambda candidate: candidate.seconds))
    least = "" if best.plan.costs else "at least "
    return f"Within its error of {least}{ERROR:.0%}: {names}; try {'both' if len(near) == 1 else 'them'}.\n"


def _against_exact(fit: Sequence[Candidate], safe: Sequence[Candidate]) -> str:
    """Compare the fastest late schedule that loses little with the fastest exact one that holds no more."""
    late = min((c for c in safe if c.late), key=lambda c: c.seconds, default=None)
    exact = (c for c in fit if late is not None and not c.late and c.peak <= late.peak)
    best = min(exact, key=lambda c: c.seconds, default=None)
    if late is None or best is None:
        return ""
    gain = best.seconds / late.seconds
    pays = f"pays if a loss takes it less than {gain:.2f} times the updates" if gain > 1 else "gains nothing"
    return (
        f"Asynchronous: {late.name} is {gain:.2f} times as fast an update as {best.name}, the fastest exact "
        f"schedule that holds no more: it {pays}.\n"
    )


def _processes(plan: Plan) -> str:
    """Say how far processes slow each other, or where the profile was measured with others."""
    ranks, times = plan.settings.ranks, plan.table.times
    measured = times.machine.get("ranks")
    if measured == ranks and times.alone < 1:
        return (
            f"The {ranks} processes slow each other: one that computes alone takes {times.alone:.0%} of the "
            f"time, measured, so that a bubble costs less.\n"
        )
    if measured in (None, ranks) or times.machine.get("device") != "cpu":
        return ""
    return (
        f"The profile was measured with {measured} at a time, and {ranks} processes will run: where they "
        f"share cores or memory they slow each other, so measure it with {ranks}.\n"
    )
