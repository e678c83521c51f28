"""The command `python -m pipetrain`: trains as configured.

Rank 0 composes and checks the configuration, makes jobs of it, and records the run. The other ranks join in
the jobs that it announces.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import traceback
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import SIGINT
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipetrain.building import Models
from pipetrain.checkpoint import resume
from pipetrain.checkpoint.asking import Asking, idle, status_after, trained
from pipetrain.checkpoint.files import CHECKPOINTS, folders
from pipetrain.checkpoint.saver import Keeper, Saver
from pipetrain.checkpoint.source import AUTO, Source, find_source, read_source, refuse_older
from pipetrain.cli import compose, contained, quoted
from pipetrain.data import load_data
from pipetrain.ending import FAILED, guarded, leave, name_of, terminate
from pipetrain.errors import ChannelError, ConfigError
from pipetrain.launch import START_S, Job, Leader, Part, follow, names_folder
from pipetrain.measure import measure_run
from pipetrain.network.modes import is_in_evaluation, warn_of_evaluation
from pipetrain.plan.blueprint import Plan
from pipetrain.plan.describe import describe, verdict
from pipetrain.plan.fitting import gpu_bytes
from pipetrain.plan.profile import Profile
from pipetrain.records import folder
from pipetrain.records.files import Files
from pipetrain.records.folder import METRICS, PROFILE_FILE, RAN, SUMMARY, TRACE, UPDATES
from pipetrain.records.history import Machine
from pipetrain.records.loggers import Loggers, check_loggers, start_loggers
from pipetrain.runtime.allocator import keep_freed_memory
from pipetrain.runtime.mesh import Mesh, World, choose_device, shares_gpu
from pipetrain.seal import SealedStore
from pipetrain.settings import PROFILE, share_of_cores
from pipetrain.training.run import Run, check_early, obtain_data, prepare
from pipetrain.training.trainer import Trainer

if TYPE_CHECKING:
    from pipetrain.records.recorder import Recorder

log = logging.getLogger("pipetrain")

RELEASE_S = 10.0  # for the remaining processes of a killed run to release its folder


def main() -> None:
    """Lead the run on rank 0, follow on the others; exit with the run's status."""
    keep_freed_memory()
    world = World.from_environment()
    with idle(world.rank):
        try:
            status = guarded(lambda: follow(world, partial(join, Models())) if world.rank else lead(world))
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


def lead(world: World) -> int:
    """Compose the configuration, check it and start it on all ranks; return the exit status."""
    leader = Leader(world)
    Thread(target=leader.remind, daemon=True).start()
    status = FAILED
    try:
        run_dir = leader.remembered()
        if run_dir is not None and not names_folder():  # otherwise each restart would create a new folder
            sys.argv.append(f"run_dir={quoted(run_dir)}")
        status = guarded(lambda: compose("config", lambda cfg: start(cfg, world, leader), discard_folder))
    finally:
        leader.end(status)
    return status


def start(cfg: DictConfig, world: World, leader: Leader) -> None:
    """Run the configuration on all ranks."""
    hydra = HydraConfig.get()
    run_dir = Path(hydra.runtime.output_dir)
    lead_job(contained(cfg, run_dir), str(hydra.runtime.choices["schedule"]), world, leader)


def discard_folder() -> None:
    """Remove the folder of a job that is refused."""
    hydra = HydraConfig.get()
    folder.discard(Path(hydra.runtime.output_dir), f"{hydra.job.name}.log")


def lead_job(cfg: DictConfig, schedule: str, world: World, leader: Leader) -> None:
    """Claim the run's folder, and decide, announce and record one job."""
    trained.clear()
    run_dir = Path(cfg.run_dir)
    reads = OmegaConf.select(cfg, "data.sample") is None  # what an input is must then be seen
    doing = f"{'read the data set, ' if reads else ''}build and check the model"
    leader.phase(doing, max(START_S, _seconds(cfg, "timeout")))
    freeze_imports()
    models = Models()
    draft = check_early(cfg, schedule, world.size, models)
    check_loggers(cfg)
    collect_garbage()
    leader.phase("choose its device and its folder", draft.settings.timeout)
    choose_device(world, cfg.device)
    restarted, resuming = leader.remembered() is not None, cfg.resume == AUTO
    if resuming and folder.is_finished(run_dir, None if restarted else cfg):
        leader.trust(run_dir, folder.read_key(run_dir))
        log.info("pipetrain: run_dir=%s holds this run, finished: nothing is left to do", run_dir)
        return
    longer = resuming and resume.lengthens(run_dir, cfg, draft.settings)
    patience_s = RELEASE_S if resuming else 0.0
    with folder.claim(run_dir, cfg.resume is not None, longer, patience_s) as key:
        decided = decide(cfg, schedule, draft, models, key, world, leader)
        leader.phase("start the loggers", max(START_S, draft.settings.timeout))
        with start_loggers(decided.cfg, Path(decided.job.run_dir), decided.job.run, decided.files) as loggers:
            record(decided, world, leader, loggers)


@dataclass(frozen=True, slots=True)
class Decided:
    """A job that rank 0 has decided, with its run and the files of the run's folder."""

    job: Job
    run: Run
    source: Source | None
    conditions: Mapping[str, Any]
    cfg: DictConfig
    files: Files


def decide(
    cfg: DictConfig, schedule: str, draft: Plan, models: Models, key: str, world: World, leader: Leader
) -> Decided:
    """Find the checkpoint to resume from, read the data, and plan the run. Raises ConfigError."""
    run_dir, asked, timeout = Path(cfg.run_dir), cfg.data.name, draft.settings.timeout
    leader.phase("look for a checkpoint", timeout)
    source = find_source(cfg.resume, run_dir) if cfg.resume is not None else None
    if source is None:
        folder.clear(run_dir)
    else:
        refuse_older(source, run_dir)
        cfg = resume.with_cuts_of(cfg, source, world.size)
    leader.phase("read the data set", timeout + _seconds(cfg, "data.source.total_timeout"))
    cfg, data = obtain_data(cfg, draft.settings.dtype)
    hydra = HydraConfig.get()
    words = [*hydra.overrides.task, *hydra.overrides.hydra]
    if not any("run_dir=" in word or "run.dir=" in word for word in words):
        run_dir = folder.rename_after(run_dir, asked, cfg.data.name)
        cfg.run_dir = str(run_dir)
    leader.trust(run_dir, key)
    if hydra.mode == RunMode.RUN:  # not in a sweep, whose runs have a folder each
        leader.remember(run_dir)
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    job = Job(
        config,
        schedule,
        str(run_dir),
        data.facts,
        run=source.manifest.run if source else uuid.uuid4().hex,
        resume=str(source.folder) if source else None,
        saves=draft.settings.checkpoint_every is not None or source is not None,
    )
    leader.phase("plan the run", timeout)
    files = Files()
    profile = obtain_profile(cfg, job, draft, models, world, leader, files)
    run = prepare(cfg, schedule, world.size, data.facts, data, profile, resume.done_batches(source), models)
    mine = resume.conditions(cfg, run)
    if source is not None:
        # A run that was killed just before its end may have a checkpoint with all epochs done.
        ending = cfg.resume == AUTO and source.manifest.pipeline == run.plan.pipeline
        resume.refuse_other(source, mine, run.settings.epochs, ending)
        over = source.manifest.position.epoch == run.settings.epochs
        folder.clear(
            run_dir, [METRICS, UPDATES, SUMMARY] if over else [METRICS, UPDATES, SUMMARY, TRACE, RAN]
        )
        update = source.manifest.position.update
        log.info("pipetrain: going on from %s, after update %d", job.resume, update)
    warn_of_evaluation(is_in_evaluation(run.see_model()))
    if profile is not None:
        job = replace(job, profile=profile.to_json())
    if run.plan.prediction is not None:
        log.info("%s", verdict(run.plan.prediction))
    return Decided(job, run, source, mine, cfg, files)


def _seconds(cfg: DictConfig, key: str) -> float:
    """Return a number of seconds from an unchecked configuration; 0 if it is not a number."""
    try:
        value = OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        value = None
    return value if isinstance(value, int | float) else 0.0


def obtain_profile(
    cfg: DictConfig, job: Job, draft: Plan, models: Models, world: World, leader: Leader, files: Files
) -> Profile | None:
    """Measure or read the profile that decides the cuts, if any, and write it to the run's folder."""
    if cfg.partition == PROFILE:
        device = choose_device(world, cfg.device)
        store = leader.announce(replace(job, task="profile"))
        leader.await_ready(draft.settings.timeout)
        profile = measure_run(cfg, draft, world, device, store, models)
    elif draft.prediction is not None:
        profile = draft.prediction.profile
    else:
        return None
    files.text(Path(job.run_dir) / PROFILE_FILE, json.dumps(profile.to_json(), indent=1) + "\n")
    files.write()
    return profile


def record(decided: Decided, world: World, leader: Leader, loggers: Loggers) -> None:
    """Announce the job, train as rank 0, and write the records."""
    store = leader.announce(decided.job)
    from pipetrain.records.recorder import Recorder  # imports TensorBoard and Matplotlib: only on rank 0

    run, cfg, run_dir = decided.run, decided.cfg, Path(decided.job.run_dir)
    device = choose_device(world, cfg.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    room = gpu_bytes(device.type, world.local_size)
    machine = Machine(f"{world.size} x {name}", threads(run, world), keep_freed_memory(), room)
    decided.files.text(run_dir / "plan.txt", describe(run.plan, room=room))
    # It draws while the others get ready.
    recorder = Recorder(run_dir, cfg, run, machine, decided.files, loggers)
    leader.await_ready(run.settings.timeout)
    leader.trains.set()
    train(run, device, world, store, decided.job, decided.source, recorder, decided.conditions)


def join(models: Models, job: Job, world: World) -> Part:
    """Prepare a job of rank 0; return this rank's part of it. Raises ConfigError."""
    trained.clear()
    freeze_imports()
    collect_garbage()
    cfg = OmegaConf.create(job.config)
    device = choose_device(world, cfg.device)
    if job.task == "profile":
        draft = check_early(cfg, job.schedule, world.size, models, job.data.example)
        return lambda store: _measure(cfg, draft, world, device, store, models)
    profile = None if job.profile is None else Profile.from_json(job.profile)
    source = None if job.resume is None else read_source(Path(job.resume), world.rank)
    done = resume.done_batches(source)
    run = prepare(cfg, job.schedule, world.size, job.data, None, profile, done, models)
    if world.rank in (run.plan.placement[0], run.plan.placement[-1]):  # the others need no sample
        data = load_data(cfg.data, run.settings.dtype)
        if data.fingerprint != job.data.fingerprint:
            raise ConfigError(
                f"rank {world.rank} reads another data set than rank 0: {data.fingerprint}, not "
                f"{job.data.fingerprint}; give every machine the same files"
            )
        run = replace(run, data=data)
    return lambda store: train(run, device, world, store, job, source)


def _measure(
    cfg: DictConfig,
    draft: Plan,
    world: World,
    device: torch.device,
    store: SealedStore | None,
    models: Models,
) -> None:
    """Measure together with rank 0, which says what fails."""
    with suppress(ConfigError):
        measure_run(cfg, draft, world, device, store, models)


def threads(run: Run, world: World) -> int:
    """Return the number of threads of each process."""
    return run.settings.threads or share_of_cores(world.local_size)


def train(
    run: Run,
    device: torch.device,
    world: World,
    store: SealedStore | None,
    job: Job,
    source: Source | None = None,
    recorder: Recorder | None = None,
    conditions: Mapping[str, Any] | None = None,
) -> None:
    """Connect this rank to the others and train its stages, to the end or until stopped."""
    settings, plan, run_dir = run.settings, run.plan, Path(job.run_dir)
    torch.set_num_threads(threads(run, world))
    if shares_gpu(world, device) and world.rank == 0:
        log.warning("pipetrain: ranks share a GPU, so messages go through host memory over gloo")
    edges = list(plan.cut.bounds)
    mesh = Mesh(world, plan.placement, edges, device, store, settings.timeout, ties=plan.cut.ties)
    keeper = Keeper(
        saver=Saver(run_dir, world.rank, store, settings.checkpoint_keep, settings.timeout),
        asking=Asking(store, world.rank, first=plan.placement[0]),
        every=settings.checkpoint_every,
        unit=settings.checkpoint_unit,
        run=job.run,
        conditions=conditions or {},
        config=job.config,
    )
    saved = partial(saved_so_far, run_dir)
    with keeper.asking.listening(saved):
        trainer = Trainer(run, mesh, recorder, keeper)
        if source is not None:
            trainer.restore(source.folder, source.manifest)
        try:
            finished = trainer.fit()
        except ChannelError as error:
            if by := keeper.asking.stopped_by:  # another rank has left
                terminate(f"{error}, after {name_of(by)}; {saved()}", status_after(by))
            raise
        mesh.close()
        lost = keeper.saver.not_saved
        if recorder and finished and lost != trainer.updates:
            recorder.close()
        elif recorder:
            recorder.stop(lost)
    if keeper.asking.stopped_by == SIGINT and not finished:
        raise KeyboardInterrupt(f"interrupted; {saved()}")


def saved_so_far(run_dir: Path) -> str:
    """Return which checkpoint remains of a run that was interrupted."""
    saved = folders(run_dir / CHECKPOINTS)
    if not saved:
        return "there is no checkpoint yet"
    return f"{saved[0].name} is saved: go on with run_dir={run_dir} resume=auto"
