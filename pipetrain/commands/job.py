"""A job of the command line on each rank: what its options name is built once, and trained."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipetrain.checkpoint.resume import Source
from pipetrain.commands.start import Start
from pipetrain.config.build import Optim, make_optimizer, make_schedule, make_task, model_of
from pipetrain.config.settings import AUTO, Settings, share_of_cores
from pipetrain.data import Data, DataFacts, load_data
from pipetrain.data.sampling import Sampled, Sampler, even
from pipetrain.records import run_folder as folder
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.device import choose_device
from pipetrain.schedule.actions import Schedule
from pipetrain.tasks import Task
from pipetrain.trainer.fit import train_epochs
from pipetrain.trainer.pipeline import Pipeline
from pipetrain.trainer.run import EpochData


@dataclass(frozen=True, slots=True)
class Job:
    """What rank 0 sends the others of a run. `options`: with the data set and the cuts really used."""

    options: Any
    schedule: str  # its name
    swept: bool  # whether it is one of a sweep
    run_dir: str
    run: str  # the run's unique name
    facts: DataFacts
    resume: str | None  # the checkpoint to go on from
    saves: bool  # whether all ranks need the folder


@dataclass(frozen=True, slots=True)
class Parts:
    """What the options name, built once a rank."""

    settings: Settings
    schedule: Schedule
    task: Task
    optim: Optim

    @classmethod
    def of(cls, options: Mapping[str, Any], schedule: str, world: World) -> Parts:
        """Read the options, and build what needs no data. Raises ConfigError."""
        settings = Settings.composed(options, schedule, world.size)
        parts = cls(settings, make_schedule(options), make_task(options), make_optimizer(options))
        choose_device(world.local_rank, settings.device)
        return parts


def train_job(
    job: Job,
    parts: Parts,
    source: Source | None,
    start: Start,
    data: Data | None = None,
    config: Mapping[str, Any] | None = None,
) -> bool:
    """Build the model, and train it; return whether a signal has stopped it. Raises ConfigError.

    `data`, and `config` for the records: of rank 0.
    """
    options, settings, facts = job.options, parts.settings, job.facts
    if not job.swept:  # the runs of a sweep have a folder each
        start.remember(Path(job.run_dir))
    torch.set_num_threads(settings.threads or share_of_cores(start.world.local_size or start.world.size))
    start.doing = "build and check the model"
    sampler = Sampler(
        facts.train, settings.batch_size, settings.microbatches, settings.seed, settings.drop_last
    )
    rate = settings.rate(settings.updates(len(sampler.batch_sizes)))
    if not gc.isenabled():  # __main__ has turned it off
        gc.freeze()  # what is imported is not looked at again; before a model is built, which is to be freed
    model = model_of(options, settings.seed)
    gc.enable()
    gc.collect()  # also the Pipeline of a job of a sweep that was refused
    start.synchronize("build the model")
    what = model, parts.task, parts.optim, parts.schedule
    pipe = Pipeline(*what, lr_schedule=rate, weights=settings.weights, settings=settings)
    del model, what
    training = pipe._training
    placement = training.groups.placement
    ends = {*placement[0], *placement[-1]}  # the others need no sample
    if data is None and (settings.replicas == AUTO or start.world.rank in ends):
        data = load_data(options["data"], settings.dtype)
    same = {"data set": data.fingerprint if data else facts.fingerprint}
    start.synchronize("read the data set", same)
    start.doing = "plan the run"
    reading = settings.seed, settings.workers, settings.timeout, data.classes if data else None
    train = Sampled(data.train if data else None, sampler.batch_sizes, sampler, *reading)
    test = Sampled(data.test if data else None, even(facts.test, settings.batch_size), None, *reading)
    conditions = conditions_of(options, settings, facts, parts.task)
    run_folder = folder.RunFolder(Path(job.run_dir), job.run, source, config or options, conditions)
    epochs = EpochData(training, train, test, len(sampler.batch_sizes), run_folder)

    def ready() -> None:
        start.synchronize("begin to train")
        start.trains.set()

    try:
        train_epochs(training, epochs, training.settings, facts, run_folder, ready)
    finally:
        if start.trains.is_set():  # what is left is to say how it ended
            start.signals.drained.set()
    pipe.close()
    if job.swept and not training.stopping:  # what comes is the next job
        start.trains.clear()
        start.signals.drained.clear()
    return training.stopping


def conditions_of(
    options: Mapping[str, Any], settings: Settings, facts: DataFacts, task: Task
) -> dict[str, Any]:
    """Return what must be the same in a run and its checkpoint, besides the tensors of the model."""
    return {
        "model": options["model"],
        "data": facts.name,
        "data's fingerprint": facts.fingerprint,
        "task": str(task),
        "batch_size": settings.batch_size,
        "data.drop_last": settings.drop_last,
        "seed": settings.seed,
        "dtype": str(settings.dtype).removeprefix("torch."),
    }
