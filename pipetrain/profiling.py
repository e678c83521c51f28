"""Profiling before a run: all ranks measure the same model at the same time.

So they compete for memory and caches as they will when they train. Rank 0 makes one profile of what all of
them found, and every rank cuts by that.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import torch
from omegaconf import DictConfig
from torch import nn

from pipetrain.blueprint import Plan, Samples, make_plan
from pipetrain.building import make_model, make_schedule
from pipetrain.config import Settings, share_of_cores
from pipetrain.data import IMAGE
from pipetrain.errors import ConfigError
from pipetrain.optimizer import make_optimizer
from pipetrain.partition.balance import STRATEGIES
from pipetrain.partition.measure import measure_layers
from pipetrain.partition.profile import PROFILE, Facts, LayerTime, Profile, average, read_profile
from pipetrain.partition.stages import Prediction
from pipetrain.runtime.mesh import Mesh, World
from pipetrain.runtime.roundtrip import Link, slowest_link
from pipetrain.seal import SealedStore

log = logging.getLogger("pipetrain")

_NO_WORK = ("_target_", "_partial_", "lr")  # of an optimizer's options: what changes no work


def conditions(cfg: DictConfig, settings: Settings) -> Facts:
    """Return what a profile must agree in with the run that reads it."""
    options = (f" {key}={value}" for key, value in cfg.optim.items() if key not in _NO_WORK)
    return {
        "model": settings.model,
        "microbatch": settings.batch_size // settings.microbatches,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "precision": settings.precision,
        "memory_format": settings.memory_format,
        "optimizer": str(cfg.optim._target_).rsplit(".", 1)[-1] + "".join(options),
    }


def machine(device: torch.device, ranks: int) -> Facts:
    """Return what a profile tells of where it was taken."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    threads, version = torch.get_num_threads(), str(torch.__version__)
    return {"device": name, "ranks": ranks, "threads": threads, "torch": version}


def draft_plan(
    cfg: DictConfig, settings: Settings, model: nn.Sequential, samples: Samples, classes: int
) -> Plan:
    """Plan a run of a whole model, by the profile that it names if it names one.

    Where it has to be profiled first, this is the plan that it will have but for the cuts: they are by flops,
    and `memory_limit` is not looked at yet. Raises ConfigError and ScheduleError.
    """
    profile = None
    if settings.profile is not None:
        profile = read_profile(settings.profile, conditions(cfg, settings))
    elif settings.partition == PROFILE:
        settings = replace(settings, partition="flops", memory_limit=None)
    return make_plan(settings, make_schedule(cfg), model, IMAGE, classes, samples, profile)


def measure(
    cfg: DictConfig, draft: Plan, world: World, device: torch.device, store: SealedStore | None
) -> Profile:
    """Profile a run's model together with the other ranks, which `take_part`.

    Raises ConfigError where a layer fails on any of them, and ChannelError.
    """
    size = draft.settings.batch_size // draft.settings.microbatches
    log.info("pipetrain: profiling %d layers, %d samples at a time", len(draft.layers), size)
    start = time.perf_counter()
    found = take_part(cfg, draft, world, device, store)
    log.info("profiled in %.1f s", time.perf_counter() - start)
    return make_profile(cfg, draft, device, found)


@dataclass(frozen=True, slots=True)
class Found:
    """The slowest link, and of each rank its list of LayerTime or, where a layer failed, what says so."""

    link: Link
    by_rank: list[object]


def take_part(
    cfg: DictConfig, draft: Plan, world: World, device: torch.device, store: SealedStore | None
) -> Found:
    """Join the other ranks and measure with them. `draft` is the run's plan but for the cuts.

    Raises ChannelError.
    """
    settings = draft.settings
    local_size = world.local_size if world.size > 1 else settings.ranks
    torch.set_num_threads(settings.threads or share_of_cores(local_size))
    mesh = Mesh(world, draft.placement, draft.edges, device, store, settings.timeout)
    found = measure_together(mesh, cfg, draft)
    mesh.close()
    return found


def measure_together(mesh: Mesh, cfg: DictConfig, draft: Plan) -> Found:
    """Measure messages, then layers on all ranks at once. Raises ChannelError.

    The model is one of its own and the random generators are put back: a run is none the wiser.
    """
    link = slowest_link(mesh, draft.settings.buffer_size)
    return Found(link, mesh.gather("the times of the layers", _layers(cfg, draft, mesh.device)))


def make_profile(cfg: DictConfig, draft: Plan, device: torch.device, found: Found) -> Profile:
    """Make one profile of what all ranks found. Raises ConfigError where a layer failed on any of them."""
    for failure in found.by_rank:
        if isinstance(failure, str):
            raise ConfigError(failure)
    settings = draft.settings
    return Profile(
        conditions=conditions(cfg, settings),
        machine=machine(device, len(found.by_rank)),
        input_bytes=draft.boundaries[settings.batch_size // settings.microbatches][0].nbytes,
        latency_s=found.link.latency_s,
        s_per_byte=found.link.s_per_byte,
        layers=average([layers for layers in found.by_rank if isinstance(layers, list)]),
    )


def _layers(cfg: DictConfig, draft: Plan, device: torch.device) -> list[LayerTime] | str:
    settings, cuda = draft.settings, device.type == "cuda"
    size = settings.batch_size // settings.microbatches
    try:
        with torch.random.fork_rng([device] if cuda else []):
            model = make_model(cfg, settings.seed, settings.dtype).to(device)
            x = torch.randn(size, *IMAGE, dtype=settings.dtype, device=device)
            return measure_layers(model, x, draft.layers, make_optimizer(cfg, model), draft.numerics)
    except (ConfigError, RuntimeError) as error:  # a layer's, or no memory for the model
        return " ".join(str(error).split())
    finally:
        if cuda:
            torch.cuda.empty_cache()


def verdict(prediction: Prediction) -> str:
    """Say in one line how the cuts of a profile compare with those of the other strategies."""
    choices, ours = prediction.choices, prediction.slowest_s
    listed = ", ".join(f"{name} {cuts} {1e3 * slowest_s:.1f}" for name, (cuts, slowest_s) in choices.items())
    beaten = [name for name in STRATEGIES if choices[name][1] > ours]
    said = [f"profile beats {' and '.join(', '.join(beaten).rsplit(', ', 1))}"] if beaten else []
    said += [f"{name} is as good" for name in STRATEGIES if choices[name][1] == ours]
    said += [f"{name} would be faster, but is ruled out" for name in STRATEGIES if choices[name][1] < ours]
    return f"slowest stage in ms a batch, by cuts: {listed}: {', '.join(said)}"
