"""PipeDream and PipeDream-2BW beside flushes: seconds a batch, time to a loss, and memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import inf
from statistics import median
from typing import Any

from benchmark.contestants import Builders, Theirs, Ways, ours, plain
from benchmark.models import WHOLE
from benchmark.tasks import Task, prepare
from pipetrain.runtime.comm.process_groups import ProcessGroups
from published.measures import Race, ends, held, raced, trained
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Series, Step, those
from published.torchgpipe_race import TIE

IN_FOUR, CONSTANT = "microbatches=4", ("lr_schedule=constant", "warmup=0.25", "logger=[]")
TEXT = ("model=gpt", "model.heads=4", "data=text", "task=language_modelling", "optim=adamw")
Training = tuple[tuple[str, ...], int, int, int]  # overrides; batch; batches of an epoch; epochs
MODELS: dict[str, Training] = {
    "VGG16": (("model=vgg16", "model.width=16", "data=digits", "optim.lr=0.005"), 64, 10, 5),
    "GPT": ((*TEXT, "model.depth=4", "model.width=96", "data.block=64", "optim.lr=0.001"), 16, 20, 4),
}
TINY: dict[str, Training] = {"MLP": (("model=mlp", "data=digits"), 16, 2, 2)}
RANKS, WINDOW, SEEDS = 2, 12, (0, 1, 2)  # WINDOW: batches of a turn, and between two drains
FLUSH, GPIPE, ASYNCHRONOUS = "1f1b", "gpipe", ("pipedream", "pipedream_2bw")
DDP, ALONE = "torch DDP", "one process"
OVER = {GPIPE: "up to 3.2 x", ALONE: "up to 20 x"}  # published, on up to 64 GPUs
GAIN, BOUND = 1.15, (4 + RANKS - 1) / 4
DEEP = 4  # stages whose memory is measured; a microbatch is a sample
HELD = {"pipedream": 1, "pipedream_2bw": 4, "1f1b": 4}  # microbatches of an update


def steps(quick: bool) -> dict[str, Step]:
    """Race, train with each seed, and measure what stages hold."""
    of: dict[str, Step] = {}
    for model, (words, size, batches, epochs) in (TINY if quick else MODELS).items():
        task = [*words, f"batch_size={size}", IN_FOUR]
        of[f"race, {model}"] = Step(
            race,
            {"task": task, "rounds": 1 if quick else 3, "schedules": [FLUSH, GPIPE, *ASYNCHRONOUS]},
        )
        length = f"data.train_limit={batches * size}", f"data.test_limit={4 * size}", f"epochs={epochs}"
        for seed in SEEDS[:1] if quick else SEEDS:
            for name in (FLUSH,) if quick else (FLUSH, *ASYNCHRONOUS):
                overrides = [f"schedule={name}", *task, *CONSTANT, *length]
                run = {"overrides": overrides, "seed": seed, "nproc": 1 if quick else RANKS}
                of[f"train, {model}, {name}, {seed}"] = Step(trained, run, timed=False)
    for name, pieces in {} if quick else HELD.items():
        words = ("data.block=32", f"batch_size={pieces}", f"microbatches={pieces}")
        of[f"held, {name}"] = Step(
            held, {"model": "gpt", "schedule": name, "ranks": DEEP, "overrides": words}, timed=False
        )
    return of


def race(task: Sequence[str], rounds: int, schedules: Sequence[str]) -> Any:
    """Race everybody on the first batch of the data."""
    return raced(partial(contestants, Task(tuple(task), None), schedules), RANKS, rounds)


def contestants(task: Task, schedules: Sequence[str], groups: ProcessGroups) -> Builders:
    """Return what builds them. One process has all cores."""
    ways: Ways = {name: (name,) for name in schedules}

    def loop(name: str, threads: int, parallel: bool) -> Theirs:
        return plain(name, prepare(task.extended(WHOLE), FLUSH, RANKS), groups, WINDOW, threads, parallel)

    loops = {DDP: partial(loop, DDP, 1, True), ALONE: partial(loop, ALONE, os.cpu_count() or 1, False)}
    return {**ours(groups, task, ways, WINDOW, WINDOW), **loops}


def updates_to(target: float, losses: Sequence[float], batches: int) -> float:
    """Return the updates until a loss: between the ends of two epochs by a straight line."""
    epoch = next(n for n, loss in enumerate(losses) if loss <= target)
    if not epoch:
        return batches
    before, after = losses[epoch - 1], losses[epoch]
    return batches * (epoch + (before - target) / (before - after))


def show(results: Results) -> Iterator[Finding]:
    """Say what a batch takes, what the loss takes that all runs reach, and what stages hold."""
    for model, race in those(results, "race, ").items():
        yield from learned(model, Race(race), those(results, f"train, {model}, "))
    held_by = {
        name: {stage + 1: nbytes / 2**20 for stage, nbytes, _ in stages}
        for name, stages in those(results, "held, ").items()
    }
    memory = [Series(name, "held", "stage", of, unit="MiB") for name, of in held_by.items()]
    yield from memory
    if memory:
        theirs, two = (max(held_by[name].values()) for name in ASYNCHRONOUS)
        what, says = (
            f"fullest of {DEEP} stages, 2bw",
            f"{two / theirs:.2f}: {two:.1f} beside {theirs:.1f} MiB",
        )
        yield Check.of(what, "less than pipedream", (0, 1), two / theirs, How.RUN, says, " of pipedream's")
        lines = [series.line() for series in memory]
        yield Chart("Memory at the peak, GPT", "stage, from 1", "MiB", lines, "x")


def learned(model: str, timed: Race, runs: Mapping[str, Any]) -> Iterator[Finding]:
    """Say what a batch takes, and the loss that all runs of a model reach."""
    curves, batches = dict[str, list[list[float]]](), (MODELS | TINY)[model][2]
    for run, of in runs.items():
        curves.setdefault(run.split(", ")[0], []).append(of["curves"]["val_loss"])
    target = max(map(min, chain(*curves.values())))
    rounds = {name: timed.seconds(name) for name in (FLUSH, GPIPE, *ASYNCHRONOUS, DDP, ALONE)}
    batch_s = {name: median(seconds) for name, seconds in rounds.items()}
    yield Series.measured(model, "a batch", "", rounds, unit="s")
    ratios = {name: timed.ratios(name, FLUSH) for name in ASYNCHRONOUS}
    speed = Series.measured(model, "speed", "", ratios, unit="x 1f1b", bound=dict.fromkeys(ratios, BOUND))
    yield speed
    for name, gain in speed.here.items():
        yield Check.of(f"{model}, {name}: a batch", NOT, (GAIN, inf), gain, How.RUN, unit=" x 1f1b's speed")
        for other, theirs in OVER.items():
            what, faster = f"{model}, {name}: a batch faster than {other}'s", timed.ratio(name, other)
            theirs = theirs if name == ASYNCHRONOUS[1] else NOT  # of 2BW alone
            yield Check.of(what, theirs, (1 + TIE, inf), faster, How.RUN, unit=" x its speed")
    for unit, cost in (("updates", dict.fromkeys(batch_s, 1.0)), ("s", batch_s)):
        values = {
            name: [
                cost[name] * updates_to(target, losses, batches) for losses in curves.get(name, curves[FLUSH])
            ]
            for name in batch_s
        }
        taken = Series.measured(model, f"to a test loss of {target:.3g}", "", values, unit=unit)
        yield taken
        for name in ASYNCHRONOUS if unit == "s" else ():
            less = taken.here[name] / taken.here[GPIPE]
            yield Check.of(
                f"{model}, {name}: time to the loss", NOT, (0, 1), less, How.RUN, unit=" of gpipe's"
            )
    for axis, each in (("updates", dict.fromkeys(curves, 1.0)), ("seconds", batch_s)):
        lines = [learning(name, seeds, batches * each[name]) for name, seeds in curves.items()]
        yield Chart(f"{model}: test loss", axis, "test loss", lines)


def learning(name: str, seeds: Sequence[Sequence[float]], epoch: float) -> Line:
    """Return the test loss after each epoch: the median of the seeds, and their spread."""
    at = [*zip(*seeds, strict=True)]
    points = {epoch * n: median(losses) for n, losses in enumerate(at, 1)}
    return Line(name, How.RUN, points, [*map(ends, at)])
