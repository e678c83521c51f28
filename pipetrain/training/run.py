"""One run, built from the configuration: data, model, plan.

Every rank builds it from the same values. Only rank 0 decides whether the configured data set is available,
and which one replaces it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from pipetrain.building import Models, make_schedule, make_task
from pipetrain.checkpoint.files import CHECKPOINTS, folders
from pipetrain.checkpoint.resume import tensors_of
from pipetrain.checkpoint.saver import Keeper
from pipetrain.cli import conf_dir
from pipetrain.data import (
    Data,
    DataFacts,
    DataMissing,
    Draw,
    Sampler,
    declared_example,
    fallback_message,
    load_augment,
    load_data,
)
from pipetrain.data.loader import Sampled, even
from pipetrain.epochs import Epochs, PassesByNumber
from pipetrain.errors import ConfigError
from pipetrain.network.network import Network
from pipetrain.network.values import ValueSpec
from pipetrain.plan.memory import sized
from pipetrain.plan.plan import Plan, Samples, draft_plan, make_plan, prove_targets
from pipetrain.plan.profile import Profile
from pipetrain.plan.sizes import optimizer_state
from pipetrain.records.about import About
from pipetrain.records.folder import SUMMARY, is_of
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.optimizer import make_optimizer
from pipetrain.runtime.session import Session
from pipetrain.runtime.weights import OptimizerFactory
from pipetrain.settings import Settings
from pipetrain.tasks import Task

if TYPE_CHECKING:
    from pipetrain.records.recorder import Console

CARRIED_OVER = ("workers", "drop_last", "train_limit", "test_limit")  # options kept for a fallback data set

log = logging.getLogger("pipetrain")


@dataclass(frozen=True)
class Run:
    """One training run before it starts.

    `data` is None on ranks that need no sample. `see_model` returns the whole model. `take_network` returns
    it for training without keeping a reference; another call builds it again, with the same weights.
    """

    settings: Settings
    facts: DataFacts
    data: Data | None
    task: Task
    plan: Plan
    sampler: Sampler
    optimizer: OptimizerFactory
    see_model: Callable[[], nn.Module]
    take_network: Callable[[], Network]

    @property
    def evaluation_sizes(self) -> list[int]:
        return even(self.facts.test, self.settings.batch_size)

    @property
    def updates(self) -> int:
        return self.settings.epochs * len(self.sampler.batch_sizes)

    @property
    def about(self) -> About:
        """What the records say of it."""
        return About(self.settings, self.plan, self.task, self.facts, len(self.sampler.batch_sizes))


def epochs_of(run: Run, mesh: Mesh, recorder: Console | None = None, keeper: Keeper | None = None) -> Epochs:
    """Return the epochs of a run on one rank."""
    settings, data = run.settings, run.data
    rate = settings.rate(run.updates)
    # The whole model is built, as its initial weights depend on the order of layers, and then dropped.
    session = Session(run.plan, run.take_network(), run.task, run.optimizer, rate, mesh)
    session.settle()
    # A seed per rank, for dropout; set after the model is built, whose weights use the seed itself.
    torch.manual_seed((settings.seed + 1_000_003 * (mesh.world.rank + 1)) % 2**63)
    own = settings.seed, settings.workers, settings.timeout
    train = Sampled(data.train if data else None, run.sampler.batch_sizes, run.sampler, *own)
    test = Sampled(data.test if data else None, run.evaluation_sizes, None, *own)
    passes = PassesByNumber(train, test, session, run.task, mesh)
    return Epochs(session, mesh, passes, run.about, rate, recorder, keeper)


def obtain_data(cfg: DictConfig, dtype: torch.dtype) -> tuple[DictConfig, Data]:
    """Load the data set, or the one of `data.fallback` if it is not available. Raises ConfigError.

    Returns the configuration with the data set used, whose recipe replaces values not set by hand, and the
    data.
    """
    names = sorted(path.stem for path in (conf_dir() / "data").glob("*.yaml"))
    fallback = cfg.data.get("fallback")
    if fallback is not None and fallback not in names:
        raise ConfigError(f"data.fallback={fallback} is unknown; choose one of {', '.join(names)}, or null")
    try:
        return cfg, load_data(cfg.data, dtype)
    except DataMissing as error:
        if fallback in (None, cfg.data.name):
            raise
        note = fallback_message(error, fallback)
    log.warning("pipetrain: %s", note)
    cfg = with_fallback(cfg)
    return cfg, replace(load_data(cfg.data, dtype), note=note)


def with_fallback(cfg: DictConfig) -> DictConfig:
    """Return the configuration with the data set of its `data.fallback`."""
    cfg = cfg.copy()
    taken = OmegaConf.load(conf_dir() / "data" / f"{cfg.data.fallback}.yaml")
    for key in CARRIED_OVER:
        OmegaConf.update(taken, key, cfg.data[key])
    cfg.data = taken
    return cfg


def check_early(
    cfg: DictConfig,
    schedule: str,
    ranks: int,
    models: Models | None = None,
    example: ValueSpec | None = None,
) -> Plan:
    """Plan one batch, as a draft, to refuse errors before the run starts. Raises ConfigError.

    The data set is not read if the `example` of its inputs is given, or `data.sample` declares it.
    """
    settings = Settings.composed(cfg, schedule, ranks)
    load_augment(cfg.data)
    make_task(cfg)
    example = example or declared_example(cfg.data, settings.dtype)
    example = example or load_data(cfg.data, settings.dtype).facts.example
    models = models or Models()
    network = models.copy(cfg, settings.seed, settings.dtype, example.cast(settings.dtype))
    samples = Samples([settings.batch_size], [settings.full])
    plan = draft_plan(cfg, settings, network, example, samples)
    make_optimizer(cfg, network.model, plan.stages)
    return plan


def prepare(
    cfg: DictConfig,
    schedule: str,
    ranks: int,
    facts: DataFacts,
    data: Data | None = None,
    profile: Profile | None = None,
    resumed: int = 0,
    models: Models | None = None,
) -> Run:
    """Build a run from its configuration, facts of its data and, for partition=profile, profile.

    With `data`, the task is proven on its first samples.

    `resumed`: batches already done of the current epoch. `models`: those of `check_early`, which saves
    building the model again. Raises ConfigError and ScheduleError.
    """
    settings, models = Settings.composed(cfg, schedule, ranks), models or Models()
    named = cfg, settings.seed, settings.dtype
    sampler = Sampler(
        facts.train, settings.batch_size, settings.microbatches, settings.seed, settings.drop_last
    )
    if resumed > len(sampler.batch_sizes):
        raise ConfigError(
            f"the checkpoint stands after batch {resumed} of an epoch, which has {len(sampler.batch_sizes)} "
            f"here; give the batch_size and the data set that it was trained with, or train anew"
        )
    settings.rate(settings.epochs * len(sampler.batch_sizes))  # which refuses a wrong lr_schedule
    samples = Samples(sampler.batch_sizes, even(facts.test, settings.batch_size), resumed)
    network = models.copy(*named, facts.example.cast(settings.dtype))
    task = make_task(cfg)
    plan = make_plan(settings, make_schedule(cfg), network, facts.example, samples, profile)
    if data is not None:
        for split, draw in ((data.train, Draw(settings.seed, 0)), (data.test, None)):
            ids = torch.arange(min(len(split), settings.batch_size))
            prove_targets(plan, task, split.targets(ids, draw), data.classes)
    optimizer = make_optimizer(cfg, network.model, plan.stages)
    return Run(
        settings=settings,
        facts=facts,
        data=data,
        task=task,
        plan=sized(plan, task, optimizer_state(optimizer)),
        sampler=sampler,
        optimizer=optimizer,
        see_model=partial(models.see, *named),
        take_network=partial(models.take, *named, plan.example),
    )


def conditions_of(cfg: DictConfig, run: Run) -> dict[str, Any]:
    """Return the settings in which a run and its checkpoint must agree."""
    return {
        "model": OmegaConf.to_container(cfg.model, resolve=True),
        **tensors_of(run.see_model()),
        "data": run.facts.name,
        "data's fingerprint": run.facts.fingerprint,
        "task": str(run.task),
        "optim": str(cfg.optim._target_),
        "batch_size": run.settings.batch_size,
        "data.drop_last": run.settings.drop_last,
        "seed": run.settings.seed,
        "dtype": str(run.settings.dtype).removeprefix("torch."),
    }


def lengthens(run_dir: Path, cfg: DictConfig, settings: Settings) -> bool:
    """Return whether more epochs would continue the finished run in `run_dir`.

    Raises ConfigError if the learning rates of its finished updates would have been different.
    """
    if not (folders(run_dir / CHECKPOINTS) and is_of(run_dir, cfg, {"resume", "epochs"})):
        return False
    try:
        summary = json.loads((run_dir / SUMMARY).read_text())
        updates, epochs = int(summary["updates"]), int(summary["epochs"])
        rate, other = settings.rate(updates), settings.rate(updates // epochs * settings.epochs)
    except (OSError, LookupError, TypeError, ValueError, ZeroDivisionError):
        return False
    if settings.epochs > epochs and any(rate(update) != other(update) for update in range(updates)):
        raise ConfigError(
            f"run_dir={run_dir} holds a run that finished after {epochs} epochs, and with "
            f"lr_schedule={cfg.lr_schedule} warmup={cfg.warmup:g} the rates of {settings.epochs} epochs "
            f"differ from the start: train anew in another run_dir, or go on there from its last weights "
            f"with resume={run_dir}"
        )
    return settings.epochs > epochs
