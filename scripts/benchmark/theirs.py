"""The other contestants: torch.distributed.pipelining, DistributedDataParallel, plain loops, and the ideal.

They train the same job: the same layers and cut, the same batch in the same microbatches, the same optimizer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmark.tasks import LR, Job
from pipetrain.boundary import TensorSpec
from pipetrain.runtime.mesh import Mesh

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
RIVALS = {"gpipe": "torch GPipe", "1f1b": "torch 1F1B"}
"""By ours: the one that should never be faster."""


class TorchPipeline:
    """A schedule of torch.distributed.pipelining over the job's stages, one a rank."""

    def __init__(self, schedule: str, job: Job, mesh: Mesh, batches: int) -> None:
        rank, stages = mesh.world.rank, mesh.world.size
        self.name = f"torch {schedule}"
        self.batches, self.microbatches = batches, job.microbatches
        self._job = job
        self._first, self._last = rank == 0, rank == stages - 1
        module = job.stage(rank).train()
        self._optimizer = job.optimizer(module.parameters())
        stage = PipelineStage(module, rank, stages, mesh.device)
        # Gradients are divided by the number of microbatches, so that an update is the batch's mean, as ours.
        self._schedule = SCHEDULES[schedule](
            stage, job.microbatches, loss_fn=functional.cross_entropy, scale_grads=True
        )

    def run(self) -> None:
        """See Contestant.run."""
        for _ in range(self.batches):
            losses: list[Tensor] = []
            inputs = (self._job.samples,) if self._first else ()
            target = self._job.labels if self._last else None
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
            self._optimizer.step()
            self._optimizer.zero_grad()
            if self._last:
                assert len(losses) == self._job.microbatches
                _finite(torch.stack(losses).mean())


class Plain:
    """A plain PyTorch loop over the whole model, on rank 0 alone or, with `parallel`, shared by all (DDP)."""

    def __init__(
        self, name: str, job: Job, mesh: Mesh, batches: int, threads: int = 1, parallel: bool = False
    ) -> None:
        rank, ranks = mesh.world.rank, mesh.world.size
        self.name = name
        self.batches, self.microbatches = batches, 1
        self._threads = threads
        self._works = parallel or rank == 0
        self._model = job.model.train().to(mesh.device)
        self._samples, self._labels = job.samples.to(mesh.device), job.labels.to(mesh.device)
        if parallel:
            self._model = DistributedDataParallel(job.model)
            self._samples, self._labels = job.samples.chunk(ranks)[rank], job.labels.chunk(ranks)[rank]
        self._optimizer = job.optimizer(self._model.parameters())

    _model: nn.Module

    def run(self) -> None:
        """See Contestant.run."""
        if not self._works:
            return
        torch.set_num_threads(self._threads)
        losses = []
        for _ in range(self.batches):
            loss = functional.cross_entropy(self._model(self._samples), self._labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()
            losses.append(loss.detach())
        _finite(torch.stack(losses).mean())  # at the turn's end: to look at a number makes a GPU's host wait
        torch.set_num_threads(1)


class Alone:
    """The no-communication ideal: each rank trains its own stage on local tensors, all at the same time.

    Inputs and output gradients are random tensors of the right shapes, in the job's layout; a turn ends with
    the slower stage.
    """

    def __init__(self, name: str, job: Job, mesh: Mesh, batches: int) -> None:
        index, numerics = mesh.world.rank, job.plan.numerics
        self.name = name
        self.batches, self.microbatches = batches, job.microbatches
        self._module = job.stage(index).train()
        numerics.arrange_weights(self._module)
        self._optimizer = job.optimizer(self._module.parameters())
        boundaries = job.plan.boundaries[job.size]
        self._inputs = numerics.arrange(job.samples.chunk(job.microbatches)[0])
        self._labels = job.labels.chunk(job.microbatches)[0]
        if index > 0:
            self._inputs = numerics.arrange(_random(boundaries[index].specs[0])).requires_grad_()
        last = index == job.plan.stages - 1
        self._grads = None if last else numerics.arrange(_random(boundaries[index + 1].specs[0])) * LR

    def run(self) -> None:
        """See Contestant.run."""
        for _ in range(self.batches):
            for _ in range(self.microbatches):
                self._inputs.grad = None
                outputs = self._module(self._inputs)
                if self._grads is None:
                    outputs = functional.cross_entropy(outputs, self._labels) / self.microbatches
                outputs.backward(self._grads)
            self._optimizer.step()
            self._optimizer.zero_grad()


def _random(spec: TensorSpec) -> Tensor:
    return torch.randn(spec.shape, dtype=spec.dtype)


def _finite(loss: Tensor) -> None:
    value = float(loss.detach())
    assert math.isfinite(value), f"the loss is {value}: this contestant does not train"
