"""Profiling before a run: all ranks measure the same model at the same time.

They compete for memory and caches as in training. Rank 0 makes one profile of the results.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from omegaconf import DictConfig

from pipetrain.building import Models
from pipetrain.errors import ConfigError, one_line
from pipetrain.network.boundary import Example
from pipetrain.network.chain import Chain
from pipetrain.network.network import Network
from pipetrain.network.tensors import made_up
from pipetrain.plan.balance import STRATEGIES
from pipetrain.plan.blueprint import Plan, profile_conditions
from pipetrain.plan.profile import Facts, LayerTime, Profile, average
from pipetrain.plan.stages import Prediction
from pipetrain.runtime.measure import measure_layers
from pipetrain.runtime.mesh import Mesh, World, choose_device
from pipetrain.runtime.optimizer import make_optimizer
from pipetrain.runtime.roundtrip import Link, slowest_link
from pipetrain.runtime.weights import OptimizerFactory
from pipetrain.seal import SealedStore
from pipetrain.settings import Settings, share_of_cores

log = logging.getLogger("pipetrain")

Measured = tuple[Network, OptimizerFactory]


def measure(
    cfg: DictConfig,
    draft: Plan,
    world: World,
    device: torch.device,
    store: SealedStore | None,
    models: Models | None = None,
) -> Profile:
    """Profile a run's model on all ranks; the others `take_part`. Raises ConfigError and ChannelError."""
    size = draft.settings.full
    log.info("pipetrain: profiling %d layers, %d samples at a time", len(draft.layers), size)
    start = time.perf_counter()
    found = take_part(cfg, draft, world, device, store, models)
    log.info("profiled in %.1f s", time.perf_counter() - start)
    return make_profile(profile_conditions(draft.settings, cfg.optim), device, found)


def measure_alone(cfg: DictConfig, draft: Plan) -> Profile:
    """Profile a run's model in this process, without messages. Raises ConfigError."""
    return measure(cfg, draft, World(), choose_device(World(), draft.settings.device), None)


@dataclass(frozen=True, slots=True)
class Found:
    """The slowest link, and each rank's list of LayerTime or, if a layer failed, error message."""

    link: Link
    by_rank: list[object]


def take_part(
    cfg: DictConfig,
    draft: Plan,
    world: World,
    device: torch.device,
    store: SealedStore | None,
    models: Models | None = None,
) -> Found:
    """Measure together with the other ranks. `draft`: the run's plan, cuts apart. Raises ChannelError."""
    settings = draft.settings
    local_size = world.local_size if world.size > 1 else settings.ranks
    torch.set_num_threads(settings.threads or share_of_cores(local_size))
    mesh = Mesh(world, draft.placement, draft.edges, device, store, settings.timeout)
    found = measure_together(mesh, draft, partial(_copied, cfg, settings, draft.example, models or Models()))
    mesh.close()
    return found


def _copied(cfg: DictConfig, settings: Settings, example: Example, models: Models) -> Measured:
    network = models.copy(cfg, settings.seed, settings.dtype, example)
    if not isinstance(network, Chain):  # it is not a copy
        network = network.twin()
    return network, make_optimizer(cfg, network.model)


def measure_together(mesh: Mesh, draft: Plan, make: Callable[[], Measured]) -> Found:
    """Measure messages, then layers on all ranks at once. Raises ChannelError.

    `make`: returns a model that is not trained afterwards, in host memory, and its optimizer's factory.
    """
    link = slowest_link(mesh, draft.settings.buffer_size)
    layers = _layers(draft, mesh.device, make)
    told = mesh.gather(
        "the times of the layers", layers if isinstance(layers, str) else list(map(asdict, layers))
    )
    return Found(
        link, [one if isinstance(one, str) else [LayerTime(**layer) for layer in one] for one in told]
    )


def make_profile(conditions: Facts, device: torch.device, found: Found) -> Profile:
    """Make one profile of all ranks' measurements. Raises ConfigError if a layer failed on any."""
    for failure in found.by_rank:
        if isinstance(failure, str):
            raise ConfigError(failure)
    return Profile(
        conditions=conditions,
        machine=_machine(device, len(found.by_rank)),
        latency_s=found.link.latency_s,
        s_per_byte=found.link.s_per_byte,
        layers=average([layers for layers in found.by_rank if isinstance(layers, list)]),
    )


def _machine(device: torch.device, ranks: int) -> Facts:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    threads, version = torch.get_num_threads(), str(torch.__version__)
    return {"device": name, "ranks": ranks, "threads": threads, "torch": version}


def _layers(draft: Plan, device: torch.device, make: Callable[[], Measured]) -> list[LayerTime] | str:
    settings, cuda = draft.settings, device.type == "cuda"
    size = settings.full
    try:
        with torch.random.fork_rng([device] if cuda else []):
            network, optimizer = make()
            for module in (network.model, *network.modules):
                module.to(device)
            x = draft.example.value(tuple(made_up(spec, device) for spec in draft.example.of(size).specs))
            return measure_layers(network, x, draft.layers, optimizer, draft.numerics)
    except (ConfigError, RuntimeError) as error:  # a layer failed, or out of memory
        return one_line(error)
    finally:
        if cuda:
            torch.cuda.empty_cache()


def verdict(prediction: Prediction) -> str:
    """Return one line that compares the cuts of a profile with those of the other strategies."""
    choices, ours = prediction.choices, prediction.slowest_s
    listed = ", ".join(f"{name} {one.cuts} {1e3 * one.slowest_s:.1f}" for name, one in choices.items())
    fitting = [name for name in STRATEGIES if choices[name].fits]
    beaten = [name for name in fitting if choices[name].slowest_s > ours]
    phrases = [f"profile beats {' and '.join(', '.join(beaten).rsplit(', ', 1))}"] if beaten else []
    phrases += [f"{name} is as good" for name in fitting if choices[name].slowest_s == ours]
    phrases += [
        f"{name} would be faster, but is ruled out" for name in fitting if choices[name].slowest_s < ours
    ]
    phrases += [f"{name} does not fit into memory_limit" for name in STRATEGIES if name not in fitting]
    return f"slowest stage in ms a batch, by cuts: {listed}: {', '.join(phrases)}"
