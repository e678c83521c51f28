"""The command `python -m pipetrain`: trains as configured.

Every rank composes the command line, builds the same model, task and optimizer of it, and calls Pipeline and
fit. Rank 0 alone claims the run's folder, finds its checkpoint and decides which data set there is; it
tells the others what only it can know.
"""

from __future__ import annotations

import gc
import importlib
import logging
import re
import sys
import traceback
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from pipetrain.checkpoint.resume import AUTO, Source, find_source, read_source
from pipetrain.commands.cli import as_mapping, compose, contained, quoted, values_of
from pipetrain.commands.obtain import obtain_data, with_fallback
from pipetrain.commands.start import Start, refuse_few_layers
from pipetrain.config.build import make_optimizer, make_schedule, make_task, model_of
from pipetrain.config.settings import PROFILE, Mode, Settings, share_of_cores
from pipetrain.data import Data, DataFacts, load_augment, load_data
from pipetrain.data.sampling import Sampled, Sampler, even
from pipetrain.errors import ConfigError, Refused, one_line
from pipetrain.exit import FAILED, REFUSED, guarded, leave
from pipetrain.records import run_folder as folder
from pipetrain.records.sweep_table import SweptRun, end_sweep
from pipetrain.records.trackers import check_loggers
from pipetrain.runtime.comm.ranks import World
from pipetrain.runtime.comm.rendezvous import START_S
from pipetrain.runtime.device import choose_device, keep_freed_memory
from pipetrain.schedule.actions import ScheduleError
from pipetrain.signals import Signals
from pipetrain.tasks import Task
from pipetrain.trainer.fit import train_epochs
from pipetrain.trainer.passes import TrainingPasses
from pipetrain.trainer.pipeline import Pipeline
from pipetrain.typed_json import read_as

log = logging.getLogger("pipetrain")

RELEASE_S = 10.0  # for the remaining processes of a killed run to release its folder


def main() -> None:
    """Run the command line as one of the ranks; exit with the run's status."""
    keep_freed_memory()
    world = World.current()
    signals = Signals(world.rank)
    with signals.handled():
        try:
            status = guarded(lambda: run_command(world, signals))
        except Exception:
            traceback.print_exc()
            status = FAILED
        leave(status)


def run_command(world: World, signals: Signals) -> int:
    """Compose the command line and run each of its jobs; return the exit status."""
    start = Start(world, sys.argv[1:], signals)
    leads = world.rank == 0
    if leads:
        Thread(target=start.remind, daemon=True).start()
        run_dir = start.run_dir
        if run_dir is not None and not any(word.startswith("run_dir=") for word in sys.argv):
            sys.argv.append(f"run_dir={quoted(run_dir)}")  # otherwise each restart would make a folder
    before = given_folder(sys.argv[1:])
    run_job = lead if leads else follow
    swept, refusals = list[SweptRun](), list[str]()

    def note(why: str = "") -> None:
        hydra = HydraConfig.get()
        if leads and hydra.mode == RunMode.MULTIRUN:
            swept.append(SweptRun(hydra.overrides.task, Path(hydra.runtime.output_dir), why))

    def job(cfg: DictConfig) -> None:
        run_job(cfg, start)
        note()

    def failed(error: Exception) -> bool:
        """Note why a job of a sweep has failed; where all ranks refuse it before it trains, others follow."""
        if isinstance(error, ConfigError | ScheduleError):
            if leads:
                discard_folder(*before)
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                error = start.as_refused(error, START_S)
                if isinstance(error, Refused) or (world.size == 1 and not start.trains.is_set()):
                    refusals.append(str(error))
        note(one_line(error) or type(error).__name__)
        refused = refusals[-1:] == [str(error)]
        if refused and leads:
            log.error("pipetrain: run %s: %s", Path(HydraConfig.get().runtime.output_dir).name, error)
        return refused

    try:
        with signals.losing():
            return compose("config", job, failed, leads) or REFUSED * bool(refusals)
    except (ConfigError, ScheduleError) as error:
        start.refuse(error)
    finally:
        start.trains.set()
        if table := end_sweep(swept):  # also of what was done before an error
            with suppress(BrokenPipeError):
                print(table, flush=True)


def given_folder(words: Sequence[str]) -> tuple[Path, folder.Before]:
    """Return the folder that a command line names for its run, or that of all runs, as it is before."""
    paths = [
        match[1] for word in words if (match := re.fullmatch(r"\+*(?:run_dir|hydra\.run\.dir)=(.*)", word))
    ]
    path = Path(paths[-1].strip("'\"")).expanduser() if paths else Path(folder.RUNS)
    return path, folder.Before.of(path)


def discard_folder(path: Path, before: folder.Before) -> None:
    """Remove the folder of a job that is refused, if it was not there."""
    hydra = HydraConfig.get()
    mine = Path(hydra.runtime.output_dir)
    if mine.absolute() != path.absolute():  # one of a sweep, or of the folder of all runs
        before = folder.Before(missing=(mine, *before.missing))
    folder.discard(mine, before, f"{hydra.job.name}.log")


@dataclass(frozen=True, slots=True)
class Word:
    """What rank 0 tells the others: the folder, its data set, and the checkpoint to go on from."""

    run_dir: str
    run: str  # the run's unique name
    data: str  # the data set really used
    facts: DataFacts
    resume: str | None
    saves: bool  # whether all ranks need the folder


def lead(composed: DictConfig, start: Start) -> None:
    """Run a job as rank 0: claim its folder, find its data and checkpoint, and tell the others."""
    cfg = contained(composed, Path(HydraConfig.get().runtime.output_dir))
    settings, config = read(cfg, start), as_mapping(cfg)
    run_dir, resuming = Path(cfg.run_dir), settings.resume == AUTO
    check_loggers(config["logger"])
    if resuming and folder.is_finished(run_dir, config if start.run_dir is None else None):
        start.begin(composed)
        log.info("pipetrain: run_dir=%s holds this run, finished: nothing is left to do", run_dir)
        return
    longer = resuming and folder.lengthens(run_dir, config, settings)
    with folder.claim(run_dir, settings.resume is not None, longer, RELEASE_S if resuming else 0.0):
        cfg, data, source = find(cfg, settings, start)
        word = Word(
            run_dir=cfg.run_dir,
            run=source.manifest.run if source else uuid.uuid4().hex,
            data=cfg.data.name,
            facts=data.facts,
            resume=str(source.folder) if source else None,
            saves=settings.checkpoint_every is not None or source is not None,
        )
        start.begin(composed, asdict(word))
        train(cfg, word, data, source, start)


def read(cfg: DictConfig, start: Start) -> Settings:
    """Read what every rank can of a configuration, and refuse it alike. Raises ConfigError."""
    start.signals.drained.clear()  # as the job before has left it
    options = values_of(cfg)
    settings = settings_of(options, start.world)
    refuse_few_layers(options, len(settings.places))
    make_task(options)
    make_optimizer(options)
    load_augment(options["data"])
    choose_device(start.world.local_rank, settings.device)
    return settings


def settings_of(options: Mapping[str, Any], world: World) -> Settings:
    """Return the settings of a configuration. Raises ConfigError."""
    return Settings.composed(options, str(HydraConfig.get().runtime.choices["schedule"]), world.size)


def find(cfg: DictConfig, settings: Settings, start: Start) -> tuple[DictConfig, Data, Source | None]:
    """Find the checkpoint to resume from, and read the data. Raises ConfigError.

    Returns the configuration with the folder, the data set and the cuts really used.
    """
    run_dir, asked = Path(cfg.run_dir), cfg.data.name
    start.doing = "look for a checkpoint"
    source = find_source(settings.resume, run_dir) if settings.resume is not None else None
    if source is None:
        folder.clear(run_dir)
    else:
        cfg = with_cuts_of(cfg, source, settings)
    start.doing = "read the data set"
    cfg, data = obtain_data(cfg, settings.dtype)
    hydra = HydraConfig.get()
    words = [*hydra.overrides.task, *hydra.overrides.hydra]
    if not any("run_dir=" in word or "run.dir=" in word for word in words):
        run_dir = folder.rename_after(run_dir, asked, cfg.data.name)
        cfg.run_dir = str(run_dir)
    return cfg, data, source


def with_cuts_of(cfg: DictConfig, source: Source, settings: Settings) -> DictConfig:
    """Return the configuration with the checkpoint's cuts where it would otherwise be profiled again.

    With replicas=auto also with its replicas, if it is of as many ranks.
    """
    with source.used():
        pipeline = source.manifest.pipeline
        firsts, chosen = sorted({*pipeline["placement"]}), settings.replicas == AUTO
        ranks = max(pipeline.get("ranks", firsts)) + 1
        alike = ranks == settings.ranks if chosen else len(firsts) == len({of[0] for of in settings.places})
        modes = [list(Mode)[number].value for number in pipeline["recompute"]]
    if cfg.partition != PROFILE or not alike:
        return cfg
    cfg = cfg.copy()
    if chosen:
        cfg.replicas = [end - first for first, end in pairwise([*firsts, ranks])]
    cfg.partition = pipeline["cuts"]
    if cfg.memory_limit is not None:  # recomputation cannot be chosen without a profile
        cfg.recompute = modes
    cfg.memory_limit = None
    return cfg


def follow(composed: DictConfig, start: Start) -> None:
    """Run a job as one of the other ranks, by rank 0's word."""
    cfg = contained(composed, Path())
    settings = read(cfg, start)
    importlib.import_module("torch._dynamo")  # needed for planning; takes a second while rank 0 works
    first_word = start.begin(composed)
    if first_word is None:
        return
    word: Word = read_as(Word, first_word, "what rank 0 tells")
    if word.data != cfg.data.name:
        cfg = with_fallback(cfg)
    cfg.run_dir = word.run_dir
    source = None if word.resume is None else read_source(Path(word.resume))
    if source is not None:
        cfg = with_cuts_of(cfg, source, settings)
    if word.saves:
        folder.require_shared(Path(word.run_dir))
    train(cfg, word, None, source, start)


def train(cfg: DictConfig, word: Word, data: Data | None, source: Source | None, start: Start) -> None:
    """Build what the configuration names, and train it. `data`: on rank 0. Raises ConfigError."""
    options = values_of(cfg)
    settings, facts, task = settings_of(options, start.world), word.facts, make_task(options)
    if HydraConfig.get().mode == RunMode.RUN:  # not in a sweep, whose runs have a folder each
        start.remember(Path(word.run_dir))
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
    start.broadcast_word("build the model")
    pipe = Pipeline(
        model,
        task,
        make_optimizer(options),
        make_schedule(options),
        lr_schedule=rate,
        weights=settings.weights,
        settings=settings,
    )
    del model
    training = pipe._training
    placement = training.groups.placement
    ends = {*placement[0], *placement[-1]}  # the others need no sample
    if data is None and (settings.replicas == AUTO or start.world.rank in ends):
        data = load_data(options["data"], settings.dtype)
    start.broadcast_word(
        "read the data set", same={"data set": data.fingerprint if data else facts.fingerprint}
    )
    start.doing = "plan the run"
    own = settings.seed, settings.workers, settings.timeout, data.classes if data else None
    samples = (
        Sampled(data.train if data else None, sampler.batch_sizes, sampler, *own),
        Sampled(data.test if data else None, even(facts.test, settings.batch_size), None, *own),
    )
    conditions = conditions_of(cfg, settings, facts, task)
    run_folder = folder.RunFolder(Path(word.run_dir), word.run, source, as_mapping(cfg), conditions)
    passes = TrainingPasses(training, *samples, len(sampler.batch_sizes), run_folder)

    def ready() -> None:
        start.broadcast_word("begin to train")
        start.trains.set()

    try:
        train_epochs(training, passes, training.settings, facts, run_folder, ready)
    finally:
        if start.trains.is_set():  # what is left is to say how it ended
            start.signals.drained.set()
    pipe.close()
    if training.stopping:  # by SIGTERM, which ends a sweep too
        sys.exit()
    start.trains.clear()  # what comes is the next job of a sweep


def conditions_of(cfg: DictConfig, settings: Settings, facts: DataFacts, task: Task) -> dict[str, Any]:
    """Return what a run and its checkpoint must agree in, beside the tensors of the model."""
    return {
        "model": as_mapping(cfg.model),
        "data": facts.name,
        "data's fingerprint": facts.fingerprint,
        "task": str(task),
        "batch_size": settings.batch_size,
        "data.drop_last": settings.drop_last,
        "seed": settings.seed,
        "dtype": str(settings.dtype).removeprefix("torch."),
    }
