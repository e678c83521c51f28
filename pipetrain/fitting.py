"""Epochs, records, checkpoints, stops and restarts of a training, for a program and for the command line."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from pipetrain.building import names_of, shipped
from pipetrain.checkpoint.asking import Asking
from pipetrain.checkpoint.files import CHECKPOINTS, folders
from pipetrain.checkpoint.resume import (
    AUTO,
    Source,
    find_source,
    read_source,
    refuse_finished,
    refuse_other,
    transformers_config,
)
from pipetrain.checkpoint.state import restore_random
from pipetrain.checkpoint.writer import Keeper, Writer
from pipetrain.data.loader import Sampled
from pipetrain.data.loading import Loader, has_length
from pipetrain.data.sets import DataFacts
from pipetrain.ending import terminate
from pipetrain.epochs import Epochs, Passes, PassesByNumber
from pipetrain.errors import ChannelError, ConfigError
from pipetrain.pipeline import TRAINING, Pipeline
from pipetrain.plan.describe import choices, describe
from pipetrain.plan.memory import gpu_bytes
from pipetrain.plan.program import window_lengths
from pipetrain.records import folder
from pipetrain.records.folder import METRICS, PROFILE_FILE, RAN, SUMMARY, TRACE, UPDATES
from pipetrain.records.history import About
from pipetrain.records.recorder import Recorder
from pipetrain.records.trackers import Trackers, check_loggers
from pipetrain.rules import COUNT, PATH
from pipetrain.runtime.feed import Batches, OfLoader
from pipetrain.signals import Signals, name_of, status_after

log = logging.getLogger("pipetrain")

EPOCH_RANDOM = "random/0/epoch"  # of rank 0 at the beginning of an epoch
_trainings = count()


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, locked for it on rank 0, and what its records say of the run.

    `run`: its unique name. `source`: the checkpoint to go on from. `config`: its configuration, with the
    loggers. `conditions`: what a checkpoint to go on from must share, beside the model's tensors. `data`:
    None: as the loaders say.
    """

    path: Path
    run: str
    source: Source | None = None
    config: DictConfig = field(default_factory=lambda: OmegaConf.create({"logger": {}}))
    conditions: Mapping[str, Any] = field(default_factory=dict)
    data: DataFacts | None = None
    ready: Callable[[], None] = lambda: None
    """Called when all is ready to train."""


def fit(
    pipe: Pipeline,
    train: Loader | Sampled,
    test: Loader | Sampled,
    epochs: int = 1,
    run_dir: str | Path | RunFolder | None = None,
    resume: str | Path | None = None,
    checkpoint: Mapping[str, Any] | int | None = 1,
    loggers: Sequence[str] | Mapping[str, Mapping[str, Any]] = ("tensorboard",),
    log_every: int = 10,
    trace: bool | int = False,
    name: str = "",
) -> list[dict[str, float]]:
    """Train epochs of a loader, each with an evaluation after it; return a row of figures for each epoch.

    Every rank gets the rows: epoch, train_loss and train_METRIC, val_loss and val_METRIC, lr, samples_per_s,
    seconds. While it trains rank 0 shows the progress, and then the times of the stages beside the plan's.

    - `train`, `test`: loaders as of Pipeline.train and Pipeline.evaluate, with a length.
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

    SIGTERM and Ctrl-C save, and end the training after the window that runs: then `pipe.stopping` is true
    (Ctrl-C raises KeyboardInterrupt once it is saved). SIGUSR1 saves and goes on. Raises ConfigError, before
    anything is written, for wrong values; for the rest see Pipeline.train.
    """
    options: dict[str, Any] = {}
    if not isinstance(run_dir, RunFolder):  # of which the settings have all
        options |= {"epochs": epochs, "log_every": log_every, **_checkpoints(checkpoint)}
        windows = trace and trace is not True and COUNT.read("trace", trace)
        options["trace"] = {"windows": windows} if windows else bool(trace)
        options["resume"] = None if resume is None else str(resume)
    pipe._settings.changed(options)
    counts = _batches_in(pipe, train, "train"), _batches_in(pipe, test, "test")
    if resume is not None and run_dir is None:
        raise ConfigError("resume= goes on in a run's folder: give run_dir= too")
    with ExitStack() as ending:
        place = run_dir
        if not isinstance(place, RunFolder) and place is not None:
            place = ending.enter_context(
                _opened(pipe, PATH.read("run_dir", place), options["resume"], loggers)
            )
        # The first batch decides the plan; a signal to the group is to spare the data workers that it starts.
        with nullcontext() if place is run_dir else Signals(pipe.rank).handled():
            passes = _passes(pipe, train, test, place.source if place else None)
        # A process of the command line ends after an error, which is to be said at once.
        with nullcontext() if isinstance(run_dir, RunFolder) else pipe._together():
            about = _about(pipe, options, train, counts, place, name)
            return _trained(pipe, passes, about, place, ending)


def _checkpoints(checkpoint: Mapping[str, Any] | int | None) -> dict[str, Any]:
    """Return the options of checkpoints. Raises ConfigError for one that there is not."""
    given = checkpoint if isinstance(checkpoint, Mapping) else {"every": checkpoint}
    if unknown := given.keys() - {"every", "unit", "keep"}:
        raise ConfigError(f"checkpoint has no {min(unknown)}: it has every, unit and keep")
    return {f"checkpoint.{key}": value for key, value in given.items()}


@contextmanager
def _opened(
    pipe: Pipeline,
    path: Path,
    resume: str | None,
    loggers: Sequence[str] | Mapping[str, Mapping[str, Any]],
) -> Iterator[RunFolder]:
    """Lock a run's folder on rank 0; find the checkpoint to go on from. Raises ConfigError, on all ranks."""
    path, config = path.expanduser().absolute(), _logging(loggers)
    with ExitStack() as held:

        def find() -> list[Any]:
            check_loggers(config)
            held.enter_context(folder.claim(path, resume is not None, resume is not None))
            source = find_source(resume, path) if resume is not None else None
            if source is None:
                folder.clear(path)
                return [None, uuid.uuid4().hex]
            return [str(source.folder), source.manifest.run]

        found, run = pipe._together.on_one(0, "the run's folder", None if pipe.rank else find)
        source = None if found is None else read_source(Path(found), pipe.rank)
        yield RunFolder(path, run, source, config)


def _logging(loggers: Sequence[str] | Mapping[str, Mapping[str, Any]]) -> DictConfig:
    """Return a configuration with the options of loggers. Raises ConfigError for an unknown one."""
    chosen: dict[str, Any] = {}
    loggers = [loggers] if isinstance(loggers, str) else loggers
    for name in loggers:
        known = shipped("logger", name)
        if known is None:
            raise ConfigError(f"loggers has an unknown {name}; choose from: {names_of('logger')}")
        chosen |= known
        if isinstance(loggers, Mapping):
            chosen[name] = {**chosen[name], **loggers[name]}
    return OmegaConf.create({"logger": chosen})


class Loaders:
    """Passes over loaders. Rank 0 reads them; their first batch decides the plan, if there is none yet."""

    def __init__(self, pipe: Pipeline, train: Loader, test: Loader, source: Source | None) -> None:
        self._pipe = pipe
        self._train = train
        self._test = test
        epoch = 0
        if source is not None:
            epoch = source.manifest.position.epoch
            self._go_on(source)
        self._ahead: Batches | None = self._begin(epoch)

    def _go_on(self, source: Source) -> None:
        """Restore the random state with which the epoch began that the checkpoint is of."""
        restore_random(source, self._pipe._mesh)
        tensors = source.tensors()
        if source.manifest.position.batch and EPOCH_RANDOM in tensors and not self._pipe.rank:
            torch.set_rng_state(tensors[EPOCH_RANDOM])

    def _begin(self, epoch: int) -> Batches:
        sampler: Any = getattr(self._train, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        self._random = torch.get_rng_state()
        return self._pipe._batches(self._train, f"{TRAINING} (epoch {epoch + 1})")

    def train(self, epoch: int, done: int) -> Batches:
        batches, self._ahead = self._ahead or self._begin(epoch), None
        assert isinstance(batches, OfLoader)
        batches.skip(done, self._pipe._settings.window)
        return batches

    def evaluate(self) -> Batches:
        return self._pipe._batches(self._test, "the evaluation")

    def random(self) -> dict[str, Tensor]:
        return {} if self._pipe.rank else {EPOCH_RANDOM: self._random}


def _passes(pipe: Pipeline, train: Any, test: Any, source: Source | None) -> Passes:
    if isinstance(train, Sampled) and isinstance(test, Sampled):
        pipe._begin_by_number(train, test, source.manifest.position.batch if source else 0)
        return PassesByNumber(train, test, pipe._begun, pipe._task, pipe._mesh)
    return Loaders(pipe, train, test, source)


def _about(
    pipe: Pipeline,
    options: Mapping[str, Any],
    train: Any,
    counts: tuple[int, int],
    place: RunFolder | None,
    name: str,
) -> About:
    """Return what the records say of the training, with all of its windows proven."""
    session, settings = pipe._begun, replace(pipe._settings.changed(options), lr=pipe._asked.peak)
    batches, evaluated = counts
    done = place.source.manifest.position.batch if place and place.source else 0
    for start in (0, done):
        for length in window_lengths(batches, settings.window, start):
            session.prove(length)
    if place is not None and place.data is not None:
        data = place.data
    else:
        full, kind = settings.batch_size, type(getattr(train, "dataset", train)).__name__
        data = DataFacts(name or kind, batches * full, evaluated * full, "", "", [])
    device, world = pipe._mesh.device, pipe._mesh.world
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    room = gpu_bytes(device.type, world.local_size)
    return About(settings, session.plan, pipe._task, data, batches, f"{world.size} x {kind}", room)


def _batches_in(pipe: Pipeline, loader: Loader | Sampled, name: str) -> int:
    """Return the number of batches of rank 0's loader. Raises ConfigError, on all ranks."""
    if isinstance(loader, Sampled):
        return len(loader.sizes)

    def count() -> int:
        batches = len(loader) if has_length(loader) else 0  # type: ignore[arg-type]
        if not batches:
            raise ConfigError(
                f"the {name} loader has no batch or no length, by which fit knows when an epoch ends: give "
                f"one with len(), or train in a loop of your own by pipe.train(loader)"
            )
        return batches

    batches: int = pipe._together.on_one(0, f"the length of the {name} loader", None if pipe.rank else count)
    return batches


def _trained(
    pipe: Pipeline, passes: Passes, about: About, place: RunFolder | None, ending: ExitStack
) -> list[dict[str, float]]:
    """Train to the end, or until stopped; return the rows of all epochs."""
    mesh, rank, session = pipe._mesh, pipe.rank, pipe._begun
    keeper = None if place is None else _keeper(pipe, about, place)
    if keeper is not None:  # until all records are written
        ending.enter_context(keeper.asking.handled())
    recorder = None if rank else _recorder(about, place, ending)
    epochs = Epochs(session, mesh, passes, about, pipe._asked.rate, recorder, keeper)
    if place is not None and place.source is not None:
        epochs.restore(place.source)
    if pipe._given is not None and not rank:
        pipe._given.prove(training=True)
    if place is not None:
        place.ready()
    finished = _run(epochs, keeper, place)
    interrupted = keeper is not None and not finished and keeper.asking.interrupted()
    lost = keeper.not_saved if keeper else None
    if recorder and finished and lost != epochs.updates:
        recorder.close()
    elif recorder:
        recorder.stop(lost)
    pipe._stopping = pipe._stopping or not finished
    pipe.metrics = epochs.metrics() or pipe.metrics
    if interrupted and place is not None:
        raise KeyboardInterrupt(f"interrupted; {saved_so_far(place.path)}")
    return epochs.rows()


def _run(epochs: Epochs, keeper: Keeper | None, place: RunFolder | None) -> bool:
    """Run the epochs; return False if a signal has stopped them."""
    try:
        return epochs.run()
    except ChannelError as error:
        if keeper and place and (by := keeper.asking.stopped_by):  # another rank has left
            terminate(f"{error}, after {name_of(by)}; {saved_so_far(place.path)}", status_after(by))
        raise
    finally:
        if keeper:
            keeper.asking.drained.set()


def _keeper(pipe: Pipeline, about: About, place: RunFolder) -> Keeper:
    """Return what saves checkpoints, and hears signals."""
    settings, rank = about.settings, pipe.rank
    store = pipe._mesh.store and PrefixStore(f"fit {next(_trainings)}", pipe._mesh.store)
    data = {"batches": about.batches, "batch_size": settings.batch_size}
    conditions = {**pipe._conditions, **(place.conditions or data)}
    if place.source is not None:
        _go_on(place, place.source, about, conditions, rank)
    config: Any = OmegaConf.to_container(place.config, resolve=True)
    return Keeper(
        writer=Writer(place.path, pipe._mesh, store, settings.checkpoint_keep, settings.timeout),
        asking=Asking(pipe._mesh, store, about.plan.placement[0], partial(saved_so_far, place.path)),
        every=settings.checkpoint_every,
        unit=settings.checkpoint_unit,
        run=place.run,
        conditions=conditions,
        config={"seed": pipe._begun.engine.seed, **transformers_config(pipe._model), **config},
    )


def _go_on(place: RunFolder, source: Source, about: About, conditions: Mapping[str, Any], rank: int) -> None:
    """Refuse a checkpoint of another run; remove the records that will be written again."""
    epochs, position = about.settings.epochs, source.manifest.position
    # A run that was killed just before its end may have a checkpoint with all epochs done.
    ending = about.settings.resume == AUTO and source.manifest.pipeline == about.plan.pipeline
    refuse_other(source, conditions)
    refuse_finished(source, epochs, ending)
    if rank == 0:
        records = [METRICS, UPDATES, SUMMARY]
        folder.clear(place.path, records if position.epoch == epochs else [*records, TRACE, RAN])
        log.info("pipetrain: going on from %s, after update %d", source.folder, position.update)


def _recorder(about: About, place: RunFolder | None, ending: ExitStack) -> Recorder:
    """Return rank 0's recorder, with the plan for its folder."""
    if not (log.handlers or logging.getLogger().handlers):  # a program that has set up no logging
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
        ending.callback(log.handlers.clear)
    if place is None:
        return Recorder(about)
    trackers = Trackers(place.config, place.path, place.run)
    ending.callback(trackers.close)
    recorder = Recorder(about, place.path, place.config, trackers)
    recorder.files.text("plan.txt", describe(about.plan, room=about.room))
    if about.plan.prediction is not None:
        profile = about.plan.prediction.profile
        recorder.files.text(PROFILE_FILE, json.dumps(profile.to_json(), indent=1) + "\n")
        log.info("%s", choices(about.plan.prediction))
    return recorder


def saved_so_far(run_dir: Path) -> str:
    """Return which checkpoint remains of a run that was interrupted."""
    saved = folders(run_dir / CHECKPOINTS)
    if not saved:
        return "there is no checkpoint yet"
    return f"{saved[0].name} is saved: go on with run_dir={run_dir} resume=auto"
