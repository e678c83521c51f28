"""Trains a case of the tests on pretended GPUs, one a rank, with the real channel over the pretended NCCL."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Barrier
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pipetrain.plan.plan import Plan
from pipetrain.runtime.channel import Channel
from pipetrain.runtime.engine import Engine
from pipetrain.runtime.ranks import World
from pipetrain.runtime.watch import Deadline
from pipetrain.schedule.actions import ALL, Action, Tie
from pipetrain.schedule.lower import Link
from tests.support.cases import Case, Listener, LocalLinks, Ran, drawing_in_turn, make_run, state_of
from tests.support.deadlines import DEADLINE_S
from tests.support.local import Wire, in_threads
from tests.support.pretended.device import CUDA, Gpu, being, here, on_device, pretended
from tests.support.pretended.nccl import Group, Nccl
from tests.support.runs import epochs_of


class PretendedLinks(LocalLinks):
    """The links of one rank with a pretended GPU."""

    def __init__(self, world: World, nccl: Nccl, plan: Plan, groups: Groups, staged: bool) -> None:
        super().__init__(world, Wire(plan.placement), Barrier(1), [])
        self.device, self.staged = CUDA, staged
        self._nccl, self._groups = nccl, groups

    def channel(self, buffer_size: Any, channels_last: bool = False) -> Channel:  # type: ignore[override]
        links = {link: group for link, group in self._groups.links.items() if self.world.rank in group.ranks}
        sums = {tie: group for tie, group in self._groups.sums.items() if self.world.rank in group.ranks}
        return Channel(links, buffer_size, DEADLINE_S, self.device, self.staged, channels_last, sums)

    def add_up(self, tie: Tie, numbers: Tensor) -> Tensor:
        sums = numbers.clone()
        self._nccl.all_reduce(sums, group=self._groups.sums[tie]).wait()
        return sums

    def gather(self, what: str, item: object) -> list[Any]:
        return self._nccl.gather(json.loads(json.dumps(item)))


class Groups:
    def __init__(self, plan: Plan, ranks: int) -> None:
        self.links: dict[Link, Group] = {
            (edge, ranks): Group(f"{edge[0]}->{edge[1]} on {ranks}", set(ranks)) for edge, ranks in plan.links
        }
        self.sums: dict[Tie, Group] = {
            tie: Group(f"tie {tie}", {rank for stage in tie for rank in plan.placement[stage]})
            for tie in plan.ties
        }
        self.sums[ALL] = Group("all", range(ranks))


@dataclass(frozen=True)
class Trained:
    """What came out: the model's state, the epochs' figures, and what was seen on the device."""

    state: dict[str, Tensor]
    figures: Ran
    waits: Counter[str]
    kernels: Counter[tuple[Any, Any, str]]


def on_gpus(case: Case, exclusive: bool = False, staged: bool = False) -> Trained:
    """Train a case. `exclusive`: kernels wait for what their rank has posted; `staged`: over gloo."""
    with patch.object(torch.cuda, "is_available", lambda: True):  # as CUDA graphs need one
        run = make_run(case)
    draws = any(layer.draws for layer in run.plan.layers)  # one rank at a time, which is not to wait then
    nccl, listener, state = Nccl(case.ranks, exclusive and not draws, staged), Listener(), {}
    groups = Groups(run.plan, case.ranks)
    with ExitStack() as stack:
        gpu = stack.enter_context(pretended())
        gpu.before_kernel, gpu.on_write = nccl.before_kernel, nccl.on_write
        stack.enter_context(nccl.patched())
        stack.enter_context(watched())
        if draws:
            stack.enter_context(drawing_in_turn())
        all_links = [
            PretendedLinks(World(rank, case.ranks), nccl, run.plan, groups, staged)
            for rank in range(case.ranks)
        ]
        trainers = []
        for links in all_links:
            with on_device(gpu, links.world.rank):
                trainers.append(epochs_of(run, links, None if links.world.rank else listener))  # type: ignore[arg-type]

        def work(rank: int) -> None:
            with on_device(gpu, rank), nccl.running():
                trainers[rank].run()
                for name, tensor in state_of(trainers[rank], run).items():
                    state[name] = tensor.cpu()

        try:
            in_threads(work, Barrier(case.ranks))
        finally:
            nccl.join()
    return Trained(state, listener.epochs, gpu.waits, gpu.kernels)


@contextmanager
def watched() -> Iterator[None]:
    """Let no host wait in a window of training, and count kernels by action; nothing but that is other."""
    run = Engine._run

    def watch(self: Engine, window: Any, *rest: Any) -> Any:
        real = not any(stage.rehearses for stage in self.stages.values())
        methods = {op: at(method) for op, method in self._methods.items()}
        with being(watched=real and window.take is None), patch.object(self, "_methods", methods):
            return run(self, window, *rest)

    def at(method: Callable[[Action, Any], None]) -> Callable[[Action, Any], None]:
        def named(action: Action, window: Any) -> None:
            with being(action=action.op if here("watched") and window.trains else None):
                method(action, window)

        return named

    def add(self: Deadline, passed: Callable[[], bool], error: Any) -> None:
        """Keep no deadline, for which a thread would stay: the pretended NCCL notices what hangs."""

    with patch.object(Engine, "_run", watch), patch.object(Deadline, "add", add):
        yield


@contextmanager
def alone() -> Iterator[Gpu]:
    """Let this process be the only rank, with a pretended GPU."""
    with pretended() as gpu, watched(), on_device(gpu):
        yield gpu
