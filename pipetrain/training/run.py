"""What one run consists of, made from the configuration: data, model, plan.

Every rank makes it for itself from the same values. Only rank 0 decides whether the data set that was asked
for can be had, and what is taken in its place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from omegaconf import DictConfig, OmegaConf
from torch import nn

from pipetrain.blueprint import Plan, Samples, draft_plan, make_plan
from pipetrain.building import Models, make_schedule
from pipetrain.cli import conf_dir
from pipetrain.config import Settings, read_settings
from pipetrain.data import (
    IMAGE,
    DataMissing,
    ImageData,
    Sampler,
    Transform,
    fallback_message,
    load_augment,
    load_data,
)
from pipetrain.errors import ConfigError
from pipetrain.optimizer import make_optimizer
from pipetrain.partition.profile import Profile
from pipetrain.runtime.weights import OptimizerFactory

CARRIED_OVER = ("workers", "drop_last", "train_limit", "test_limit")  # to a data set taken instead

log = logging.getLogger("pipetrain")


@dataclass(frozen=True)
class Run:
    """One training run before it starts.

    `transform` makes training images; evaluation only normalises. `see_model` shows the whole model.
    `build_model` hands it over to be trained, so that nothing else holds it then; called again, it builds
    another one with the same weights.
    """

    settings: Settings
    data: ImageData
    plan: Plan
    sampler: Sampler
    transform: Transform
    optimizer: OptimizerFactory
    see_model: Callable[[], nn.Sequential]
    build_model: Callable[[], nn.Sequential]

    @property
    def evaluation_sizes(self) -> list[int]:
        """Samples in each microbatch of an evaluation."""
        return _even(len(self.data.test), self.settings.batch_size)

    @property
    def updates(self) -> int:
        """How many updates the whole run makes."""
        return self.settings.epochs * len(self.sampler.batch_sizes)


def obtain_data(cfg: DictConfig) -> tuple[DictConfig, ImageData]:
    """Load the data set, or the one that `data.fallback` names where it can't be had.

    Returns the configuration with the data set really used, and the data. The recipe goes with the data set:
    what was not overridden by hand follows it. Raises ConfigError.
    """
    names = sorted(path.stem for path in (conf_dir() / "data").glob("*.yaml"))
    fallback = cfg.data.get("fallback")
    if fallback is not None and fallback not in names:
        raise ConfigError(f"data.fallback={fallback} is unknown; choose one of {', '.join(names)}, or null")
    try:
        return cfg, load_data(cfg.data)
    except DataMissing as error:
        if fallback in (None, cfg.data.name):
            raise
        note = fallback_message(error, fallback)
    log.warning("pipetrain: %s", note)
    cfg = cfg.copy()
    taken = OmegaConf.load(conf_dir() / "data" / f"{fallback}.yaml")
    for key in CARRIED_OVER:
        OmegaConf.update(taken, key, cfg.data[key])
    cfg.data = taken
    return cfg, replace(load_data(cfg.data), note=note)


def check_early(cfg: DictConfig, schedule: str, ranks: int, models: Models | None = None) -> Plan:
    """Refuse what can be refused without the data set, which may be long in coming. Raises ConfigError.

    Returns the plan of one batch: a draft, cut by flops where it has to be profiled first.
    """
    settings = read_settings(cfg, schedule, ranks)
    load_augment(cfg.data)
    model = (models or Models()).copy(cfg, settings.seed, settings.dtype)
    size = settings.batch_size // settings.microbatches
    plan = draft_plan(cfg, settings, model, Samples([settings.batch_size], [size]))
    make_optimizer(cfg, model, plan.stages)
    return plan


def prepare(
    cfg: DictConfig,
    schedule: str,
    ranks: int,
    data: ImageData,
    profile: Profile | None = None,
    resumed: int = 0,
    models: Models | None = None,
) -> Run:
    """Make a run from its configuration, its data and, for partition=profile, a profile.

    `resumed`: how many batches are already done of the epoch that it goes on with. `models`: those of
    `check_early`, so that the model is not built again. Raises ConfigError and ScheduleError.
    """
    settings, models = read_settings(cfg, schedule, ranks), models or Models()
    named = cfg, settings.seed, settings.dtype
    sampler = Sampler(
        len(data.train), settings.batch_size, settings.microbatches, settings.seed, settings.drop_last
    )
    if resumed > len(sampler.batch_sizes):
        raise ConfigError(
            f"the checkpoint stands after batch {resumed} of an epoch, which has {len(sampler.batch_sizes)} "
            f"here; give the batch_size and the data set that it was trained with, or train anew"
        )
    samples = Samples(sampler.batch_sizes, _even(len(data.test), settings.batch_size), resumed)
    model = models.copy(*named)
    plan = make_plan(settings, make_schedule(cfg), model, IMAGE, data.classes, samples, profile)
    return Run(
        settings=settings,
        data=data,
        plan=plan,
        sampler=sampler,
        transform=Transform(
            data.mean, data.std, load_augment(cfg.data), seed=settings.seed, dtype=settings.dtype
        ),
        optimizer=make_optimizer(cfg, model, plan.stages),
        see_model=partial(models.see, *named),
        build_model=partial(models.take, *named),
    )


def _even(samples: int, most: int) -> list[int]:
    """Cut samples into as few pieces of at most `most` as can be, even ones: at most two sizes."""
    size, larger = divmod(samples, math.ceil(samples / most))
    return [size + (i < larger) for i in range(math.ceil(samples / most))]
