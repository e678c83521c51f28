"""`python -m pipetrain.plan`: the same configuration, on paper.

Prints the cuts, the tensors that cross them, the timeline, and the schedule's memory and bubble; with a
profile by measured times. Starts no process, and reads no data set whose configuration declares a sample.
With `costs=FILE.csv` the layers are those of a file, without any model; with `ranks=` too their cuts and
replicas are chosen, without any schedule.

With `compare=[1f1b,zbv]` several schedules stand in one table, in one unit of time: what a rank computes for
a microbatch. It is the same for all schedules, however many stages a rank has, so a batch of m microbatches
takes m units and what the pipeline wastes. All figures are by rank, in parts of the model that a rank has.
Torch is imported only where a model is given, to cut it. Of a model the table is `advise=true`, which goes by
its costs and says which schedule to take; `compare=` then names those to choose from.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from shutil import get_terminal_size
from threading import Event, Thread
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf

from pipetrain.commands.cli import compose, overrides, values_of
from pipetrain.config.choices import conf_dir
from pipetrain.config.placement import RULES, places_of, processes, spans
from pipetrain.errors import ConfigError
from pipetrain.exit import guarded, unread
from pipetrain.instantiate import NotMade, make
from pipetrain.rules import BOOL, BUFFERS, COUNT, PATH, POSITIVE, Rule, kept, whole
from pipetrain.schedule.actions import Placement, ScheduleError, both_ways, most_open, ranks_of
from pipetrain.schedule.buffer_bounds import edge_bounds
from pipetrain.schedule.lower import lower
from pipetrain.schedule.memory import GIB
from pipetrain.schedule.policy import ForwardBackward
from pipetrain.schedule.replicas import spread_program
from pipetrain.schedule.simulate import SHOWN, simulate, unit_cost
from pipetrain.schedule.text import aligned, counted
from pipetrain.schedule.transforms import joined

BATCHES = whole(1, 1000)  # seconds to prove and to draw, and more of them show nothing else
SPAN = Rule(
    "all, or from which cell to which, such as 0-40",
    lambda key, value: (0, sys.maxsize) if value == "all" else _cells(str(value)),
)
RANKS = whole(1, 64)  # some seconds: a stage can be added in about ranks^4 / 24 ways
WORK = 3  # forwards that a rank's work for a microbatch takes, with its backward
SILENCE_S = 10.0  # between two lines about what takes long


def main() -> None:
    """Print the plan of the command line's configuration; exit with its status."""
    progress = _Progress()
    try:
        sys.exit(guarded(lambda: compose("plan", lambda cfg: show(cfg, progress), outputs=False)))
    except BrokenPipeError:
        sys.exit(unread())
    finally:
        progress.over.set()


class _Progress:
    """Says on stderr, every SILENCE_S, for how long it has been planning. `doing`: which of several."""

    def __init__(self) -> None:
        self.doing, self.over, self._began = "", Event(), time.perf_counter()
        Thread(target=self._say, daemon=True).start()

    def _say(self) -> None:
        while not self.over.wait(SILENCE_S):
            seconds = time.perf_counter() - self._began
            print(f"pipetrain: planning{self.doing}, {seconds:.0f} s so far", file=sys.stderr, flush=True)

    def next(self, name: str, names: Sequence[str]) -> None:
        self.doing = f" {name}, {names.index(name) + 1} of {len(names)} schedules"


def show(cfg: DictConfig, progress: _Progress) -> None:
    """Print the plan of a configuration, or the table of several schedules. Raises ConfigError."""
    if cfg.costs is not None and _has_model():
        raise ConfigError(
            "costs= stands in place of a model: leave model= out, or give the model's times by "
            "partition.profile=FILE"
        )
    if cfg.costs is None and cfg.bandwidth is not None:
        raise ConfigError("bandwidth= is for costs=FILE: of a model, partition.profile=FILE has it")
    if cfg.ranks is not None and cfg.replicas != "auto":
        show_replicas(cfg)
        return
    advise, several = BOOL.read("advise", cfg.advise), cfg.compare is not None
    by_costs = advise or (several and (cfg.costs or _has_model()))
    named = [word for word in overrides() if word.startswith("schedule=")]
    drawn = [key for key in ("out", "span") if cfg[key] is not None]
    if not (advise or several):
        show_plan(cfg, _batches(cfg))
    elif by_costs and named:
        raise ConfigError(
            f"advise=true chooses the schedule: leave {named[0]} out, or name those to choose from, as "
            f"compare=[1f1b,pipedream]"
        )
    elif drawn:
        raise ConfigError(f"several schedules are a table, which takes no {drawn[0]}=: leave it out")
    else:
        (show_advice if by_costs else show_table)(cfg, progress)


# One schedule


def show_plan(cfg: DictConfig, batches: int) -> None:
    """Print the plan of a window of a configuration and, with `out`, draw its timeline."""
    from pipetrain.plan.csv_tables import write_rows
    from pipetrain.plan.memory_fit import gpu_bytes  # imports torch
    from pipetrain.plan.paper_plan import planned
    from pipetrain.plan.text import describe, title
    from pipetrain.schedule.plot import as_figure

    plan = planned(values_of(cfg), str(HydraConfig.get().runtime.choices["schedule"]), batches)
    span = None if cfg.span is None else SPAN.read("span", cfg.span)
    out = None if cfg.out is None else Path(str(cfg.out))
    rows = str(cfg.out).endswith(".csv")
    _say_draft(cfg)
    if cfg.costs and out is None and span is None:
        write_rows(plan, sys.stdout)
        return
    if out is not None:
        try:
            if rows:
                with out.open("w", newline="") as file:
                    write_rows(plan, file)
            else:
                as_figure(plan.timeline(), out, title(plan), plan.unit_of_time, span, plan.memory())
        except OSError as error:
            raise ConfigError(f"out={cfg.out} cannot be written: {error}") from error
    room = gpu_bytes(plan.settings.device)
    print(describe(plan, get_terminal_size((100, 24)).columns, span, room), end="")
    if out is not None:
        print(f"\n{'a row a stage' if rows else 'timeline drawn'} in {cfg.out}")


def _say_draft(cfg: DictConfig) -> None:
    """Say where a configuration asks for times that are not measured on paper."""
    if cfg.partition == "profile" and cfg.costs is None:
        print(
            "partition=profile measures when a run starts; this is its draft, cut by flops", file=sys.stderr
        )


def _cells(text: str) -> tuple[int, int]:
    """Return the first and last cell of the timeline to draw. Raises ValueError."""
    ends = re.fullmatch(r"(\d+)-(\d+)", text)
    first, last = map(int, ends.groups() if ends else ())
    return kept((first, last), first < last)  # type: ignore[no-any-return]


# Cuts and replicas, without a schedule


def show_replicas(cfg: DictConfig) -> None:
    """Print cuts and replicas for the layers of costs=. Raises ConfigError."""
    from pipetrain.plan.costs import Table  # imports torch
    from pipetrain.plan.csv_tables import read_rows
    from pipetrain.plan.paper_plan import state_of
    from pipetrain.plan.replica_partition import LayerSums, Machines, Planner
    from pipetrain.plan.text import describe_replicas

    if unused := [key for key in ("out", "span", "compare", "advise") if cfg[key] not in (None, False)]:
        raise ConfigError(f"{unused[0]}= shows a plan with a schedule: leave it out, or ranks=")
    if cfg.costs is None:
        raise ConfigError("ranks= chooses cuts and replicas by the times of a file: give costs=FILE.csv")
    ranks, machines = RANKS.read("ranks", cfg.ranks), COUNT.read("machines", cfg.machines)
    if ranks % machines:
        raise ConfigError(f"ranks={ranks} cannot be shared equally by machines={machines}: choose a multiple")
    speeds = [*cfg.bandwidth] if isinstance(cfg.bandwidth, ListConfig) else [cfg.bandwidth] * 2
    if len(speeds) != 2 or None in speeds:
        raise ConfigError("ranks= needs bandwidth=GB/s, or [GB/s within a machine,GB/s between two]")
    seconds = [1e-9 / POSITIVE.read("bandwidth", speed) for speed in speeds]
    limit, scale = (POSITIVE.read(key, cfg[key], null=True) for key in ("memory_limit", "scale"))
    rows = read_rows(PATH.read("costs", cfg.costs), scale=scale or 1.0)
    sums = LayerSums.from_table(
        Table(rows.layers, rows.data, rows.profile, state_of=state_of(values_of(cfg)))
    )
    planner = Planner(sums, Machines(ranks, ranks // machines, *seconds), limit=(limit or inf) * GIB)
    print(describe_replicas(planner, [layer.name for layer in rows.layers]))


# Several schedules


def show_advice(cfg: DictConfig, progress: _Progress) -> None:
    """Print the schedules of `compare=` or all by a model's costs, and which to take. Raises ConfigError."""
    from pipetrain.plan.schedule_choice import advice  # imports torch

    stages = _count(cfg, "ranks") or 2 if cfg.replicas == "auto" else len(_places(cfg))
    if stages == 1:
        raise ConfigError("advise=true compares pipelines, and one stage is none: choose stages=2 or more")
    timed = cfg.costs is not None or isinstance(cfg.partition, DictConfig)  # of microbatches of one size
    configurations, notes = _configurations(cfg, *[f"microbatches={cfg.microbatches}"] * timed)
    free = not timed and not any(word.startswith("microbatches=") for word in overrides())
    by_name = {
        name: (
            alternatives(configuration, stages * free),
            _batches(configuration),
            [] if cfg.costs else _of_run(its_words),
        )
        for name, (configuration, its_words) in configurations.items()
    }
    print(f"{advice(by_name, stages, lambda name: progress.next(name, [*by_name]))}{notes}", end="")
    _say_draft(cfg)


def alternatives(cfg: DictConfig, most: int) -> list[dict[str, Any]]:
    """Return a configuration, and with fewer than `most` microbatches also that with so many."""
    tried = [values_of(cfg)]
    if most and cfg.microbatches < most:
        cfg = cfg.copy()
        cfg.microbatches = most
        tried.append(values_of(cfg))
    return tried


def show_table(cfg: DictConfig, progress: _Progress) -> None:
    """Print a row for each schedule of `compare=`, on equal stages. Raises ConfigError."""
    places, m = _places(cfg), _count(cfg, "microbatches") or 1
    ranks = 1 + max(map(max, places))
    configurations, notes = _configurations(cfg, f"microbatches={m}")
    rows = []
    for name, (configuration, _) in configurations.items():
        progress.next(name, [*configurations])
        try:
            rows.append([name, *_on_even_stages(configuration, places, _batches(configuration), m)])
        except (ConfigError, ScheduleError) as error:
            notes += f"without {name}: {error}\n"
    if not rows:
        raise ConfigError(
            f"compare= has no schedule that can be planned with these settings, {notes.strip()}"
        )
    head = ["schedule", "batch", "bubble", "activations", "versions", "staleness"]
    work, part = "all stages equal", f"1/{ranks} of the model" if ranks > 1 else "the model"
    if any(len(ranks_of_place) > 1 for ranks_of_place in places):
        work, part = f"placement={spans(places)}, a stage's work as its ranks", "its part of the model"
    print(
        f"{counted(ranks, 'rank')}, {counted(m, 'microbatch')} a batch; {work}, "
        f"messages free\n\n{aligned([head, *rows])}\n\n"
        f"batch: the time of one, where 1 is what a rank computes for a microbatch; {m} is no bubble\n"
        f"the rest by rank: activations held, in microbatches of {part}; weight versions; updates late\n"
        f"{notes}",
        end="",
    )


def _configurations(cfg: DictConfig, *more: str) -> tuple[dict[str, tuple[DictConfig, list[str]]], str]:
    """Return the configuration of each schedule of `compare=` with its words, and whose words are not all's.

    `more`: words of all. Raises ConfigError.
    """
    words, names = overrides(), _names(cfg)
    options, configurations = _options(words, names), {}
    notes = (
        f"{word.lstrip('+')} is for {', '.join(schedules)}\n"
        for word, schedules in options.items()
        if schedules != names
    )
    for name in names:
        its = [word for word in words if name in options.get(word, names) and not word.startswith("compare=")]
        configurations[name] = hydra.compose("plan", overrides=[*its, f"schedule={name}", *more]), its
    return configurations, "".join(notes)


def _of_run(words: Sequence[str]) -> list[str]:
    """Return the words that a run takes too, as they are typed."""
    of_plan = {*OmegaConf.load(conf_dir() / "plan.yaml")}
    typed = (word.removeprefix("++").replace("codec@", "") for word in words)
    return [word for word in typed if word.lstrip("+~").partition("=")[0] not in of_plan]


def _options(words: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Return the schedules that have each option of schedules, by its word. Raises ConfigError."""
    words = [word for word in words if word.lstrip("+").startswith("schedule.")]
    keys = {name: hydra.compose("plan", overrides=[f"schedule={name}"]).schedule for name in names if words}
    options = {word: [name for name in keys if re.split("[.=]", word)[1] in keys[name]] for word in words}
    for word, schedules in options.items():
        if not schedules:
            raise ConfigError(f"{word.lstrip('+')} is an option of none of these schedules: leave it out")
    return options


def _has_model() -> bool:
    """Return whether the command line names a model."""
    return any(word.lstrip("+").startswith(("model", "experiment=")) for word in overrides())


def _batches(cfg: DictConfig) -> int:
    """Return how many batches of a schedule's window are simulated. Raises ConfigError."""
    batches: int | None = BATCHES.read("batches", cfg.batches, null=True)
    return batches or min(_count(cfg, "window") or SHOWN, SHOWN)


def _on_even_stages(cfg: DictConfig, places: Placement, batches: int, microbatches: int) -> list[str]:
    """Return the times of a schedule, and by rank its activations, weight versions and staleness.

    A stage has as much work as it has ranks.
    """
    sizes = both_ways(BUFFERS.read("buffer_size", values_of(cfg)["buffer_size"], null=True) or 1)
    try:
        schedule = make(values_of(cfg.schedule))
    except NotMade as error:
        raise ConfigError(f"schedule cannot be built: {error}") from error
    if isinstance(schedule, ForwardBackward) and max(map(len, places)) > 1:
        raise ScheduleError("it decides its order while it runs, and replicas take turns in a fixed one")
    compute = spread_program(schedule, places, batches, microbatches, buffer_size=min(sizes))
    program, placement = lower(joined(compute)), ranks_of(compute)
    run = simulate(
        program,
        microbatches,
        buffer_size=edge_bounds(program, None, sizes),
        cost=lambda action: len(placement[action.stage]) * unit_cost(action),
    )
    stages = [sorted({action.stage for action in row.actions}) for row in run.rows]
    peaks = (
        [most_open([row.actions]) / len(held) for row, held in zip(run.rows, stages, strict=True)],
        [sum(run.versions[stage] for stage in held) / len(held) for held in stages],
        [max(run.staleness[stage] for stage in held) for held in stages],
    )
    by_rank = [" ".join(f"{value:.3g}" for value in values) for values in peaks]
    unit = WORK * sum(map(len, placement)) / len(run.rows)
    return [f"{run.makespan / batches / unit:.4g}", f"{run.bubble:.1%}", *by_rank]


def _names(cfg: DictConfig) -> list[str]:
    """Return the names of the schedules to compare. Raises ConfigError."""
    names = sorted(GlobalHydra.instance().config_loader().get_group_options("schedule"))
    named = [str(name) for name in cfg.compare] if isinstance(cfg.compare, ListConfig) else [str(cfg.compare)]
    if cfg.compare is None or named == ["all"]:
        return names
    words = f"all, or some of {', '.join(names)}, as [1f1b,zbv]"
    some = Rule(words, lambda key, value: kept(value, bool(value) and set(value) <= {*names}))
    return list(dict.fromkeys(some.read("compare", named)))


def _places(cfg: DictConfig) -> Placement:
    """Return the ranks of each place in a program. Raises ConfigError."""
    given = values_of(cfg)
    values = {key: rule.read(key, given[key], null=True) for key, rule in RULES.items()}
    if values["replicas"] == "auto":
        raise ConfigError("compare= needs the ranks of each stage: give replicas= in numbers")
    return values["placement"] or places_of(values["replicas"] or 1, processes(**values, started=None))


def _count(cfg: DictConfig, key: str) -> int | None:
    """Return a whole number of at least 1, or None. Raises ConfigError."""
    return COUNT.read(key, cfg[key], null=True)  # type: ignore[no-any-return]
