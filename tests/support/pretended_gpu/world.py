"""Trains a case of the tests on pretended GPUs, one a rank, with the real links over the pretended NCCL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Barrier
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pipetrain.plan.plan import Plan
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.engine import Engine
from pipetrain.runtime.rehearsal import Rehearsal
from pipetrain.runtime.session import Session
from pipetrain.schedule.actions import Action
from pipetrain.trainer.window_loop import Windows
from tests.support import DEADLINE_S
from tests.support.cases import Case, Listener, Ran, RankRun, Run, make_run, rank_run, state_of
from tests.support.pretended_gpu.device import CUDA, on_device, pretended
from tests.support.pretended_gpu.distributed import Distributed
from tests.support.pretended_gpu.nccl import Hang
from tests.support.pretended_gpu.streams import Gpu, _here, being, here
from tests.support.thread_ranks import drawing_in_turn, in_threads


def linked(plan: Plan, rank: int, ranks: int, staged: bool) -> ProcessGroups:
    """Connect a rank; its channel's bounds are those of NCCL's groups, which allow twice as many sends."""
    store: Any = object()
    groups = ProcessGroups(World(rank, ranks), plan.placement, [], CUDA, store, DEADLINE_S, staged)
    groups.open(plan.links, plan.ties)
    for (edge, _), group in groups._groups.items():
        group.most = 2 * plan.cut.bounds[edge] * len(plan.cut.message(edge, min(plan.cut.specs)))
    return groups


@dataclass(frozen=True)
class Trained:
    """What came out: the model's state, the epochs' figures, and what was seen on the device."""

    state: dict[str, Tensor]
    figures: Ran
    waits: Counter[str]
    kernels: Counter[tuple[Any, Any, str]]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a case, each with a pretended GPU."""

    run: Run
    listener: Listener
    gpu: Gpu
    distributed: Distributed
    groups: dict[int, ProcessGroups]
    trainers: list[RankRun]

    def each(self, work: Callable[[int], None], told: bool = False) -> None:
        """Call `work` for each rank, in a thread; `told`: see Waits.running."""

        waits, ranks = self.distributed.waits, self.distributed.ranks

        def on_rank(rank: int) -> None:
            with on_device(self.gpu, rank), being(waits=waits), waits.running(told):
                work(rank)

        waits.begin(True, ranks)
        try:
            in_threads(on_rank, Barrier(ranks))
        finally:
            if waits.hang:  # whatever follows from it
                raise Hang(waits.hang)


@contextmanager
def ranks_of(case: Case, exclusive: bool = False, staged: bool = False) -> Iterator[Ranks]:
    """Connect the ranks of a case, and make what trains it. See `on_gpus`."""
    with patch.object(torch.cuda, "is_available", lambda: True):  # as CUDA graphs need one
        run = make_run(case)
    draws = any(layer.draws for layer in run.plan.layers)  # one rank at a time, which is not to wait then
    distributed = Distributed(case.ranks, exclusive and not draws)
    with ExitStack() as stack:
        gpu = stack.enter_context(pretended())
        gpu.before_kernel, gpu.on_write = distributed.nccl.before_kernel, distributed.nccl.on_write
        stack.enter_context(distributed.patched())
        stack.enter_context(watched(distributed.nccl.rehearsed))
        if draws:
            stack.enter_context(drawing_in_turn())
        stack.callback(distributed.waits.join)
        made = Ranks(run, Listener(), gpu, distributed, {}, [])
        made.each(lambda rank: made.groups.update({rank: linked(run.plan, rank, case.ranks, staged)}))
        for rank in range(case.ranks):
            with on_device(gpu, rank):
                recorder: Any = None if rank else made.listener
                made.trainers.append(rank_run(run, made.groups[rank], recorder))
        yield made


def on_gpus(case: Case, exclusive: bool = False, staged: bool = False) -> Trained:
    """Train a case. `exclusive`: kernels wait for what their rank has posted; `staged`: over gloo."""
    state: dict[str, Tensor] = {}
    with ranks_of(case, exclusive, staged) as ranks:

        def work(rank: int) -> None:
            ranks.trainers[rank].run()
            for name, tensor in state_of(ranks.trainers[rank], ranks.run).items():
                state[name] = tensor.cpu()
            ranks.groups[rank].close()
            host = ranks.gpu.host
            assert host.stream is host.default, "another stream is current afterwards"

        ranks.each(work)
    return Trained(state, ranks.listener.epochs, ranks.gpu.waits, ranks.gpu.kernels)


def ends_of(case: Case) -> list[str]:
    """Train a case, and return how each of its ranks ends.

    With SystemExit it ends as if it were killed, with KeyboardInterrupt as Python does.
    """
    ends = [""] * case.ranks
    with ranks_of(case) as ranks:

        def work(rank: int) -> None:
            try:
                ranks.trainers[rank].run()
                ranks.groups[rank].close()
            except SystemExit:
                ranks.distributed.kill()
            except KeyboardInterrupt:
                ranks.groups[rank]._leave()
            except Exception as error:
                ends[rank] = f"{type(error).__name__}: {error}"

        ranks.each(work, told=True)
    return ends


@contextmanager
def watched(rehearsed: Sequence[Counter[int]] = ()) -> Iterator[None]:
    """Let no host wait in windows of training and between them, and count kernels by action.

    Somebody looks at numbers where the ranks exchange a word. `rehearsed`: by rank, counts windows that it
    rehearses.
    """
    run, train, say, rehearse = Engine._run, Session.train, Windows._exchange, Rehearsal.before

    def begin(self: Session, *arguments: Any, **options: Any) -> int:
        vars(_here).update(watched=True)  # until the next word
        return train(self, *arguments, **options)

    def look(self: Windows, *arguments: Any, **options: Any) -> Any:
        vars(_here).update(watched=False)
        return say(self, *arguments, **options)

    def unwatched(self: Rehearsal, *arguments: Any) -> None:
        with being(watched=False):
            rehearse(self, *arguments)

    def watch(self: Engine, window: Any, *rest: Any) -> Any:
        real = not any(stage.rehearses for stage in self.stages.values())
        if not real and rehearsed:
            rehearsed[here("rank")][here("rank")] += 1
        methods = {op: at(method) for op, method in self._methods.items()}
        with being(watched=real and window.outputs is None), patch.object(self, "_methods", methods):
            return run(self, window, *rest)

    def at(method: Callable[[Action, Any], None]) -> Callable[[Action, Any], None]:
        def named(action: Action, window: Any) -> None:
            with being(action=action.op if here("watched") and window.trains else None):
                method(action, window)

        return named

    with (
        patch.object(Engine, "_run", watch),
        patch.object(Session, "train", begin),
        patch.object(Windows, "_exchange", look),
        patch.object(Rehearsal, "before", unwatched),
    ):
        yield


@contextmanager
def alone() -> Iterator[Gpu]:
    """Let this process be the only rank, with a pretended GPU."""
    with pretended() as gpu, watched(), on_device(gpu):
        yield gpu
