"""What several records measure or plan. Arguments and results can be written as JSON.

What is timed takes turns in one world of processes, each with one thread, so that all contestants pay for
the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmark.contestants import Make, rows_of_race
from benchmark.held import Case, measure
from benchmark.report import progress
from benchmark.tasks import Scale, Task, compose_task, prepare
from benchmark.worlds import Say, run_world, titled
from comparison.request import Method, Spec
from comparison.runs import Runs, claim
from pipetrain.config.build import make_model, make_schedule, make_task
from pipetrain.config.settings import Settings
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.plan.cost_estimate import Layer
from pipetrain.plan.costs import Profile
from pipetrain.plan.csv_tables import Rows, read_rows
from pipetrain.plan.make_plan import estimate_model, make_plan
from pipetrain.plan.paper_plan import state_of
from pipetrain.plan.plan import Plan, Samples
from pipetrain.plan.verification import Draft
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.memory import peaks

PROFILES = Path(__file__).with_name("profiles")
"""What PipeDream's authors measured of each layer of a model, on a V100."""


def profile_of(model: str, scale: float = 1.0) -> Rows:
    """Return PipeDream's profile of a model, for `scale` times the samples of a microbatch."""
    return read_rows(PROFILES / f"{model}.csv", scale=scale)


def raced(make: Make, ranks: int, rounds: int) -> dict[str, Any]:
    """Race contestants; return for each the `seconds` of a batch in each round, or its `failure`.

    Those that have a bound say which share of their speed `of bound` is.
    """
    rows = rows_of_race("race", ranks, make, Scale(rounds), progress, {}, {})
    return {
        row.contestant: {
            "seconds": [ms / 1e3 for ms in row.values],
            "of bound": row.ratios.get("of bound"),
            "failure": row.failure,
        }
        for row in rows
    }


def profiled(
    overrides: Sequence[str], microbatch: int, example: Sequence[int], classes: int = 10, ranks: int = 2
) -> dict[str, Any]:
    """Measure a model's layers and messages on so many ranks at once; return its Profile as JSON.

    `microbatch`: its samples, random ones like `example`.
    """
    words = (*overrides, f"batch_size={2 * microbatch}", "microbatches=2")
    task = Task(words, tuple(example), classes)
    of_ranks = run_world(_profiled, ranks, titled(progress, "profile"), task)
    return dict(of_ranks[0])


def _profiled(groups: ProcessGroups, say: Say, task: Task) -> dict[str, Any]:
    say(" ".join(task.overrides))
    return prepare(task, "gpipe", groups.world.size, times=groups).plan.table.times.to_json()


def predicted(
    overrides: Sequence[str],
    balance: Sequence[int],
    microbatches: int,
    microbatch: int,
    example: Sequence[int],
    profile: Any = None,
    schedule: str = "gpipe",
    layers: list[Layer] | None = None,
) -> dict[str, Any]:
    """Plan a batch of a model of any size, which is made nowhere; return what the plan says.

    `balance`: layers of each stage; `microbatch`: its samples; `profile`: what `profiled` returned for as
    many, None: by estimated work; `layers`: what `estimate` returned for as many, by which peaks are without
    the loss. The `seconds` of a batch, by work in forwards of a microbatch through the whole model; the most
    bytes of each stage (`peaks`), and of its weights, gradients and optimizer (`model`); `layers`,
    `parameters`; and `routes`: source, target and bytes of each value that goes from stage to stage with a
    microbatch.
    """
    words = [f"batch_size={microbatches * microbatch}", f"microbatches={microbatches}", partition(balance)]
    known = None if profile is None else Profile.from_json(profile)
    plan = on_paper(
        (*overrides, *words, f"stages={len(balance)}"), schedule, example, lambda full: known, layers=layers
    )
    settings = plan.settings
    run, size, most = plan.timeline(), settings.full, peaks(plan.memory())
    return {
        "seconds": run.makespan / (1 if profile else settings.ranks),
        "peaks": [of["total"] for of in most],
        "model": [of["weights"] + of["gradients"] + of["optimizer"] for of in most],
        "layers": len(plan.layers),
        "parameters": sum(layer.params for layer in plan.layers),
        "routes": [
            (*route.edge, spec.nbytes)
            for route in plan.cut.routes
            for spec in plan.cut.message(route.edge, size)
        ],
    }


def estimate(overrides: Sequence[str], microbatch: int, example: Sequence[int]) -> list[Layer]:
    """Return the layers of a model for so many samples, which takes most of the time of a plan."""
    words = (*overrides, f"batch_size={microbatch}", "microbatches=1", "stages=1")
    return [*on_paper(words, "gpipe", example, lambda full: None).table.layers]


def on_paper(
    overrides: Sequence[str],
    schedule: str,
    example: Sequence[int],
    profile: Callable[[Size], Profile | None],
    batches: int = 1,
    layers: list[Layer] | None = None,
) -> Plan:
    """Return the plan of windows of so many batches, of a model that is made nowhere.

    `example`: the shape of a sample; `profile`: returns the times for a microbatch of the settings' size.
    """
    cfg = compose_task(Task((*overrides, "build=stages")), schedule)
    settings = Settings.composed(cfg, schedule, None)
    with torch.device("meta"):
        model = layers or make_model(cfg, settings.seed, settings.dtype)
    samples = Samples.of([settings.batch_size] * batches, [settings.full.samples])
    estimated = estimate_model(
        settings, model, ValueSpec((TensorSpec(tuple(example), settings.dtype),)), samples
    )
    draft = Draft.from_settings(settings, make_schedule(cfg))
    return make_plan(draft, estimated, profile(settings.full), state_of(cfg), make_task(cfg))


def trained(overrides: Sequence[str], seed: int, nproc: int) -> dict[str, Any]:
    """Train by the command line; return the `summary`, and `curves` by epoch: see `read_records`.

    Raises RuntimeError with the last words of a run that fails.
    """
    spec = Spec(Method("trained", tuple(overrides)), seed, None, (), nproc)
    with TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        with claim(runs.folder) as lock:
            outcome = runs.start(spec, lock)
        if outcome.summary is None:
            raise RuntimeError("\n".join([outcome.failure, *runs.last_words(spec)]))
    return {"summary": outcome.summary, "curves": outcome.curves}


def held(model: str, schedule: str, ranks: int, overrides: Sequence[str]) -> list[tuple[int, int, int]]:
    """Train one of `held.MODELS`; return of each rank's stages the number, and the peak bytes.

    The bytes are measured, and as predicted.
    """
    case = Case(model, schedule, ranks, tuple(overrides))
    return [stage for of_rank in run_world(measure, ranks, progress, case) for stage in of_rank]


def partition(balance: Sequence[int]) -> str:
    """Return the override that cuts a model into stages of so many layers."""
    return f"partition={[*accumulate(balance)][:-1] or 'even'}"


def ends(values: Iterable[float]) -> tuple[float, float]:
    """Return the least and the most."""
    known = [*values]
    return min(known), max(known)


@dataclass(frozen=True, slots=True)
class Race:
    """What `raced` returned, read: a contestant that failed raises RuntimeError with its failure."""

    of: Mapping[str, Any]

    def seconds(self, name: str) -> list[float]:
        """Return the seconds of a batch in each round."""
        if failure := self.of[name]["failure"]:
            raise RuntimeError(f"{name} failed: {failure}")
        return list(self.of[name]["seconds"])

    def of_bound(self, name: str) -> float:
        """Return which share of its bound's speed it reaches: the median over the rounds."""
        return float(self.of[name]["of bound"])

    def ratio(self, name: str, other: str) -> float:
        """Return how many times as fast as another one it is: the median over the rounds."""
        return median(self.ratios(name, other))

    def ratios(self, name: str, other: str) -> list[float]:
        """Return how many times as fast as another one it is, in each round."""
        return [theirs / own for theirs, own in zip(self.seconds(other), self.seconds(name), strict=True)]
