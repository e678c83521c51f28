"""Epochs, records, checkpoints, stops and restarts of a training, for a program and for the command line."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

from pipetrain.checkpoint.files import Manifest, Position
from pipetrain.checkpoint.resume import (
    AUTO,
    find_source,
    read_source,
    refuse_finished,
    refuse_other,
)
from pipetrain.checkpoint.writer import Writer
from pipetrain.config.settings import Settings
from pipetrain.data.loader_facts import has_length
from pipetrain.data.reader import Loader, refuse_loader
from pipetrain.data.splits import DataFacts
from pipetrain.errors import ChannelError, ConfigError, of_all
from pipetrain.exit import brief
from pipetrain.plan.memory_fit import gpu_bytes
from pipetrain.plan.window_lengths import WindowLengths
from pipetrain.records import run_folder as folder
from pipetrain.records.history import About
from pipetrain.records.recorder import Recorder
from pipetrain.records.run_folder import METRICS, RAN, SUMMARY, TRACE, UPDATES, RunFolder
from pipetrain.records.trackers import check_loggers, read_loggers
from pipetrain.rules import COUNT, PATH
from pipetrain.signals import Signals
from pipetrain.trainer.listeners import Checkpoints, listeners_of
from pipetrain.trainer.pipeline import Pipeline
from pipetrain.trainer.run import EpochData, Run
from pipetrain.trainer.training_setup import Training
from pipetrain.trainer.window_stop import LOST, WindowStop

log = logging.getLogger("pipetrain")

_trainings = count()


@brief
def fit(
    pipe: Pipeline,
    train: Loader,
    test: Loader | None = None,
    epochs: int | None = None,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    checkpoint: Mapping[str, Any] | int | None = 1,
    loggers: Sequence[str] | Mapping[str, Mapping[str, Any]] = ("tensorboard",),
    log_every: int = 10,
    trace: bool | int = False,
    name: str = "",
    after_epoch: Callable[[dict[str, float]], str | None] = lambda row: None,
    max_updates: int | None = None,
) -> list[dict[str, float]]:
    """Train epochs of a loader, each with an evaluation after it; return a row of figures for each epoch.

    Every rank gets the rows: epoch, train_loss and train_METRIC, val_loss and val_METRIC, lr, samples_per_s,
    seconds. While it trains rank 0 shows the progress, and then the times of the stages beside the plan's.

    - `train`, `test`: loaders as of Pipeline.train and Pipeline.evaluate, with a length. Without `test`
      nothing is evaluated, and no epoch is the best.
    - `epochs`: by default 1, or as many as `max_updates` needs.
    - `run_dir`: the folder of all records and checkpoints, which all ranks share: metrics.csv, summary.json,
      plan.txt, TensorBoard's events, checkpoints. None: there are none.
    - `resume`: "auto", to go on from the newest whole checkpoint in `run_dir`, if there is one, as a program
      does that torchrun has restarted; or the folder of a checkpoint, or of a run.
    - `checkpoint`: the epochs between two checkpoints; or `{"every": 100, "unit": "updates", "keep": 2}`;
      None: only when a signal asks for one.
    - `loggers`: names of conf/logger, or their options by name.
    - `log_every`: updates to a row of updates.csv.
    - `trace`: whether to write trace.json, or of how many windows.
    - `name`: of the data, for the records.
    - `after_epoch`: called on every rank with an epoch's row; "stop" ends the training, as after the last
      epoch. A training that goes on calls it first with the rows of the epochs before.
    - `max_updates`: of the whole training, which ends there amid an epoch too: with an evaluation, a row of
      the epoch so far, and a checkpoint, from which a longer one goes on with the epoch.

    SIGTERM and Ctrl-C save, and end the training after the window that runs: then `pipe.stopping` is true
    (Ctrl-C raises KeyboardInterrupt once it is saved). SIGUSR1 saves and goes on. Raises ConfigError, before
    anything is written, for wrong values; for the rest see Pipeline.train.
    """
    windows = trace and trace is not True and COUNT.read("trace", trace)
    options = {
        "epochs": 1 if epochs is None else epochs,
        "max_updates": max_updates,
        "log_every": log_every,
        **_checkpoint_options(checkpoint),
        "trace": {"windows": windows} if windows else bool(trace),
        "resume": resume,
    }
    training = pipe._training
    request = training.settings.changed(options)
    batches = _batches_in(training, train, "train", training.settings.microbatches)
    evaluated = 0 if test is None else _batches_in(training, test, "test")
    if request.max_updates and epochs is None:
        options["epochs"] = -(-request.max_updates // batches)
    if resume is not None and run_dir is None:
        raise ConfigError("resume= goes on in a run's folder: give run_dir= too")
    if run_dir is not None and current_thread() is not main_thread():
        raise ConfigError("run_dir= needs a program's main thread, which alone hears signals: call fit there")
    with ExitStack() as held:
        run_folder = None
        if run_dir is not None:
            path = PATH.read("run_dir", run_dir)
            run_folder = held.enter_context(_opened(training, path, request.resume, loggers))
        # The first batch decides the plan; a signal to the group is to spare the data workers that it starts.
        with Signals(training.rank).handled() if run_folder else nullcontext():
            data = EpochData(training, train, test, batches, run_folder)
        with training.guard():
            settings = training.settings.changed(options)
            kind, full = type(getattr(train, "dataset", train)).__name__, settings.batch_size
            facts = DataFacts(name or kind, batches * full, evaluated * full, "", "", [])
            return train_epochs(training, data, settings, facts, run_folder, after_epoch=after_epoch)


def _checkpoint_options(checkpoint: Mapping[str, Any] | int | None) -> dict[str, Any]:
    """Return the options of checkpoints. Raises ConfigError for one that there is not."""
    options = checkpoint if isinstance(checkpoint, Mapping) else {"every": checkpoint}
    if unknown := options.keys() - {"every", "unit", "keep"}:
        raise ConfigError(f"checkpoint has no {min(unknown)}: it has every, unit and keep")
    return {f"checkpoint.{key}": value for key, value in options.items()}


@contextmanager
def _opened(
    training: Training,
    path: Path,
    resume: str | None,
    loggers: Sequence[str] | Mapping[str, Mapping[str, Any]],
) -> Iterator[RunFolder]:
    """Lock a run's folder on rank 0; find the checkpoint to go on from. Raises ConfigError, on all ranks."""
    path, chosen = path.expanduser().absolute(), read_loggers(loggers)
    with ExitStack() as held:

        def find() -> list[Any]:
            check_loggers(chosen)
            held.enter_context(folder.claim(path, resume is not None, resume is not None))
            source = find_source(resume, path) if resume is not None else None
            if source is None:
                folder.clear(path)
                return [None, uuid.uuid4().hex]
            return [str(source.folder), source.manifest.run]

        newest, run = training.guard.on_first("the run's folder", find)
        source = None if newest is None else read_source(Path(newest))
        yield RunFolder(path, run, source, {"logger": chosen})


def _batches_in(training: Training, loader: Loader, name: str, microbatches: int = 1) -> int:
    """Return the number of batches of rank 0's loader. Raises ConfigError, on all ranks."""

    def count() -> int:
        refuse_loader(loader, training.groups.world.size, microbatches)
        batches = len(loader) if has_length(loader) else 0  # type: ignore[arg-type]
        if not batches:
            raise ConfigError(
                f"the {name} loader has no batch or no length, by which fit knows when an epoch ends: give "
                f"one with len(), or train in a loop of your own by pipe.train(loader)"
            )
        return batches

    batches: int = training.guard.on_first(f"the length of the {name} loader", count)
    return batches


def train_epochs(
    training: Training,
    data: EpochData,
    settings: Settings,
    facts: DataFacts,
    run_folder: RunFolder | None,
    ready: Callable[[], None] = lambda: None,
    after_epoch: Callable[[dict[str, float]], str | None] | None = None,
) -> list[dict[str, float]]:
    """Train to the end, or until stopped; return the rows of all epochs.

    Calls `ready` when nothing is left that could refuse the training.
    """
    about = _about(training, data, settings, facts)
    run = Run(training.begun, training.guard, about, data)
    with ExitStack() as ending:
        stop, checkpoints = None, None
        if run_folder is not None:
            checkpoints = _checkpoints(run, training, run_folder)
            store = PrefixStore(f"fit {next(_trainings)}", training.groups.store)
            stop = WindowStop(checkpoints.signals, store, about.plan.firsts[0] == training.rank)
            ending.enter_context(checkpoints.signals.handled())  # until all records are written
            ending.enter_context(stop.watching())
        recorder = None if training.rank else _recorder(about, run_folder, ending)
        if data.source is not None:
            with data.source.used():
                run.restore(data.source)
        ready()
        with checkpoints.saving() if checkpoints else nullcontext():
            listeners = listeners_of(run, recorder, after_epoch, stop, checkpoints)
            looks = (checkpoints.signals, checkpoints.look_every) if checkpoints else ()
            run.begin(listeners, *looks)
            finished = run_epochs(run)
        lost = checkpoints.not_saved if checkpoints else None
        orphaned = 0
        if stop and not finished:
            orphaned = training.groups.maximum("whether torchrun's store is lost", int(stop.lost))
        if recorder and finished and lost != run.position.update:
            recorder.close()
        elif recorder:
            recorder.stop(lost)
        training.note_stop(training.stopping or not finished)
        training.note_metrics(run.metrics() or training.metrics)
        if run_folder and run.stopped_by == "interrupt":
            raise KeyboardInterrupt(f"interrupted; {run_folder.saved_so_far()}")
        if run_folder and orphaned:
            raise of_all(ChannelError(f"{LOST}; {run_folder.saved_so_far()}"), training.rank)
        return run.rows()


def run_epochs(run: Run) -> bool:
    """Train and evaluate all epochs; return False if stopped. Raises ChannelError and TrainingStopped."""
    for epoch in run.remaining():
        for done in run.windows(epoch):
            run.on_windows(done)
            if run.stopped_by:
                break
        else:
            run.on_epoch()
    return run.close()


def _about(training: Training, data: EpochData, settings: Settings, facts: DataFacts) -> About:
    """Return what the records say of the training, with all of its windows proven."""
    plan, device, at = training.begun.plan, training.groups.device, data.start
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    groups = training.groups
    ranks, room = f"{groups.world.size} x {kind}", gpu_bytes(device.type, groups.ranks_on_gpu)
    about = About(
        settings, plan, training.request.task, facts, data.batches, training.request.lr, ranks, room
    )
    schedule = WindowLengths(settings.window, settings.correction, about.updates)
    for epoch, done in ((1, 0), (about.epochs, 0), (at.epoch + 1, at.batch)):
        update = (epoch - 1) * about.batches + done
        for length in set(schedule.lengths(about.batches_of(epoch), done, update)):
            plan.training(length)
    return about


def _checkpoints(run: Run, training: Training, run_folder: RunFolder) -> Checkpoints:
    """Return what saves checkpoints. Raises ConfigError for another run's checkpoint to go on from."""
    about, settings, path, source = run.about, run.about.settings, run_folder.path, run_folder.source
    samples = {"batches": about.batches, "batch_size": settings.batch_size}
    conditions = {**training.conditions, **samples, **run_folder.conditions}
    pipeline, seen = about.plan.pipeline, 0
    if source is not None:
        # A run that was killed just before its end may have a checkpoint with all epochs done.
        ending = settings.resume == AUTO and source.manifest.pipeline == pipeline
        refuse_other(source, conditions)
        done, seen = source.manifest.position.batches(about.batches), source.manifest.position.update
        refuse_finished(source, done, about.updates, ending)
        if training.rank == 0:  # these records will be written again
            records = [METRICS, UPDATES, SUMMARY]
            folder.clear(path, records if done == about.updates else [*records, TRACE, RAN])
            log.info("pipetrain: going on from %s, after update %d", source.folder, seen)
    return Checkpoints(
        run,
        Writer(path, training.groups, settings.checkpoint_keep),
        Signals(training.rank, run_folder.saved_so_far),
        Manifest(run_folder.run, Position(), conditions, pipeline, {**training.config, **run_folder.config}),
        settings.checkpoint_every,
        settings.checkpoint_unit,
        seen,
    )


def _recorder(about: About, run_folder: RunFolder | None, ending: ExitStack) -> Recorder:
    """Return rank 0's recorder; `ending` ends it."""
    if not (log.handlers or logging.getLogger().handlers):  # a program that has set up no logging
        log.addHandler(logging.StreamHandler())
        ending.callback(log.handlers.clear)
        ending.callback(log.setLevel, log.level)
        log.setLevel(log.level or logging.INFO)  # unless the program has chosen one
    recorder = Recorder(about, run_folder)
    ending.callback(recorder.leave)
    return recorder
