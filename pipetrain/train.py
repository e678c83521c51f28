"""The command `python -m pipetrain`: trains as configured.

Every rank composes the command line and prepares the same run of it. Rank 0 alone claims the run's folder,
finds its checkpoint, decides which data set there is, and records the run; it tells the others what only it
can know.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import sys
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from signal import SIGINT
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from pipetrain.building import Models
from pipetrain.checkpoint import resume
from pipetrain.checkpoint.asking import Asking, idle, status_after, trained
from pipetrain.checkpoint.files import CHECKPOINTS, folders
from pipetrain.checkpoint.plain import read_weights
from pipetrain.checkpoint.saver import Keeper, Saver
from pipetrain.checkpoint.source import AUTO, Source, find_source, read_source, refuse_older
from pipetrain.cli import compose, contained, quoted
from pipetrain.data import Data, DataFacts, load_data
from pipetrain.ending import FAILED, guarded, leave, name_of, terminate
from pipetrain.errors import ChannelError, ConfigError
from pipetrain.measure import measure_run
from pipetrain.network.modes import is_in_evaluation, warn_of_evaluation
from pipetrain.network.values import ValueSpec
from pipetrain.plan.describe import describe, verdict
from pipetrain.plan.memory import gpu_bytes
from pipetrain.plan.plan import Plan
from pipetrain.plan.profile import Profile
from pipetrain.records import folder
from pipetrain.records.files import Files
from pipetrain.records.folder import METRICS, PROFILE_FILE, RAN, SUMMARY, TRACE, UPDATES
from pipetrain.records.history import Machine
from pipetrain.records.loggers import Loggers, check_loggers, start_loggers
from pipetrain.runtime.allocator import keep_freed_memory
from pipetrain.runtime.mesh import Mesh, choose_device, shares_gpu
from pipetrain.runtime.ranks import World
from pipetrain.schedule.actions import ScheduleError
from pipetrain.settings import PROFILE, Settings, share_of_cores
from pipetrain.start import Start
from pipetrain.training.run import (
    Run,
    check_early,
    conditions_of,
    epochs_of,
    lengthens,
    obtain_data,
    prepare,
    with_fallback,
)
from pipetrain.untrusted import read_as

if TYPE_CHECKING:
    from pipetrain.records.recorder import Recorder

log = logging.getLogger("pipetrain")

RELEASE_S = 10.0  # for the remaining processes of a killed run to release its folder


def main() -> None:
    """Run the command line as one of the ranks; exit with the run's status."""
    keep_freed_memory()
    world = World.from_environment()
    with idle(world.rank):
        try:
            status = guarded(lambda: run_command(world))
        except Exception:
            traceback.print_exc()
            status = FAILED
        leave(status)


def freeze_imports() -> None:
    """Exempt the imported modules from garbage collection, which __main__ has turned off.

    Called before a model is built, as frozen objects are never freed (loading torch's compiler keeps its
    callers' frames in a cycle).
    """
    if not gc.isenabled():
        gc.freeze()


def collect_garbage() -> None:
    """Turn the garbage collector on, and let it free what planning and measuring have left."""
    gc.enable()
    gc.collect()


def run_command(world: World) -> int:
    """Compose the command line and run each of its jobs; return the exit status."""
    start = Start(world, sys.argv[1:])
    leads = world.rank == 0
    if leads:
        Thread(target=start.remind, daemon=True).start()
        run_dir = start.run_dir
        if run_dir is not None and not any(word.startswith("run_dir=") for word in sys.argv):
            sys.argv.append(f"run_dir={quoted(run_dir)}")  # otherwise each restart would make a folder
    run_job, refused = (lead, discard_folder) if leads else (follow, _nothing)
    try:
        return compose("config", lambda cfg: run_job(cfg, start), refused, leads)
    except (ConfigError, ScheduleError) as error:
        start.refuse(error)
    finally:
        start.trains.set()


def _nothing() -> None:
    """Leave the folder to rank 0."""


def discard_folder() -> None:
    """Remove the folder of a job that is refused."""
    hydra = HydraConfig.get()
    folder.discard(Path(hydra.runtime.output_dir), f"{hydra.job.name}.log")


@dataclass(frozen=True, slots=True)
class Word:
    """What rank 0 tells the others: the folder, its data set, and the checkpoint to go on from."""

    run_dir: str
    run: str  # the run's unique name
    data: str  # the data set really used
    facts: DataFacts
    resume: str | None
    saves: bool  # whether all ranks need the folder


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is ready to be trained on this rank."""

    word: Word
    run: Run
    device: torch.device
    source: Source | None


def lead(composed: DictConfig, start: Start) -> None:
    """Run a job as rank 0: claim its folder, tell the others, and record it."""
    hydra, world = HydraConfig.get(), start.world
    schedule = str(hydra.runtime.choices["schedule"])
    cfg = contained(composed, Path(hydra.runtime.output_dir))
    run_dir = Path(cfg.run_dir)
    trained.clear()
    reads = OmegaConf.select(cfg, "data.sample") is None  # what an input is must then be seen
    start.doing = f"{'read the data set, ' if reads else ''}build and check the model"
    freeze_imports()
    models = Models(read_weights)
    draft = check_early(cfg, schedule, world.size, models)
    check_loggers(cfg)
    collect_garbage()
    device = choose_device(world, cfg.device)
    resuming = cfg.resume == AUTO
    if resuming and folder.is_finished(run_dir, cfg if start.run_dir is None else None):
        start.begin(composed)
        log.info("pipetrain: run_dir=%s holds this run, finished: nothing is left to do", run_dir)
        return
    longer = resuming and lengthens(run_dir, cfg, draft.settings)
    with folder.claim(run_dir, cfg.resume is not None, longer, RELEASE_S if resuming else 0.0):
        cfg, data, source = find(cfg, draft, start)
        word = Word(
            run_dir=cfg.run_dir,
            run=source.manifest.run if source else uuid.uuid4().hex,
            data=cfg.data.name,
            facts=data.facts,
            resume=str(source.folder) if source else None,
            saves=draft.settings.checkpoint_every is not None or source is not None,
        )
        start.begin(composed, asdict(word))
        files = Files()
        profile = obtain_profile(cfg, schedule, data.facts.example, models, device, start, draft)
        if profile is not None:
            files.text(Path(word.run_dir) / PROFILE_FILE, json.dumps(profile.to_json(), indent=1) + "\n")
            files.write()
        start.doing = "plan the run"
        done = resume.done_batches(source)
        run = prepare(cfg, schedule, world.size, data.facts, data, profile, done, models)
        conditions = conditions_of(cfg, run)
        if source is not None:
            go_on(cfg, source, run, conditions)
        warn_of_evaluation(is_in_evaluation(run.see_model()))
        if run.plan.prediction is not None:
            log.info("%s", verdict(run.plan.prediction))
        get_ready(run, data.facts, start)
        start.doing = "start the loggers"
        with start_loggers(cfg, Path(word.run_dir), word.run, files) as loggers:
            recorder = make_recorder(cfg, run, device, world, files, loggers)
            config: Any = OmegaConf.to_container(cfg, resolve=True)
            train(Prepared(word, run, device, source), start, recorder, conditions, config)


def find(cfg: DictConfig, draft: Plan, start: Start) -> tuple[DictConfig, Data, Source | None]:
    """Find the checkpoint to resume from, and read the data. Raises ConfigError.

    Returns the configuration with the folder, the data set and the cuts really used.
    """
    run_dir, asked = Path(cfg.run_dir), cfg.data.name
    start.doing = "look for a checkpoint"
    source = find_source(cfg.resume, run_dir) if cfg.resume is not None else None
    if source is None:
        folder.clear(run_dir)
    else:
        refuse_older(source, run_dir)
        cfg = resume.with_cuts_of(cfg, source, start.world.size)
    start.doing = "read the data set"
    cfg, data = obtain_data(cfg, draft.settings.dtype)
    hydra = HydraConfig.get()
    words = [*hydra.overrides.task, *hydra.overrides.hydra]
    if not any("run_dir=" in word or "run.dir=" in word for word in words):
        run_dir = folder.rename_after(run_dir, asked, cfg.data.name)
        cfg.run_dir = str(run_dir)
    if hydra.mode == RunMode.RUN:  # not in a sweep, whose runs have a folder each
        start.remember(run_dir)
    return cfg, data, source


def go_on(cfg: DictConfig, source: Source, run: Run, conditions: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another run; remove the records that will be written again."""
    # A run that was killed just before its end may have a checkpoint with all epochs done.
    ending = cfg.resume == AUTO and source.manifest.pipeline == run.plan.pipeline
    resume.refuse_other(source, conditions, run.settings.epochs, ending)
    over = source.manifest.position.epoch == run.settings.epochs
    records = [METRICS, UPDATES, SUMMARY]
    folder.clear(Path(cfg.run_dir), records if over else [*records, TRACE, RAN])
    log.info("pipetrain: going on from %s, after update %d", source.folder, source.manifest.position.update)


def follow(composed: DictConfig, start: Start) -> None:
    """Run a job as one of the other ranks, by rank 0's word."""
    world, schedule = start.world, str(HydraConfig.get().runtime.choices["schedule"])
    cfg = contained(composed, Path())
    trained.clear()
    settings = Settings.composed(cfg, schedule, world.size)
    device = choose_device(world, cfg.device)
    importlib.import_module("torch._dynamo")  # needed for planning; takes a second while rank 0 works
    freeze_imports()
    models = Models(read_weights)
    models.see(cfg, settings.seed, settings.dtype)
    collect_garbage()
    told = start.begin(composed)
    if told is None:
        return
    word: Word = read_as(Word, told, "what rank 0 tells")
    if word.data != cfg.data.name:
        cfg = with_fallback(cfg)
    cfg.run_dir = word.run_dir
    source = None if word.resume is None else read_source(Path(word.resume), world.rank)
    if source is not None:
        cfg = resume.with_cuts_of(cfg, source, world.size)
    if word.saves:
        folder.prove_shared(Path(word.run_dir), world.rank)
    profile = obtain_profile(cfg, schedule, word.facts.example, models, device, start)
    run = prepare(cfg, schedule, world.size, word.facts, None, profile, resume.done_batches(source), models)
    if world.rank in (run.plan.placement[0], run.plan.placement[-1]):  # the others need no sample
        run = replace(run, data=load_data(cfg.data, run.settings.dtype))
    get_ready(run, word.facts, start)
    train(Prepared(word, run, device, source), start)


def obtain_profile(
    cfg: DictConfig,
    schedule: str,
    example: ValueSpec,
    models: Models,
    device: torch.device,
    start: Start,
    draft: Plan | None = None,
) -> Profile | None:
    """Return the profile that decides the cuts, if any: all ranks measure it, or rank 0's `draft` read it."""
    if cfg.partition == PROFILE:
        draft = draft or check_early(cfg, schedule, start.world.size, models, example)
        start.agree("get ready to measure")
        start.doing = "measure the layers"
        return measure_run(cfg, draft, start.world, device, None, models)
    if not isinstance(cfg.partition, DictConfig):
        return None
    mine = draft.prediction.profile.to_json() if draft and draft.prediction else None
    told = start.agree("hear the profile", mine)
    return None if told is None else Profile.from_json(told)


def get_ready(run: Run, facts: DataFacts, start: Start) -> None:
    """Wait for all ranks, and compare what they have planned and read. Raises Refused, ChannelError."""
    data = facts.fingerprint if run.data is None else run.data.fingerprint
    start.agree("get ready", same={"data set": data, **run.plan.pipeline})


def make_recorder(
    cfg: DictConfig, run: Run, device: torch.device, world: World, files: Files, loggers: Loggers
) -> Recorder:
    """Return what records the run, and write its plan."""
    from pipetrain.records.recorder import Recorder  # imports TensorBoard and Matplotlib: only on rank 0

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    room = gpu_bytes(device.type, world.local_size)
    machine = Machine(f"{world.size} x {name}", threads(run, world), keep_freed_memory(), room)
    files.text(Path(cfg.run_dir) / "plan.txt", describe(run.plan, room=room))
    return Recorder(Path(cfg.run_dir), cfg, run.about, machine, files, loggers)


def threads(run: Run, world: World) -> int:
    """Return the number of threads of each process."""
    return run.settings.threads or share_of_cores(world.local_size)


def train(
    prepared: Prepared,
    start: Start,
    recorder: Recorder | None = None,
    conditions: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Connect this rank to the others and train its stages, to the end or until stopped."""
    run, device, source, world = prepared.run, prepared.device, prepared.source, start.world
    settings, plan, run_dir = run.settings, run.plan, Path(prepared.word.run_dir)
    start.agree("begin to train")
    start.trains.set()
    torch.set_num_threads(threads(run, world))
    if shares_gpu(world, device) and world.rank == 0:
        log.warning("pipetrain: ranks share a GPU, so messages go through host memory over gloo")
    edges = list(plan.cut.bounds)
    mesh = Mesh(world, plan.placement, edges, device, None, settings.timeout, ties=plan.cut.ties)
    keeper = Keeper(
        saver=Saver(run_dir, world.rank, mesh.store, settings.checkpoint_keep, settings.timeout),
        asking=Asking(mesh.store, world.rank, first=plan.placement[0]),
        every=settings.checkpoint_every,
        unit=settings.checkpoint_unit,
        run=prepared.word.run,
        conditions=conditions or {},
        config=config or {},
    )
    saved = partial(saved_so_far, run_dir)
    with keeper.asking.listening(saved):
        epochs = epochs_of(run, mesh, recorder, keeper)
        if source is not None:
            epochs.restore(source.folder, source.manifest, run.optimizer)
        try:
            finished = epochs.run()
        except ChannelError as error:
            if by := keeper.asking.stopped_by:  # another rank has left
                terminate(f"{error}, after {name_of(by)}; {saved()}", status_after(by))
            raise
        mesh.close()
        lost = keeper.saver.not_saved
        if recorder and finished and lost != epochs.updates:
            recorder.close()
        elif recorder:
            recorder.stop(lost)
    if keeper.asking.stopped_by == SIGINT and not finished:
        raise KeyboardInterrupt(f"interrupted; {saved()}")
    start.trains.clear()  # what comes is the next job of a sweep


def saved_so_far(run_dir: Path) -> str:
    """Return which checkpoint remains of a run that was interrupted."""
    saved = folders(run_dir / CHECKPOINTS)
    if not saved:
        return "there is no checkpoint yet"
    return f"{saved[0].name} is saved: go on with run_dir={run_dir} resume=auto"
