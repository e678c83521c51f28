"""What the engine launches beside the model's own: within a window, on each rank, counted on a CPU.

Beside it stands a plain loop over the same microbatches and the same cut, with an optimizer a rank. What a
launch costs the host is what limits the speed of small microbatches on a GPU; a number that the host reads
makes it wait for all that it has launched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark import contestants
from benchmark.contestants import Ours
from benchmark.tasks import Job, Task, prepare
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.message import Message
from tests.support import DEADLINE_S
from tests.support.thread_ranks import LocalChannel, Wire, in_threads

MOST = 8  # kernels a microbatch
FURTHER_STAGE = 3  # of a second stage on a rank, a batch: two check its gradients, one is its optimizer's
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
CUT = ("batch_size=8", "memory_format=contiguous")
TEXT = ("model=gpt", "data=text", "task=language_modelling", "optim=adamw", "data.block=8")
TASKS = {
    "vgg": Task(("model=vgg11", "+model.width=4", *CUT)),
    "gpt": Task((*TEXT, "model.depth=4", "model.width=16", "model.heads=2", *CUT), None),
}
NUMBER = "_local_scalar_dense"  # what .item(), float() and a truth value call


class Launches(TorchDispatchMode):
    """Counts the kernels of a thread, by the name of their operation, while `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if self.counts and not (func.is_view or func.namespace == "profiler" or name in NO_KERNEL):
            # One for each gradient, whether a split backward makes them together or not.
            self.kernels[name] += sum(args[-1]) if name == "convolution_backward" else 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.counts = False
        yield
        self.counts = True


class Uncounted(LocalChannel):
    """Its copy of what it receives stands for the transfer itself."""

    def __init__(self, wire: Wire, bounds: Any, rank: int, launches: Launches) -> None:
        super().__init__(wire, bounds, DEADLINE_S, rank)
        self._launches = launches

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        with self._launches.paused():
            return super().recv(message)


@dataclass(frozen=True)
class Second:
    """The second window of a run: what each rank launched in it, and of how many batches it was."""

    launches: list[Counter[str]]
    batches: int
    job: Job

    @property
    def numbers(self) -> int:
        """How many numbers the host read."""
        return sum(kernels[NUMBER] for kernels in self.launches)

    def beside(self) -> float:
        """Return the most kernels that a rank launched for a microbatch beside those of a plain loop."""
        own = plain_loop(self.job)
        assert sum(own) > 50  # the model was counted
        each = zip(self.launches, own, strict=True)
        beside = [kernels.total() / self.batches - plain for kernels, plain in each]
        return max(beside) / self.job.microbatches


def second_window(task: Task, schedule: str, ranks: int) -> Second:
    """Train two windows with a thread a rank, and count in the second one."""
    meeting = Barrier(ranks)
    counted = [Launches() for _ in range(ranks)]
    jobs = [prepare(task, schedule, ranks, 2) for _ in counted]
    wire, ours = Wire(jobs[0].plan.placement), []
    with patch.object(contestants, "fitted", lambda groups, plan: groups):
        for rank, (job, launches) in enumerate(zip(jobs, counted, strict=True)):
            groups: Any = SimpleNamespace(world=World(rank, ranks), device=torch.device("cpu"))
            channel = Uncounted(wire, job.plan.cut.bounds, rank, launches)
            ours.append(Ours(schedule, job, groups, channel=channel))

    def work(rank: int) -> None:
        ours[rank].run()
        meeting.wait(DEADLINE_S)
        with counted[rank]:
            ours[rank].run()

    in_threads(work, meeting)
    return Second([launches.kernels for launches in counted], ours[0].batches, jobs[0])


def plain_loop(job: Job) -> list[int]:
    """Train a batch, each rank's stages in turn; return the kernels of each rank, from its second batch."""
    plan, placement = job.plan, [rank for (rank,) in job.plan.placement]
    ranks = max(placement) + 1
    stages = [job.stage(index).train() for index in range(plan.stages)]
    mine = [
        [p for s, stage in enumerate(stages) if placement[s] == rank for p in stage.named_parameters()]
        for rank in range(ranks)
    ]
    optimizers = [job.optimizer(parameters) for parameters in mine]
    pairs = list(zip(job.samples.chunk(job.microbatches), job.targets.chunk(job.microbatches), strict=True))
    for _ in range(2):
        counted = [Launches() for _ in range(ranks)]
        for x, target in pairs:
            entered, left = [], []
            for stage, rank in zip(stages, placement, strict=True):
                with counted[rank]:
                    entered.append(x.detach().requires_grad_(bool(entered)))
                    left.append(x := stage(entered[-1]))
                    if len(left) == len(stages):
                        (job.task.loss(x, target) * (1 / len(pairs))).backward()
            for index in reversed(range(len(stages) - 1)):
                with counted[placement[index]]:
                    left[index].backward(entered[index + 1].grad)
        for launches, optimizer in zip(counted, optimizers, strict=True):
            with launches:
                optimizer.step()
                optimizer.zero_grad()
    return [launches.kernels.total() for launches in counted]


@pytest.mark.parametrize(
    ("schedule", "ranks", "name", "microbatches"),
    [
        *((schedule, 2, "vgg", 4) for schedule in ("1f1b", "fbp", "pipedream_2bw", "v_async", "zb_h1")),
        *(("pipedream", 2, "gpt", 4), ("zbv", 2, "gpt", 4), ("interleaved_1f1b", 1, "vgg", 4)),
        # What is done once a batch counts in full. pipedream_2bw needs more of them.
        *((schedule, 2, "vgg", 1) for schedule in ("interleaved_1f1b", "pipedream", "v_half")),
    ],
)
def test_a_microbatch_costs_few_kernels_beside_the_model_s_and_no_number_is_read(
    schedule, ranks, name, microbatches
):
    second = second_window(TASKS[name].extended(f"microbatches={microbatches}"), schedule, ranks)
    further = len(second.job.plan.placement) // ranks - 1 if microbatches == 1 else 0
    assert second.beside() <= MOST + FURTHER_STAGE * further, second.launches
    assert second.numbers == 0


@pytest.mark.parametrize(
    "option",
    [
        ("on_nan=skip", "ema=0.9"),
        ("clip_grad_norm=0.1", "clip_grad_norm_over=model", "recompute=always"),
        ("clip_grad_norm=0.1", "clip_grad_norm_over=stage", "batchnorm=batch"),
    ],
    ids=" ".join,
)
def test_no_option_reads_a_number(option):
    """What is read by .tolist() cannot be counted on a CPU: on_nan=skip does, once a batch."""
    assert second_window(TASKS["vgg"].extended("microbatches=4", *option), "pipedream", 2).numbers == 0
