"""A machine on which each matrix product takes a given time, whoever asks for it.

Each library has its own way to split a backward: hooks, nodes of the graph, or operators that are replaced.
So nothing of the model sleeps, but the machine does: the CPU's kernel of `aten::mm` is replaced by one that
ends a given time after its start. A linear layer has three products: its output, the gradient of its input
and that of its weight. F, I and W take as long as the products that they run, so a W that goes through the
layers again, or an I that makes gradients of weights, pays for it, ours and theirs alike. Sleeping takes no
core.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterator
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library

from benchmark.contestants import Contestant
from benchmark.tasks import Task

WIDTH = 4  # of the matrix, so that the product itself takes less than a millisecond; and classes
SAMPLE = (2**16, WIDTH)  # float32: a message of 1 MiB
PRODUCTS = 3  # of a stage, for a microbatch
WAKING_S = 3e-4  # of looking at the clock instead of sleeping


def sleep_until(end: float) -> None:
    """Return at `end` and not some tenths of a millisecond later, as a sleep does."""
    time.sleep(max(0.0, end - time.perf_counter() - WAKING_S))
    while time.perf_counter() < end:
        pass


def naps(stage: int, seconds: float, spread: float) -> Iterator[float]:
    """Give the seconds of a stage's products, which vary evenly by a share: the same ones for everybody."""
    chance = random.Random(stage)
    while True:
        yield seconds * chance.uniform(1 - spread, 1 + spread)


class Pace:
    """A context in which the matrix products of this process take the next of `seconds`; it counts them."""

    def __init__(self, seconds: Iterator[float]) -> None:
        self.products = 0
        self._seconds = seconds
        self._kernel: Library | None = None

    def __enter__(self) -> Pace:
        self._kernel = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is meant to take the place of torch's own
            self._kernel.impl("mm", self._product, "CPU")  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._kernel is not None
        self._kernel._destroy()  # type: ignore[no-untyped-call]

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        start = time.perf_counter()
        result = torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)  # an operator of its own
        self.products += 1
        sleep_until(start + next(self._seconds))
        return result


class Paced:
    """A contestant on a machine whose matrix products take `seconds`, always the same or the next ones."""

    def __init__(self, contestant: Contestant, seconds: float | Iterator[float], bound: float) -> None:
        self.name, self.batches, self.bound = contestant.name, contestant.batches, bound
        self.losses: list[float] = []
        self._contestant = contestant
        self._seconds = repeat(seconds) if isinstance(seconds, float) else seconds

    def run(self) -> None:
        """Take the contestant's turn."""
        with Pace(self._seconds):
            self._contestant.run()
        self.losses = self._contestant.losses


class Product(nn.Module):
    """Maps [n, *SAMPLE] by one matrix product, the identity at first; with `scores` to the first row of it.

    `first`: the model's first layer, whose product gets something that needs a gradient, as the second and
    later layers of a first stage do: without it that stage's backward would be a W alone.
    """

    def __init__(self, first: bool, scores: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.shift = nn.Parameter(torch.zeros(1)) if first else None
        self._scores = scores

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        y = F.linear(x if self.shift is None else x + self.shift, self.weight)
        return y[:, 0] if self._scores else y


def products(stages: int) -> nn.Sequential:
    """Return a model of so many stages of one product each. The last gives scores [n, WIDTH]."""
    return nn.Sequential(*(Product(not stage, stage == stages - 1) for stage in range(stages)))


def task_of(stages: int, microbatches: int) -> Task:
    """Return the training of stages of one product; a microbatch is a sample."""
    overrides = (
        "model._target_=benchmark.paced.products",
        f"+model.stages={stages}",
        "partition=even",
        f"batch_size={microbatches}",
        f"microbatches={microbatches}",
    )
    return Task(overrides, SAMPLE, WIDTH)
