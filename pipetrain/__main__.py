"""`python -m pipetrain`: train by the configuration. Wiring only."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch.distributed.distributed_c10d import Store

from pipetrain.cli import compose, contained
from pipetrain.config import share_of_cores
from pipetrain.launch import Job, Leader, follow, guarded, leave
from pipetrain.plan import describe
from pipetrain.runtime.mesh import Mesh, World, choose_device, shares_gpu
from pipetrain.training.recorder import Recorder
from pipetrain.training.run import Run, check_early, obtain_data, prepare
from pipetrain.training.trainer import Trainer

log = logging.getLogger("pipetrain")


def main() -> None:
    """Lead the run on rank 0, follow it on the others; exit with its status."""
    world = World.from_environment()
    leave(guarded(lambda: follow(world, join) if world.rank else lead(world)))


def lead(world: World) -> int:
    """Compose the configuration, refuse it or start it on all ranks, and return the exit status."""
    leader = Leader(world)
    status = 1
    try:
        status = guarded(lambda: compose("config", lambda cfg: start(cfg, world, leader)))
    finally:
        leader.end(status)
    return status


def start(cfg: DictConfig, world: World, leader: Leader) -> None:
    """Decide one job: refuse it, or announce it and take part in it."""
    hydra = HydraConfig.get()
    schedule = str(hydra.runtime.choices["schedule"])
    run_dir = Path(hydra.runtime.output_dir)
    cfg = contained(cfg, run_dir)
    check_early(cfg, schedule, world.size)
    choose_device(world, cfg.device)
    cfg, data = obtain_data(cfg)
    run = prepare(cfg, schedule, world.size, data)
    job = Job(OmegaConf.to_container(cfg, resolve=True), schedule, str(run_dir))  # type: ignore[arg-type]
    store = leader.announce(job)

    device = choose_device(world, cfg.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    recorder = Recorder(run_dir, cfg, run, f"{world.size} x {name}")
    (run_dir / "plan.txt").write_text(describe(run.plan))
    train(run, device, world, store, recorder)
    recorder.close()


def join(job: Job, world: World, store: Store | None) -> None:
    """Take part in a job that rank 0 has decided."""
    cfg = OmegaConf.create(job.config)
    _, data = obtain_data(cfg)
    run = prepare(cfg, job.schedule, world.size, data)
    train(run, choose_device(world, cfg.device), world, store)


def train(
    run: Run, device: torch.device, world: World, store: Store | None, recorder: Recorder | None = None
) -> None:
    """Connect this rank to the others and train its stages to the end."""
    settings, plan = run.settings, run.plan
    torch.set_num_threads(settings.threads or share_of_cores(world.local_size))
    if shares_gpu(world, device) and world.rank == 0:
        log.warning("pipetrain: ranks share a GPU, so messages go through host memory over gloo")
    mesh = Mesh(world, plan.placement, plan.edges, device, store, settings.timeout)
    Trainer(run, mesh, recorder).fit()
    mesh.close()


if __name__ == "__main__":
    main()
