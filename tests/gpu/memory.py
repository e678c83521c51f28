"""What a stage holds on the GPU, against what `simulate` says times what one microbatch was seen to take."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmark.contestants import Ours
from benchmark.tasks import Job, Task, prepare
from benchmark.worlds import Say
from pipetrain.boundary import Boundary
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.stage import Target
from pipetrain.training.assembly import make_stages
from tests.gpu.rows import MIB, Row, Setting, judged

SCHEDULES = ("gpipe", "1f1b", "pipedream", "pipedream_2bw")
SIZE = 32  # samples of a microbatch
MICROBATCHES = 4  # of a batch; 1 with pipedream
WINDOW_BATCHES = 8
LOW, HIGH = 0.75, 1.25  # of what is predicted


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's peaks: counted and simulated (activations, versions), measured and predicted (bytes)."""

    counted: tuple[int, int]
    simulated: tuple[int, int]
    measured: int
    predicted: int


def memory(setting: Setting) -> Iterator[Row]:
    """Each schedule on 2 and 4 ranks."""
    task = Task(("model=mlp" if setting.quick else "model=vgg16",))
    for ranks in (2,) if setting.quick else (2, 4):
        found = setting.world(measure, ranks, task)
        for schedule in SCHEDULES:
            held = [rank[schedule] for rank in found]
            counted, simulated = [h.counted for h in held], [h.simulated for h in held]
            what = f"{ranks} ranks, {schedule}"
            yield judged(
                f"{what}: microbatches and versions", _pairs(counted), _pairs(simulated), counted == simulated
            )
            if setting.cuda:
                ratios = [h.measured / h.predicted for h in held]
                sizes = ", ".join(f"{h.measured / MIB:.0f}/{h.predicted / MIB:.0f}" for h in held)
                yield judged(
                    f"{what}: MiB measured/predicted",
                    f"{sizes}: {' '.join(f'{r:.2f}' for r in ratios)}",
                    f"{LOW} to {HIGH}",
                    all(LOW <= ratio <= HIGH for ratio in ratios),
                )


def _pairs(pairs: list[tuple[int, int]]) -> str:
    return ", ".join(f"{a}+{b}" for a, b in pairs)


def measure(mesh: Mesh, say: Say, task: Task) -> dict[str, Held]:
    """Run a few windows of each schedule on one rank, which holds the stage of its number."""
    return {schedule: _measure(mesh, say, schedule, task) for schedule in SCHEDULES}


def _measure(mesh: Mesh, say: Say, schedule: str, task: Task) -> Held:
    index, cuda = mesh.world.rank, mesh.device.type == "cuda"
    m = 1 if schedule == "pipedream" else MICROBATCHES
    task = task.extended(f"microbatches={m}", f"batch_size={m * SIZE}")
    stash = above = before = 0
    if cuda:
        say(f"{schedule} on {mesh.world.size}: a microbatch alone")
        stash, above = alone(prepare(task, schedule, mesh.world.size, WINDOW_BATCHES), mesh)
        before = _allocated()
    say(f"{schedule} on {mesh.world.size}: its windows")
    job = prepare(task, schedule, mesh.world.size, WINDOW_BATCHES)
    ours = Ours(schedule, job, mesh)
    for _ in range(2):
        ours.run()
    measured = torch.cuda.max_memory_allocated() - before if cuda else 0
    record = ours.stats[index]
    simulation = ours.plan.window.simulation
    activations, versions = simulation.activations[index], simulation.versions[index]
    predicted = _fixed(job, index) + activations * stash + above
    predicted += (versions - 1) * _weights(job, index) + messages(job, index)
    return Held((record.activations, record.versions), (activations, versions), measured, predicted)


def _allocated() -> int:
    """Forget what nobody holds, and every peak; return the bytes that are allocated."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def alone(job: Job, mesh: Mesh) -> tuple[int, int]:
    """Return what one microbatch keeps between forward and backward, and the peak above that.

    The peak is that of a batch of one or two microbatches, one after the other: with two, the second meets
    the gradient of the first. The first batch is not measured: it makes momenta and workspaces.
    """
    index, device = mesh.world.rank, mesh.device
    stage = make_stages(job.plan, job.model, job.task, job.optimizer, job.plan.settings.rate(1), mesh)[index]
    entries = job.plan.boundaries[job.size]
    last = index == job.plan.stages - 1
    x = _random(entries[index], device)
    grads = () if last else _random(entries[index + 1], device)
    target = Target(job.targets[: job.size].to(device), job.size, 1.0) if last else None
    stash = before = 0
    for _ in range(2):
        stage.begin_window()
        before = _allocated()
        for mb in range(min(job.microbatches, 2)):
            start = torch.cuda.memory_allocated()
            stage.forward(mb, x, 0, target)
            stash = torch.cuda.memory_allocated() - start
            stage.backward(mb, grads, 0)
        stage.reduce()
        stage.step(keep=False)
    above = torch.cuda.max_memory_allocated() - before - stash
    return stash + (_bytes(x) if index else 0), above  # the first stage's input is the batch's own


def _random(boundary: Boundary, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.randn(spec.shape, dtype=spec.dtype, device=device) for spec in boundary.specs)


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _weights(job: Job, index: int) -> int:
    return sum(p.nbytes for p in job.stage(index).parameters())


def _fixed(job: Job, index: int) -> int:
    """Weights, statistics and momenta, and the batch of samples that every rank has in a benchmark."""
    statistics = sum(buffer.nbytes for buffer in job.stage(index).buffers())
    return 2 * _weights(job, index) + statistics + job.samples.nbytes


def messages(job: Job, index: int) -> int:
    """Receives posted ahead, the gradient that a backward works on, and gradients that are being sent."""
    entries, bound = job.plan.boundaries[job.size], job.plan.settings.buffer_size
    below = sum(spec.nbytes for spec in entries[index].specs) if index else 0
    last = index == job.plan.stages - 1
    above = 0 if last else sum(spec.nbytes for spec in entries[index + 1].specs)
    return 2 * bound * below + (bound + 1) * above
