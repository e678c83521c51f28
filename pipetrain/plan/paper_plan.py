"""Plans on paper: from options alone, nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from pipetrain.config.build import make_model, make_optimizer, make_schedule, make_task
from pipetrain.config.parameter_groups import groups_of, optimizer_of
from pipetrain.config.settings import AUTO, PROFILE, Settings
from pipetrain.data import declared_example, load_data
from pipetrain.errors import ConfigError
from pipetrain.model.chain import network_of
from pipetrain.model.specs import TensorSpec
from pipetrain.plan.costs import profile_conditions, read_profile
from pipetrain.plan.csv_tables import read_rows
from pipetrain.plan.make_plan import estimate_model, make_plan
from pipetrain.plan.memory_fit import known_state, optimizer_state
from pipetrain.plan.plan import Plan, Samples
from pipetrain.plan.staleness_advice import settled
from pipetrain.plan.verification import Draft
from pipetrain.rules import COUNT, PATH, POSITIVE


def planned(cfg: Mapping[str, Any], schedule: str, batches: int) -> Plan:
    """Plan a window of a configuration with a schedule of this name. Raises ConfigError.

    Nothing is measured: without a file, partition=profile gives the draft with which a run begins.
    """
    if cfg["costs"] is not None:
        return _planned_by_rows(cfg, schedule, batches)
    settings = replace(Settings.composed(cfg, schedule, _ranks(cfg)), window=None)
    samples = Samples.of([settings.batch_size] * batches, [settings.full.samples])
    model = make_model(cfg, settings.seed, settings.dtype)
    example = declared_example(cfg["data"], settings.dtype)
    example = example or load_data(cfg["data"], settings.dtype).facts.example
    network = network_of(model, example.cast(settings.dtype), settings.precision == "bf16")
    profile = None
    if settings.profile is not None:
        profile = read_profile(settings.profile, profile_conditions(settings, cfg["optim"]))
    elif settings.replicas == AUTO:
        raise ConfigError("replicas=auto needs measured times: give partition.profile=FILE of an earlier run")
    draft = _settled(Draft.from_settings(settings, make_schedule(cfg)), cfg)
    estimated = estimate_model(settings, network, example, samples)
    return make_plan(draft, estimated, profile, state_of(cfg, model), make_task(cfg))


def _planned_by_rows(cfg: Mapping[str, Any], schedule: str, batches: int) -> Plan:
    """Plan a window of the layers in costs=FILE, one sample per microbatch. Raises ConfigError."""
    path, cfg = PATH.read("costs", cfg["costs"]), {**cfg, "batch_size": cfg["microbatches"]}
    if cfg["partition"] == "flops":  # the default, but here there are times
        cfg["partition"] = PROFILE
    settings = replace(Settings.composed(cfg, schedule, _ranks(cfg)), window=None, model=path.stem)
    if settings.profile is not None:
        raise ConfigError("costs= and partition.profile= both give times: leave one of them out")
    speed, scale = (POSITIVE.read(key, cfg[key], null=True) for key in ("bandwidth", "scale"))
    if settings.replicas == AUTO and not speed:
        raise ConfigError("replicas=auto weighs messages and sums of gradients too: give bandwidth=GB/s")
    rows = read_rows(path, 1e-9 / speed if speed else 0.0, scale or 1.0)
    samples = Samples.of([settings.batch_size] * batches, [1])
    draft = _settled(Draft.from_settings(settings, make_schedule(cfg)), cfg)
    estimated = estimate_model(settings, rows.layers, rows.data, samples)
    return make_plan(draft, estimated, rows.profile, state_of(cfg))


def _settled(draft: Draft, cfg: Mapping[str, Any]) -> Draft:
    optimizer, stages = str(cfg["optim"].get("_target_")), len(draft.placement)
    return replace(draft, settings=settled(draft.settings, optimizer, stages))


def _ranks(cfg: Mapping[str, Any]) -> int | None:
    """Return the ranks for replicas=auto; otherwise the options determine them."""
    if cfg["replicas"] == AUTO and cfg["ranks"] is None:
        raise ConfigError("replicas=auto chooses for a number of ranks: give ranks=N")
    return COUNT.read("ranks", cfg["ranks"]) if cfg["replicas"] == AUTO else None


def state_of(cfg: Mapping[str, Any], model: nn.Module | None = None) -> Callable[[str, TensorSpec], int]:
    """Return a function for the bytes of the configured optimizer's state for a parameter of this model."""
    optim = make_optimizer(cfg)
    groups = groups_of(optim, model) if model else []
    if any(group.function for group in groups):
        return optimizer_state(partial(optimizer_of, optim.forms[-1], groups))
    if (kept := known_state(optim.name, optim.options)) is not None:
        return lambda name, spec: kept * spec.nbytes
    return optimizer_state(optim.forms[-1])
