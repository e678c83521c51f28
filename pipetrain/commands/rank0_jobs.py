"""What rank 0 alone does: reads the command line by Hydra, claims a folder, finds the data and a checkpoint.

A value that is wrong is refused before another rank has come.
"""

from __future__ import annotations

import logging
import re
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from pipetrain.checkpoint.resume import Source, find_source
from pipetrain.commands.cli import as_mapping, compose, contained, overrides, quoted, values_of
from pipetrain.commands.job import Job, Parts, train_job
from pipetrain.commands.start import Start, as_json, refuse_few_layers
from pipetrain.config.choices import chosen, conf_dir
from pipetrain.config.settings import AUTO, PROFILE, Mode, Settings, value_at
from pipetrain.data import Data, DataMissing, load_augment, load_data
from pipetrain.errors import ConfigError, Refused, one_line
from pipetrain.exit import REFUSED
from pipetrain.records import run_folder as folder
from pipetrain.records.sweep_table import SweptRun, end_sweep
from pipetrain.records.trackers import check_loggers
from pipetrain.runtime.comm.rendezvous import START_S
from pipetrain.schedule.actions import ScheduleError

log = logging.getLogger("pipetrain")

CARRIED_OVER = ("workers", "drop_last", "train_limit", "test_limit")  # options kept for a fallback data set
RELEASE_S = 10.0  # for the remaining processes of a killed run to release its folder


def run_jobs(start: Start) -> int:
    """Compose the command line and run each of its jobs; return the exit status."""
    Thread(target=start.remind, daemon=True).start()
    run_dir = start.run_dir
    if run_dir is not None and not any(word.startswith("run_dir=") for word in sys.argv):
        sys.argv.append(f"run_dir={quoted(run_dir)}")  # otherwise each restart would make a folder
    before = given_folder(sys.argv[1:])
    swept, refusals = list[SweptRun](), list[str]()

    def note(why: str = "") -> None:
        hydra = HydraConfig.get()
        if hydra.mode == RunMode.MULTIRUN:
            swept.append(SweptRun(hydra.overrides.task, Path(hydra.runtime.output_dir), why))

    def job(cfg: DictConfig) -> None:
        run_job(cfg, start)
        note()

    def failed(error: Exception) -> bool:
        """Note why a job of a sweep has failed; where all ranks refuse it before it trains, others follow."""
        if isinstance(error, ConfigError | ScheduleError):
            discard_folder(*before)
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                error = start.as_refused(error, START_S)
                if isinstance(error, Refused) or (start.world.size == 1 and not start.trains.is_set()):
                    refusals.append(str(error))
        note(one_line(error) or type(error).__name__)
        refused = refusals[-1:] == [str(error)]
        if refused:
            log.error("pipetrain: run %s: %s", Path(HydraConfig.get().runtime.output_dir).name, error)
        return refused

    try:
        status = compose("config", job, failed) or REFUSED * bool(refusals)
        start.end()
        return status
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
    return path, folder.Before.snapshot(path)


def discard_folder(path: Path, before: folder.Before) -> None:
    """Remove the folder of a job that is refused, if it was not there."""
    hydra = HydraConfig.get()
    run_dir = Path(hydra.runtime.output_dir)
    if run_dir.absolute() != path.absolute():  # one of a sweep, or of the folder of all runs
        before = folder.Before(missing=(run_dir, *before.missing))
    folder.discard(run_dir, before, f"{hydra.job.name}.log")


def run_job(composed: DictConfig, start: Start) -> None:
    """Claim the folder of a job, find its data and checkpoint, send the others what they need, and train."""
    hydra = HydraConfig.get()
    cfg, schedule = contained(composed, Path(hydra.runtime.output_dir)), hydra.runtime.choices["schedule"]
    options = values_of(cfg)
    parts = Parts.of(options, schedule, start.world)
    settings = parts.settings
    refuse_few_layers(options, len(settings.places))
    load_augment(options["data"])
    config, run_dir, resuming = as_mapping(cfg), Path(cfg.run_dir), settings.resume == AUTO
    download_s = value_at(options, "data.source.total_timeout")
    # So much longer the others wait for the options.
    start.attempt.send_delay(settings.timeout + (download_s if isinstance(download_s, int | float) else 0.0))
    check_loggers(config["logger"])
    if resuming and folder.is_finished(run_dir, config if start.run_dir is None else None):
        log.info("pipetrain: run_dir=%s holds this run, finished: nothing is left to do", run_dir)
        return
    longer = resuming and folder.lengthens(run_dir, config, settings)
    with folder.claim(run_dir, settings.resume is not None, longer, RELEASE_S if resuming else 0.0):
        start.doing = "look for a checkpoint"
        source = find_source(settings.resume, run_dir) if settings.resume is not None else None
        if source is None:
            folder.clear(run_dir)
        cuts = cuts_of(source, settings) if source else {}
        start.doing = "read the data set"
        used, data = obtain_data(cfg, settings.dtype)
        if used is not cfg:  # it has fallen back on another data set, with options of its own
            words = [*overrides(), *overrides("hydra")]
            if not any("run_dir=" in word or "run.dir=" in word for word in words):
                run_dir = folder.rename_after(run_dir, cfg.data.name, used.data.name)
                used.run_dir = str(run_dir)
            options, config = values_of(used), as_mapping(used)
            parts = Parts.of(options, schedule, start.world)
        if cuts:
            options, config = options | cuts, config | cuts
            parts = replace(parts, settings=Settings.composed(options, schedule, start.world.size))
        job = Job(
            options=options,
            schedule=schedule,
            swept=hydra.mode == RunMode.MULTIRUN,
            run_dir=str(run_dir),
            run=source.manifest.run if source else uuid.uuid4().hex,
            facts=data.facts,
            resume=str(source.folder) if source else None,
            saves=settings.checkpoint_every is not None or source is not None,
        )
        start.exchange(asdict(replace(job, options=as_json(options))), START_S + settings.timeout)
        stopped = train_job(job, parts, source, start, data, config)
    if stopped:  # by SIGTERM, which ends a sweep too
        sys.exit()


def obtain_data(cfg: DictConfig, dtype: torch.dtype) -> tuple[DictConfig, Data]:
    """Load the data set, or the one of `data.fallback` if it is not available. Raises ConfigError.

    Returns the configuration with the data set used, whose recipe replaces values not set by hand, and the
    data.
    """
    fallback = cfg.data.get("fallback")
    if fallback is not None:
        chosen("data.fallback", "data", fallback, ", or null")  # refuses another name
    try:
        return cfg, load_data(values_of(cfg.data), dtype)
    except DataMissing as error:
        if fallback in (None, cfg.data.name):
            raise
        note = f"{error}; using {fallback} instead"
    log.warning("pipetrain: %s", note)
    cfg, before = cfg.copy(), cfg.data
    cfg.data = OmegaConf.load(conf_dir() / "data" / f"{fallback}.yaml")
    for key in CARRIED_OVER:
        OmegaConf.update(cfg.data, key, before[key])
    return cfg, replace(load_data(values_of(cfg.data), dtype), note=note)


def cuts_of(source: Source, settings: Settings) -> dict[str, Any]:
    """Return as options the cuts of a checkpoint, where the model would otherwise be profiled again.

    With replicas=auto also its replicas, if it is of as many ranks.
    """
    with source.used():
        pipeline = source.manifest.pipeline
        firsts, chosen = sorted({*pipeline["placement"]}), settings.replicas == AUTO
        ranks = max(pipeline.get("ranks", firsts)) + 1
        alike = ranks == settings.ranks if chosen else len(firsts) == len({of[0] for of in settings.places})
        modes = [list(Mode)[number].value for number in pipeline["recompute"]]
    if settings.partition != PROFILE or settings.profile is not None or not alike:
        return {}
    cuts: dict[str, Any] = {"partition": pipeline["cuts"], "memory_limit": None}
    if chosen:
        cuts["replicas"] = [end - first for first, end in pairwise([*firsts, ranks])]
    if settings.memory_limit is not None:  # recomputation cannot be chosen without a profile
        cuts["recompute"] = modes
    return cuts
