"""`python -m pipetrain.plan compare=[1f1b,zbv]`: several schedules in one table, in one unit of time.

The unit is what a rank computes for a microbatch. It is the same for all schedules, however many stages a
rank has, so a batch of m microbatches takes m units and what the pipeline wastes. All figures are by rank, in
parts of the model that a rank has. Torch is imported only where a model is given, to cut it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig

from pipetrain.errors import ConfigError
from pipetrain.rules import COUNT
from pipetrain.schedule.actions import ScheduleError, compute_program, most_open, placement
from pipetrain.schedule.lower import lower
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Timeline
from pipetrain.schedule.transforms import joined

BATCHES = 16  # of a window that is an epoch, the part that is simulated
ALL = "all"
WORK = 3  # forwards that a rank's work for a microbatch takes, with its backward
_NOT_FOR_A_TABLE = ("out", "cost", "span")


ByModel = Callable[[str, DictConfig], tuple[str, list[str]]]
"""Plans a configuration by the costs of its model; returns a title, and the `times` of its schedule."""


def show_table(cfg: DictConfig, by_model: ByModel) -> None:
    """Print a row for each schedule of `compare=`; `by_model`: called where a model is given.

    Raises ConfigError.
    """
    words = list(HydraConfig.get().overrides.task)
    if unused := [key for key in _NOT_FOR_A_TABLE if cfg[key] is not None]:
        raise ConfigError(f"compare= prints a table, which takes no {unused[0]}=: leave one of them out")
    if cfg.partition == "profile":
        raise ConfigError(
            "compare= needs one profile for all schedules: give partition.profile=FILE, the profile.json of "
            "a run that had partition=profile"
        )
    names, ranks, m = _names(cfg), _count(cfg, "stages") or 2, _count(cfg, "microbatches")
    asked = {name: _composed([*words, f"schedule={name}", f"microbatches={m}"]) for name in names}
    print(table(asked, ranks, m or 1, by_model if _has_model(words) else None), end="")


def table(
    asked: dict[str, DictConfig],
    ranks: int,
    microbatches: int,
    by_model: ByModel | None = None,
) -> str:
    """Return the table of schedules, given with their configurations, on equal stages.

    `by_model`: None for a table without the columns of a model.
    """
    rows, notes, title = [], [], ""
    for name, cfg in asked.items():
        try:
            equal, held = _on_equal_stages(cfg, ranks, microbatches)
            row = [name, *equal]
            if by_model is not None:
                title, own = by_model(name, cfg)
                row += own
        except (ConfigError, ScheduleError) as error:
            notes.append(f"{name}: {error}\n")
            continue
        rows.append([*row, *held])
    if not rows:
        raise ConfigError(
            f"compare= has no schedule that can be planned with these settings; {notes[0].strip()}"
        )
    head = ["schedule", "batch", "bubble", "activations", "versions", "staleness"]
    if by_model is not None:
        head[3:3] = [f"{title} batch", f"{title} bubble"]
    part = f"1/{ranks} of the model" if ranks > 1 else "the model"
    size = f"{ranks} rank{'s' * (ranks > 1)}, {microbatches} microbatch{'es' * (microbatches > 1)} a batch"
    return (
        f"{size}; all stages equal, messages free\n\n{aligned([head, *rows])}\n"
        f"batch: the time of one, where 1 is what a rank computes for a microbatch; {microbatches} is no "
        f"bubble\n"
        f"the rest by rank: activations held, in microbatches of {part}; weight versions; updates late\n"
        f"{''.join(f'without {note}' for note in notes)}"
    )


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of a table as text."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(line.rstrip() + "\n" for line in lines)


def batches_of(cfg: DictConfig) -> int:
    """Return how many batches of a schedule's window are simulated."""
    return _count(cfg, "batches") or min(_count(cfg, "window") or BATCHES, BATCHES)


def times(run: Timeline, batches: int, unit: float) -> list[str]:
    """Return the time of a batch of a simulated window, in this `unit`, and its bubble."""
    return [f"{run.makespan / batches / unit:.4g}", f"{run.bubble:.1%}"]


def _on_equal_stages(cfg: DictConfig, ranks: int, microbatches: int) -> tuple[list[str], list[str]]:
    """Return the times of a schedule, and by rank its activations, weight versions and staleness."""
    batches, buffer_size = batches_of(cfg), _count(cfg, "buffer_size") or 1
    schedule = instantiate(cfg.schedule)
    compute = compute_program(schedule, ranks, batches, microbatches, buffer_size=buffer_size)
    program = lower(joined(compute))
    run = simulate(program, microbatches, buffer_size=buffer_size)
    stages = [sorted({action.stage for action in row.actions}) for row in run.rows]
    held = (
        [most_open([row.actions]) / len(own) for row, own in zip(run.rows, stages, strict=True)],
        [sum(run.versions[stage] for stage in own) / len(own) for own in stages],
        [max(run.staleness[stage] for stage in own) for own in stages],
    )
    by_rank = [" ".join(f"{value:.3g}" for value in values) for values in held]
    return times(run, batches, WORK * len(placement(program)) / ranks), by_rank


def _has_model(words: Sequence[str]) -> bool:
    return any(word.lstrip("+").startswith(("model", "experiment=")) for word in words)


def _names(cfg: DictConfig) -> list[str]:
    """Return the names of the schedules to compare. Raises ConfigError."""
    known = sorted(GlobalHydra.instance().config_loader().get_group_options("schedule"))
    named = [str(name) for name in cfg.compare] if isinstance(cfg.compare, ListConfig) else [str(cfg.compare)]
    if named == [ALL]:
        return known
    if unknown := [name for name in named if name not in known]:
        raise ConfigError(
            f"compare= has no schedule {unknown[0]}; write compare={ALL}, or some of: {', '.join(known)}, as "
            f"compare=[1f1b,zbv]"
        )
    if not named:
        raise ConfigError(f"compare=[] names no schedule; write compare={ALL}, or compare=[1f1b,zbv]")
    return list(dict.fromkeys(named))


def _composed(words: Sequence[str]) -> DictConfig:
    return hydra.compose("plan", overrides=[word for word in words if not word.startswith("compare=")])


def _count(cfg: DictConfig, key: str) -> int | None:
    """Return a whole number of at least 1, or None. Raises ConfigError."""
    return COUNT.read(key, cfg[key], null=True)  # type: ignore[no-any-return]
