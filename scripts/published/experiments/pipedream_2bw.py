"""PipeDream and PipeDream-2BW beside flushes: seconds a batch, time to a loss, and memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

from benchmark.contestants import Builders, Theirs, Ways, ours, plain
from benchmark.models import WHOLE
from benchmark.tasks import Task, prepare
from pipetrain.runtime.comm.process_groups import ProcessGroups
from published.measures import Race, held, raced, trained
from published.record import Chart, Check, Figure, Findings, How, Line, Record, Results, Step

IN_FOUR, CONSTANT = "microbatches=4", ("lr_schedule=constant", "warmup=0.25", "logger=[]")
TEXT = ("model=gpt", "model.heads=4", "data=text", "task=language_modelling", "optim=adamw")
Training = tuple[tuple[str, ...], int, int, int]  # overrides; batch; batches of an epoch; epochs
MODELS: dict[str, Training] = {
    "VGG16": (("model=vgg16", "model.width=16", "data=digits", "optim.lr=0.005"), 64, 10, 5),
    "GPT": ((*TEXT, "model.depth=4", "model.width=96", "data.block=64", "optim.lr=0.001"), 16, 20, 4),
}
TINY: dict[str, Training] = {"MLP": (("model=mlp", "data=digits"), 16, 2, 2)}
RANKS, WINDOW, SEEDS = 2, 12, (0, 1, 2)  # WINDOW: batches of a turn, and between two drains
FLUSH, ASYNCHRONOUS = "1f1b", ("pipedream", "pipedream_2bw")
DDP, ALONE = "torch DDP", "one process"
GAIN, BOUND = 1.15, (4 + RANKS - 1) / 4
DEEP = 4  # stages whose memory is measured; a microbatch is a sample
HELD = {"pipedream": 1, "pipedream_2bw": 4, "1f1b": 4}  # microbatches of an update


def steps(quick: bool) -> dict[str, Step]:
    """Race, train with each seed, and measure what stages hold."""
    of: dict[str, Step] = {}
    for model, (words, size, batches, epochs) in (TINY if quick else MODELS).items():
        task = [*words, f"batch_size={size}", IN_FOUR]
        of[f"race, {model}"] = Step(race, {"task": task, "rounds": 1 if quick else 3})
        length = f"data.train_limit={batches * size}", f"data.test_limit={4 * size}", f"epochs={epochs}"
        for seed in SEEDS[:1] if quick else SEEDS:
            for name in (FLUSH,) if quick else (FLUSH, *ASYNCHRONOUS):
                overrides = [f"schedule={name}", *task, *CONSTANT, *length]
                run = {"overrides": overrides, "seed": seed, "nproc": 1 if quick else RANKS}
                of[f"train, {model}, {name}, {seed}"] = Step(trained, run)
    for name, pieces in {} if quick else HELD.items():
        words = ("data.block=32", f"batch_size={pieces}", f"microbatches={pieces}")
        of[f"held, {name}"] = Step(
            held, {"model": "gpt", "schedule": name, "ranks": DEEP, "overrides": words}
        )
    return of


def race(task: Sequence[str], rounds: int) -> Any:
    """Race everybody on the first batch of the data."""
    return raced(partial(contestants, Task(tuple(task), None)), RANKS, rounds)


def contestants(task: Task, groups: ProcessGroups) -> Builders:
    """Return what builds them. One process has all cores."""
    ways: Ways = {name: (name,) for name in (FLUSH, *ASYNCHRONOUS)}

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


def show(results: Results) -> Findings:
    """Say what a batch takes, what the loss takes that all runs reach, and what stages hold."""
    figures, checks, charts = [], [], []
    for key in [key for key in results if key.startswith("race")]:
        model, batches = key.removeprefix("race, "), (MODELS | TINY)[key.removeprefix("race, ")][2]
        timed, curves = Race(results[key]), dict[str, list[list[float]]]()
        for run, of in results.items():
            if run.startswith(f"train, {model}, "):
                curves.setdefault(run.split(", ")[2], []).append(of["curves"]["val_loss"])
        target = max(map(min, chain(*curves.values())))
        batch_s = {name: median(timed.seconds(name)) for name in (FLUSH, *ASYNCHRONOUS, DDP, ALONE)}
        for name, seconds in batch_s.items():
            what, spread = f"{model}, {name}", (min(timed.seconds(name)), max(timed.seconds(name)))
            figures.append(Figure(f"{what}: a batch", None, seconds, How.RUN, spread, unit="s"))
            if name in ASYNCHRONOUS:
                gain = timed.ratio(name, FLUSH)
                least_most = timed.spread(name, FLUSH)
                figures.append(Figure(f"{what}: speed", None, gain, How.RUN, least_most, BOUND, "x 1f1b"))
                checks.append(Check(f"{what}: a batch", f">= {GAIN} x 1f1b", f"{gain:.2f}", gain >= GAIN))
            counts = [updates_to(target, losses, batches) for losses in curves.get(name, curves[FLUSH])]
            for unit, cost in (("updates", 1.0), ("s", seconds)):
                values = sorted(cost * count for count in counts)
                least_most = values[0], values[-1]
                words = f"{what}: {unit} to a test loss of {target:.3g}"
                figures.append(Figure(words, None, median(values), How.RUN, least_most, unit=unit))
        for axis, each in (("updates", dict.fromkeys(curves, 1.0)), ("seconds", batch_s)):
            lines = [learning(name, seeds, batches * each[name]) for name, seeds in curves.items()]
            charts.append(Chart(f"{model}: test loss", axis, "test loss", lines))
    memory = {name: [0.0] * DEEP for name in HELD}
    for name, held_by in memory.items():
        for stage, nbytes, _ in results.get(f"held, {name}", ()):
            held_by[stage] = nbytes / 2**20
            figures.append(
                Figure(f"GPT, {name}: held by stage {stage} of {DEEP}", here=held_by[stage], unit="MiB")
            )
    theirs, two = (max(memory[name]) for name in ASYNCHRONOUS)
    if theirs:
        says = f"{two:.1f} against {theirs:.1f} MiB"
        checks.append(Check(f"fullest of {DEEP} stages", "2bw below pipedream", says, two < theirs))
        lines = [Line(name, How.RUN, [*enumerate(of, 1)]) for name, of in memory.items()]
        charts.append(Chart("Memory at the peak, GPT", "stage, from 1", "MiB", lines, "x"))
    return Findings(figures, checks, charts, NOTES)


def learning(name: str, seeds: Sequence[Sequence[float]], epoch: float) -> Line:
    """Return the test loss after each epoch: the median of the seeds, and their spread."""
    at = [sorted(losses) for losses in zip(*seeds, strict=True)]
    points = [(epoch * (n + 1), median(losses)) for n, losses in enumerate(at)]
    return Line(name, How.RUN, points, [(losses[0], losses[-1]) for losses in at])


NOTES = [
    "VGG16 of width 16 on 640 of scikit-learn's digits, batch 64; a GPT of 4 blocks, 96 wide, on 320 blocks "
    "of 64 bytes, batch 16. 2 processes with a thread each; one process has all cores. A window has 12 "
    "batches in the race, and an epoch in training.",
    "Seconds to a loss: the updates of the runs times the race's median batch; evaluations are left out. DDP "
    "and one process make the updates of 1f1b and are not trained again. The loss is the lowest that all "
    "runs reach.",
    "Spread: of rounds for a batch, of three seeds for a loss.",
    "Memory: a GPT of 4 blocks, 128 wide, on 4 processes, a sample a microbatch. pipedream has a microbatch "
    "an update, as published: with 4 it needs two weight versions too.",
]
RECORD = Record(
    "Asynchronous 1F1B: PipeDream and PipeDream-2BW",
    "Narayanan et al., PipeDream, SOSP 2019; Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021: up "
    "to 20x an unpipelined model and 3.2x GPipe.",
    steps,
    show,
)
