"""Which schedule to take: those that can run side by side, by a model's costs, and the fastest that may be.

Time, bubble and memory are those of each one's plan. A plan does not know what late gradients cost, so that
is what a study measured of some small models (see advice.py). A schedule with them is planned with the
correction that lost least there.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from pipetrain.config.build import make_schedule
from pipetrain.config.choices import shipped
from pipetrain.config.settings import AUTO, Mode
from pipetrain.errors import ConfigError
from pipetrain.plan.memory_fit import WAYS, peaks_by_rank
from pipetrain.plan.paper_plan import planned
from pipetrain.plan.plan import Plan
from pipetrain.plan.staleness_advice import NONE, Loss, best_of, joined, losses, option
from pipetrain.rules import POSITIVE
from pipetrain.schedule.actions import ScheduleError
from pipetrain.schedule.draw import aligned, counted
from pipetrain.schedule.memory import GIB
from pipetrain.schedule.policy import ForwardBackward

WORK = 3  # forwards that a microbatch takes, with its backward
CLOSE = 1.01  # times the fastest, that is as fast
BESIDE = "1f1b"  # what others are compared with
TRIED = (Mode.SELECTIVE.value, Mode.ALWAYS.value)  # for recompute=auto, where memory_limit= asks for it


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with its plan. `lost`: with the best correction, and with that of the configuration.

    `peak`: the bytes of the fullest rank; `seconds`: of an update, without times in those that a rank
    computes for a batch; `words`: of the command line that runs it, beside its own; none: nothing runs it.
    """

    name: str
    plan: Plan
    peak: int
    seconds: float
    lost: tuple[Loss | None, Loss | None]
    words: Sequence[str]

    @classmethod
    def of(
        cls, name: str, cfg: Mapping[str, Any], batches: int, stages: int, words: Sequence[str]
    ) -> Candidate:
        """Plan a schedule by a configuration of its own. Raises ConfigError and ScheduleError."""
        if isinstance(make_schedule(cfg), ForwardBackward):
            raise ScheduleError("decides its order while it runs")
        studied = losses(str(cfg["optim"].get("_target_")).rpartition(".")[2].lower(), name, stages)
        best, asked = best_of(studied), studied.get(joined("+".join(cfg.get("correction") or [NONE])))
        if best is not None and best is not asked:
            cfg = {**cfg, "correction": shipped("correction", "auto")}
        plan, peak = _fitting(cfg, name, batches)
        return cls(name, plan, peak, _seconds(plan), (best, asked), words)

    @property
    def late(self) -> int:
        """The most updates between the weights of a gradient and its own."""
        return max(self.plan.peaks(stage).staleness for stage in range(self.plan.stages))

    @property
    def risk(self) -> float:
        """The accuracy that is lost, in what is tolerated."""
        best, _ = self.lost
        return max(best.share, 0.0) if best else inf if self.late else 0.0

    @property
    def accuracy(self) -> str:
        """What late gradients cost, in words."""
        best, _ = self.lost
        if best is None:
            return "not studied" if self.late else "as one process"
        return f"{best} (worst of {counted(best.tasks, 'task')}, S={best.stages})"

    @property
    def command(self) -> str:
        """The command line that runs it, or its options alone."""
        own = {"schedule": self.name, "microbatches": str(self.plan.settings.microbatches)}
        if self.plan.settings.recompute in TRIED:
            own["recompute"] = str(self.plan.settings.recompute)
        best, asked = self.lost
        if best is not None and best is not asked:
            own["correction"] = option(best.correction)
        words = [f"{key}={value}" for key, value in own.items()]
        if self.words:
            start = ["torchrun", f"--nproc_per_node={self.plan.settings.ranks}", "-m", "pipetrain"]
            words = [*start, *(word for word in self.words if word.partition("=")[0] not in own), *words]
        return shlex.join(words)


def _fitting(cfg: Mapping[str, Any], name: str, batches: int) -> tuple[Plan, int]:
    """Return a schedule's plan with as little recomputation as fits memory_limit=, or without if none does.

    Beside it the bytes of the fullest rank. Raises ConfigError and ScheduleError.
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
    """Return the time of an update, with the share of the updates that a correction makes synchronous."""
    batch = plan.timeline().makespan / max(plan.windows)
    if share := plan.settings.correction.flushed:
        batch += share * (plan.timeline(1).makespan - batch)
    return batch if plan.costs else batch / (WORK * plan.settings.microbatches)


# The text


def advice(
    schedules: Mapping[str, tuple[Sequence[Mapping[str, Any]], int, Sequence[str]]],
    stages: int,
    begins: Callable[[str], None] = lambda name: None,
) -> str:
    """Return a row for each schedule, and which one to take.

    `schedules`: by name, configurations of which the first that can be is planned, the batches of a window,
    and the words of the command line that runs it; none: there is nothing to run. `begins`: is told which is
    planned next. Raises ConfigError if none can be planned.
    """
    candidates: dict[str, Candidate] = {}
    refused: dict[str, str] = {}
    for name, (configurations, batches, words) in schedules.items():
        begins(name)
        for cfg in configurations:
            try:
                candidates[name] = Candidate.of(name, cfg, batches, stages, words)
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


def _row(one: Candidate, beside: Candidate | None, limit: float | None) -> list[str]:
    time = f"{1e3 * one.seconds:.2f}" if one.plan.costs else f"{one.seconds:.3f}"
    speed = f"{beside.seconds / one.seconds:.2f}" if beside else "-"
    modes = list(dict.fromkeys(mode.value for mode in one.plan.modes if mode is not Mode.NEVER))
    fits = f"recompute {', '.join(modes)}" if modes else "yes"
    best, asked = one.lost
    return [
        *(one.name, str(one.plan.settings.microbatches), time, speed, f"{one.plan.timeline().bubble:.1%}"),
        f"{one.peak / 2**20:.1f}",
        *([fits if one.peak <= limit * GIB else "no"] if limit else []),
        str(one.late),
        f"{asked}; {one.accuracy}" if asked and asked is not best else one.accuracy,
    ]


def _recommended(candidates: Sequence[Candidate], beside: Candidate | None, limit: float | None) -> str:
    """Say which is the fastest that fits and loses what is tolerated, and which is faster at more risk."""

    def said(one: Candidate) -> str:
        speed = f"{beside.seconds / one.seconds:.2f} times as fast as {BESIDE}, " if beside else ""
        return f"{one.name}, {speed if one is not beside else ''}{one.accuracy}"

    fit = [one for one in candidates if one.peak <= (limit or inf) * GIB]
    if not fit:
        least = min(candidates, key=lambda one: one.peak)
        needs = f"{least.name} needs least, {least.peak / GIB:.4g} GiB on its fullest rank"
        return f"None fits memory_limit={limit:g}: {needs}; {WAYS}\n"
    safe = [one for one in fit if one.risk <= 1]
    fastest = min((one.seconds for one in safe), default=inf)
    close = [one for one in safe if one.seconds <= CLOSE * fastest]
    best = min(close, key=lambda one: (one.risk, one.peak), default=None)
    text = f"Recommended: {said(best)}:\n  {best.command}\n" if best else "None is known to lose little.\n"
    risky = [one for one in fit if one.risk > 1 and CLOSE * one.seconds < fastest]
    if risky:
        other = min(risky, key=lambda one: (one.seconds, one.risk))
        text += f"Faster, at more risk: {said(other)}.\n"
    return text
