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
from pipetrain.training.recorder import Identity, Recorder
from pipetrain.training.run import Run, check_early, obtain_data, prepare
from pipetrain.training.trainer import Trainer

log = logging.getLogger("pipetrain")


def main() -> None:
    """Lead the run on rank 0, follow it on the others; exit with its status."""
    world = World.from_environment()
    leave(guarded(lambda: follow(world, train) if world.rank else lead(world)))


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
    prepare(cfg, schedule, world.size, data)
    config = OmegaConf.to_container(cfg, resolve=True)
    job = Job(config, schedule, str(run_dir), data.note)  # type: ignore[arg-type]
    train(job, world, leader.announce(job))


def train(job: Job, world: World, store: Store | None) -> None:
    """Run a job on this rank, from its data to the summary."""
    cfg = OmegaConf.create(job.config)
    torch.set_num_threads(cfg.threads or share_of_cores(world.local_size))
    _, data = obtain_data(cfg)
    run = prepare(cfg, job.schedule, world.size, data)
    device = choose_device(world, cfg.device)
    recorder = None
    if world.rank == 0:
        folder = Path(job.run_dir)
        recorder = make_recorder(folder, cfg, run, describe_device(world, device), job.note)
        announce(run, folder, describe_device(world, device), job.note)
    if shares_gpu(world, device) and world.rank == 0:
        log.warning("pipetrain: ranks share a GPU, so messages go through host memory over gloo")
    mesh = Mesh(world, run.plan.placement, run.plan.edges, device, store, run.settings.timeout)
    Trainer(run, mesh, recorder).fit()
    mesh.close()
    if recorder is not None:
        summary = recorder.close()
        log.info("\n%s\n", recorder.table())
        log.info(
            "%s on %s: val acc %.2f %% (best %.2f %%, epoch %d) in %.0f s",
            summary["model"],
            summary["data"],
            100 * summary["val_acc"],
            100 * summary["best_val_acc"],
            summary["best_epoch"],
            summary["total_s"],
        )
        log.info("run folder: %s", job.run_dir)
        log.info("look at it: tensorboard --logdir %s", job.run_dir)


def describe_device(world: World, device: torch.device) -> str:
    """Name the hardware of the run: `2 x cpu`, `NVIDIA H200 x 4`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return f"{world.size} x {name}"


def make_recorder(folder: Path, cfg: DictConfig, run: Run, device: str, note: str) -> Recorder:
    """Open the run's folder: the plan, the configuration, the records."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.txt").write_text(describe(run.plan))
    data = run.data
    identity = Identity(data.name, note, device, data.classes, len(data.train), len(data.test))
    return Recorder(folder, cfg, run.plan, identity, run.updates)


def announce(run: Run, folder: Path, device: str, note: str) -> None:
    """Say what is about to run, on which data and by which plan."""
    settings, plan = run.settings, run.plan
    log.info(
        "pipetrain: %s on %s (%d train, %d test%s), schedule %s, %s",
        settings.model,
        run.data.name,
        len(run.data.train),
        len(run.data.test),
        ": " + note if note else "",
        settings.schedule,
        device,
    )
    log.info(
        "%d stages cut before layer %s; batch %d in %d microbatches; bubble %.1f %% on paper",
        plan.stages,
        plan.cuts or "-",
        settings.batch_size,
        settings.microbatches,
        100 * plan.window.simulation.bubble,
    )
    log.info("%d epochs, %d updates; records in %s", settings.epochs, run.updates, folder)


if __name__ == "__main__":
    main()
