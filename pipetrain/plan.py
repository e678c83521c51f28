"""`python -m pipetrain.plan`: the same configuration, on paper.

Prints where the model is cut, what crosses each cut, the timeline, and what the schedule holds and wastes,
beside the formulas. Starts no process and reads no data set.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pipetrain.blueprint import Plan, Samples, make_plan
from pipetrain.cli import compose
from pipetrain.config import make_model, make_schedule, read_settings, whole_number
from pipetrain.data import IMAGE
from pipetrain.errors import ConfigError
from pipetrain.launch import guarded
from pipetrain.schedule.draw import as_figure, as_text
from pipetrain.schedule.theory import theory

BATCHES = 16  # what is played through of a window that is an epoch
WITHOUT_FOLDER = ["hydra.run.dir=.", "hydra.output_subdir=null"]
WITHOUT_FOLDER += ["hydra/job_logging=none", "hydra/hydra_logging=none"]


def main() -> None:
    """Print the plan of the command line's configuration; exit with its status."""
    # Beside the other overrides: Hydra's command line takes them in one place only.
    first = next((i for i, word in enumerate(sys.argv) if re.match(r"[+~\w]\S*=", word)), len(sys.argv))
    sys.argv[first:first] = WITHOUT_FOLDER
    sys.exit(guarded(lambda: compose("plan", show)))


def show(cfg: DictConfig) -> None:
    """Print the plan of a configuration and, with `out`, draw its timeline."""
    settings = read_settings(cfg, str(HydraConfig.get().runtime.choices["schedule"]), None)
    model = make_model(cfg, settings.seed, settings.dtype)
    batches = whole_number(cfg, "batches", 1, optional=True) or min(settings.window or BATCHES, BATCHES)
    if cfg.batches is not None:
        settings = replace(settings, window=None)
    samples = Samples([settings.batch_size] * batches, [settings.batch_size])
    plan = make_plan(settings, make_schedule(cfg), model, IMAGE, 1, samples)
    if cfg.out is not None:
        try:
            as_figure(plan.window.simulation, Path(str(cfg.out)))
        except OSError as error:
            raise ConfigError(f"out={cfg.out} cannot be written: {error}") from error
    print(describe(plan), end="")
    if cfg.out is not None:
        print(f"\ntimeline drawn in {cfg.out}")


def describe(plan: Plan) -> str:
    """Return the plan as text: partition, timeline of the longest window, and figures beside the formulas."""
    settings, simulation = plan.settings, plan.window.simulation
    batches = max(plan.windows)
    head = (
        f"{settings.model}, schedule {settings.schedule}: {plan.stages} stages on {settings.ranks} ranks, "
        f"batch {settings.batch_size} in {settings.microbatches} microbatches, window of {batches} batches, "
        f"buffer_size {settings.buffer_size}\n"
    )
    timeline = as_text(simulation)
    return "\n".join((head, _partition(plan), timeline, _figures(plan, batches)))


def _partition(plan: Plan) -> str:
    size = plan.settings.batch_size // plan.settings.microbatches
    flops = sum(layer.flops for layer in plan.layers)
    rows = [("stage", "rank", "layers", "parameters", "work", f"enters, {size} samples", "bytes")]
    for stage, rank in enumerate(plan.placement):
        held = plan.layers[plan.slice(stage)]
        entry = plan.boundaries[size][stage]
        rows.append(
            (
                str(stage),
                str(rank),
                f"{plan.slice(stage).start}-{plan.slice(stage).stop - 1} {held[0].name}..{held[-1].name}",
                f"{sum(layer.params for layer in held):,}",
                f"{sum(layer.flops for layer in held) / flops:.1%}",
                str(entry),
                f"{entry.nbytes:,}",
            )
        )
    return _aligned(rows)


def _figures(plan: Plan, batches: int) -> str:
    settings, simulation = plan.settings, plan.window.simulation
    virtual = plan.stages // settings.ranks
    formula = theory(settings.schedule, settings.ranks, batches, settings.microbatches, virtual)
    rows: list[tuple[str, ...]] = [("", "simulated", "formula")]
    rows.append(("bubble", f"{simulation.bubble:.4f}", f"{formula.bubble:.4f}" if formula else "-"))
    for name in ("activations", "versions", "staleness"):
        expected = getattr(formula, name, None)
        rows.append((name, _list(getattr(simulation, name)), _list(expected) if expected else "-"))
    return _aligned(rows) + "by stage; activations in microbatches, staleness in updates\n"


def _list(values: list[int]) -> str:
    return " ".join(map(str, values))


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(line.rstrip() + "\n" for line in lines)


if __name__ == "__main__":
    main()
