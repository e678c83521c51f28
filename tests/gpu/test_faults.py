"""Faults that a GPU would show, each planted in what is right: the pretended one sees it, and how it reads.

Each is a row of `FAULTS`: what is replaced by what, the training that has it, and by what words it is seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from pipetrain import ActionFailed, ChannelError, ConfigError, TrainingStopped
from pipetrain.plan.plan import Plan
from pipetrain.runtime import rehearsal
from pipetrain.runtime.comm import gradient_buckets as buckets
from pipetrain.runtime.comm import process_groups as groups
from pipetrain.runtime.comm.channel import Channel
from pipetrain.runtime.gradient_reductions import Sums
from pipetrain.runtime.microbatch_feed import WindowFeed
from pipetrain.runtime.session import Session
from pipetrain.runtime.stage import cuda_graphs as graphs
from pipetrain.runtime.stage import nonfinite as finite
from pipetrain.runtime.stage.cuda_graphs import CapturedPass, GraphedStage, GraphMemory
from pipetrain.runtime.stage.fixed_store import FixedStore
from pipetrain.runtime.stage.nonfinite import StopOnNaN
from pipetrain.runtime.stage.objective import Counted, Objective
from pipetrain.runtime.stage.parameter_store import ParameterStore
from pipetrain.runtime.stage.stage import Stage
from tests.gpu.test_pretended import (
    CLIPPED,
    EVEN,
    FLOATS,
    PLAIN,
    SHARED,
    SHORT,
    TIED,
    case,
    equal_the_cpu,
    on_a_cpu,
    spread,
)
from tests.support.cases import Case
from tests.support.models import flat
from tests.support.pretended_gpu.nccl import Hang
from tests.support.pretended_gpu.streams import Refused, here
from tests.support.pretended_gpu.world import on_gpus


class Waiting(nn.Linear):
    """Waits for the device, which nothing hinders before a capture is spoilt."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            torch.cuda.synchronize()
        return super().forward(x)


def waiting() -> nn.Sequential:
    return nn.Sequential(*flat(), Waiting(12, 12), nn.Tanh(), nn.Linear(12, 10))


class _Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shift: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + shift

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return torch.where(x[0, 1] > x[1, 1], math.inf, grad.sum(0)), grad


class Overflowing(nn.Linear):
    """The gradient of its last weight may be infinite."""

    def __init__(self) -> None:
        super().__init__(12, 12)
        self.shift = nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Overflow.apply(self.shift, super().forward(x))
        return out


def overflowing() -> nn.Sequential:
    return nn.Sequential(*flat(), nn.Tanh(), Overflowing(), nn.Linear(12, 10))


@dataclass(frozen=True)
class Fault:
    """`plant`(what `name` of `owner` is) takes its place while `case` is trained.

    `seen`: how that ends; `waits`: of hosts without the fault.
    """

    owner: Any
    name: str
    plant: Callable[[Any], Any]
    case: Case
    seen: str
    waits: int = 0


def planted(fault: Fault) -> Any:
    return patch.object(fault.owner, fault.name, fault.plant(getattr(fault.owner, fault.name)))


def reading(reduce: Any) -> Any:
    def read(self: Stage) -> None:
        reduce(self)
        if self.objective is not None:
            self.last_loss = float(self.objective.losses[-1])  # type: ignore[attr-defined]

    return read


def one_buffer_for_all(hand_on: Any) -> Any:
    def overwrite(self: Stage, mb: int, outputs: Any) -> Any:
        outputs = hand_on(self, mb, outputs)
        key = tuple(t.shape for t in outputs)
        kept = vars(self).setdefault("kept", {}).setdefault(key, [t.clone() for t in outputs])
        return tuple(old.copy_(t) for old, t in zip(kept, outputs, strict=True))

    return overwrite


def not_waiting(complete: Any) -> Any:
    return lambda self, works, failed: None if self.ordered else complete(self, works, failed)


@contextmanager
def nothing_put_back(stages: Any, training: bool, updates: bool) -> Iterator[None]:
    for stage in stages:
        stage.begin_rehearsal(updates)
    yield
    for stage in stages:
        stage.rehearses = False


def on_the_host(norm: Any) -> Any:
    return lambda self, device, without=(): norm(self, "cpu", without)


def rebound(reduce: Any) -> Any:
    def rebind(self: FixedStore) -> None:
        self._with_gradient = set(self._with_gradient)  # a rehearsal puts the old one back
        reduce(self)

    return rebind


def early(check: Any) -> Any:
    def look(self: StopOnNaN, wait: bool) -> None:
        for *_, arrived in self._arriving:
            arrived.query = lambda: True
            arrived.synchronize = lambda: None
        check(self, wait)

    return look


def host_sums(counted: Any) -> Any:
    def count(self: Objective, loss: Tensor, outputs: Any, target: Any) -> Counted:
        one = counted(self, loss, outputs, target)
        return one._replace(sums={name: some + torch.ones(2) for name, some in one.sums.items()})

    return count


def unpinned(moved: Any) -> Any:
    def move(self: WindowFeed, value: Any) -> Any:
        return value.to(self._device, self._dtype if value.is_floating_point() else None, non_blocking=True)

    return move


def one_slot(capture: Any) -> Any:
    def share(self: GraphedStage, slots: int, *arguments: Any) -> str:
        why: str = capture(self, slots, *arguments)
        self._free_slots = [0] * slots
        return why

    return share


def unbounded(send: Any) -> Any:
    def start(self: Channel, message: Any, tensors: Any) -> None:
        end = self._ends[message.link]
        bound, end.bound = end.bound, 1000
        send(self, message, tensors)
        end.bound = bound

    return start


class Unused:
    """torch.distributed, but for the first use of groups."""

    def __getattr__(self, name: str) -> Any:
        first = name in ("send", "recv", "all_reduce")
        return (lambda *_, **__: None) if first else getattr(torch.distributed, name)


def without_meeting(before: Any) -> Any:
    def rehearse(self: rehearsal.Rehearsal, *window: Any) -> None:
        self.meet = lambda norms: None
        before(self, *window)

    return rehearse


def on_another_stream(wait: Any) -> Any:
    def record(self: StopOnNaN, look: Any, numbers: Tensor) -> None:
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.Stream())
        self._arriving.append((look, host, arrived))

    return record


def aside(average: Any) -> Any:
    def run(self: ParameterStore, decay: float, updates: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            average(self, decay, updates)

    return run


def staged(moved: Any) -> Any:
    def move(self: WindowFeed, value: Tensor) -> Tensor:
        buffers = vars(self).setdefault("buffers", {})
        key = tuple(value.shape), value.dtype
        if key not in buffers:
            buffers[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        dtype = self._dtype if value.is_floating_point() else None
        return buffers[key].copy_(value).to(self._device, dtype or value.dtype, non_blocking=True)

    return move


def one_pool(capture: Any) -> Any:
    def share(self: GraphedStage, *arguments: Any) -> str:
        pool = torch.cuda.graph_pool_handle()
        with patch.object(torch.cuda, "graph_pool_handle", lambda: pool):
            return capture(self, *arguments)

    return share


def in_common(place: Any) -> Any:
    of_all = GraphMemory(None)

    def share(self: GraphMemory, name: str, like: Any) -> Any:
        if name == "gradients":
            self, name = of_all, str((here("rank"), [t.shape for t in like]))
        return place(self, name, like)

    return share


def freed(captured: Any) -> Any:
    def free(self: GraphedStage, slot: int, memory: Any, *arguments: Any) -> CapturedPass:
        one = captured(self, slot, memory, *arguments)
        one.inputs = tuple(t.clone() for t in one.inputs)
        memory.tensors.clear()
        return one

    return free


def on_the_capture_s_stream(capture: Any) -> Any:
    def run(self: GraphedStage, *arguments: Any) -> str:
        with patch.object(torch.cuda, "stream", lambda stream: nullcontext()):
            return capture(self, *arguments)

    return run


def synchronised(train: Any) -> Any:
    def run(self: Session, *arguments: Any, **options: Any) -> int:
        ran = train(self, *arguments, **options)
        self.engine.synchronize()
        return ran

    return run


def looking(train: Any) -> Any:
    def run(self: Session, *arguments: Any, **options: Any) -> int:
        ran = train(self, *arguments, **options)
        if self.last:
            self.seen = float(self.last.counts.losses[-1])
        return ran

    return run


def in_one_mode(capturing: Any) -> Any:
    return lambda graph, pool: torch.cuda.graph(graph, pool=pool)


def first_alone(check: Any) -> Any:
    return lambda tensors: check(tensors[:1] if tensors[0].is_cuda else tensors)


GRAPHS = (*FLOATS, "cuda_graphs=true")
AUTO = (*SHORT[:2], *FLOATS[len(SHORT) :])
FAULTS = {
    "a loss is read at each update": Fault(
        Stage,
        "reduce",
        reading,
        case("1f1b", *EVEN),
        "_local_scalar_dense, runtime/gradient_reductions",
    ),
    "inputs are copied from memory that is not pinned": Fault(
        WindowFeed,
        "_to_device",
        unpinned,
        case("1f1b", *EVEN),
        "a copy to the device of .*runtime/microbatch_feed",
    ),
    "a number of the host is copied at each tie": Fault(
        Sums,
        "reduce_tied",
        lambda reduce: lambda self, action: (torch.tensor([1.0], device="cuda"), reduce(self, action)),
        case("1f1b", *SHORT, TIED, "partition=[3]"),
        "torch.tensor of numbers of the host",
    ),
    "one buffer is sent for all microbatches": Fault(
        Stage,
        "_outputs_to_send",
        one_buffer_for_all,
        case("gpipe", *EVEN),
        "written while it is sent",
    ),
    "a message is read before it has come": Fault(
        Channel,
        "_complete",
        not_waiting,
        case("1f1b", *EVEN),
        "(is nan|is not finite) at stage",
    ),
    "what is sent is not contiguous": Fault(
        Channel,
        "_to_wire",
        lambda wire: lambda self, t: t.detach(),
        case("1f1b", *FLOATS, "memory_format=channels_last"),
        "must be contiguous",
    ),
    "receives are posted ahead": Fault(
        Channel,
        "_post",
        lambda post: lambda self, end, least=0: post(self, end, max(least, end.bound)),
        case("zbv", *EVEN),
        "rank 0 waits for its transfers at a kernel",
    ),
    "receives are posted when they are needed": Fault(
        Channel,
        "post",
        lambda post: lambda self, message: None,
        case("zbv", *EVEN),
        "rank 0 waits for its transfers at a kernel",
    ),
    "a sum is posted when its share is told": Fault(
        Channel,
        "all_reduce",
        lambda reduce: lambda self, tie, numbers: (reduce(self, tie, numbers), self.begin(tie)),
        SHARED,
        "rank 0 waits for its transfers at a kernel",
    ),
    "replicas begin their buckets when they are told": Fault(
        Channel,
        "all_reduce",
        lambda reduce: (
            lambda self, tie, numbers, early=False: (
                reduce(self, tie, numbers, early),
                early and self.begin(tie),
            )
        ),
        spread("layer_dist", 3, "replicas=[1,2]", PLAIN, "microbatches=3"),
        "rank 2 waits for its transfers at a kernel",
    ),
    "a rehearsal trains": Fault(
        rehearsal,
        "state_restored",
        lambda state_restored: nothing_put_back,
        case("1f1b", *EVEN),
        r"== \[\]",
    ),
    "a sender waits for no receive": Fault(
        Channel,
        "send",
        unbounded,
        case("gpipe", *EVEN, "buffer_size=1"),
        "sends are unfinished",
    ),
    "groups are not used before a window": Fault(
        groups,
        "dist",
        lambda _: Unused(),
        case("1f1b", *EVEN),
        "is connected within a window",
    ),
    "ranks do not meet after a rehearsal": Fault(
        rehearsal.Rehearsal,
        "before",
        without_meeting,
        case("1f1b", *EVEN),
        "may still rehearse",
    ),
    "a norm of nothing is in host memory": Fault(
        ParameterStore,
        "gradient_norm",
        on_the_host,
        case("1f1b", *SHORT, *CLIPPED, "model._target_=tests.gpu.test_pretended.idle", "partition=[2]"),
        "a copy to the device of .*runtime/comm/channel",
    ),
    "losses are looked at before they have arrived": Fault(
        StopOnNaN,
        "check",
        early,
        case("1f1b", *EVEN),
        "before the event of its copy has passed",
    ),
    "sums of a metric are in host memory": Fault(
        Objective,
        "counted",
        host_sums,
        case("1f1b", *EVEN),
        "all tensors to be on the same device",
    ),
    "graphs forget which weights have gradients": Fault(
        FixedStore,
        "reduce",
        rebound,
        case("1f1b", *GRAPHS),
        r"== \[\]",
    ),
    "graphs add to the gradients of the batch before": Fault(
        FixedStore,
        "drop_gradients",
        lambda _: ParameterStore.drop_gradients,
        case("1f1b", *GRAPHS),
        r"== \[\]",
    ),
    "microbatches in flight share the memory of a graph": Fault(
        GraphedStage,
        "capture",
        one_slot,
        case("gpipe", *GRAPHS),
        "written while it is sent",
    ),
    "an event is recorded on another stream": Fault(
        StopOnNaN,
        "_read_later",
        on_another_stream,
        case("1f1b", *EVEN),
        "before the event of its copy has passed",
    ),
    "the average follows on a side stream": Fault(
        ParameterStore,
        "average_in",
        aside,
        case("1f1b", *EVEN, "ema=0.9"),
        "a tensor of another one",
    ),
    "one pinned buffer is copied from for all microbatches": Fault(
        WindowFeed,
        "_to_device",
        staged,
        case("1f1b", *EVEN),
        "before the event of its copy has passed",
    ),
    "one pool holds what all slots keep between forward and backward": Fault(
        GraphedStage,
        "capture",
        one_pool,
        case("gpipe", *GRAPHS),
        "is not finite at stage",
    ),
    "gradients that W needs are overwritten by another slot's": Fault(
        GraphMemory,
        "place",
        in_common,
        Case("zb_h1", 3, (*GRAPHS, "model._target_=tests.runtime.test_rehearsal.lines"), 24),
        r"== \[\]",
    ),
    "a graph's inputs are freed": Fault(
        GraphedStage,
        "_captured",
        freed,
        case("1f1b", *GRAPHS),
        "memory that was freed",
    ),
    "a capture looks at other threads": Fault(
        graphs,
        "_capturing",
        in_one_mode,
        case("1f1b", *GRAPHS),
        "a previous error during capture",
    ),
    "a failed capture leaves its stream current": Fault(
        GraphedStage,
        "capture",
        on_the_capture_s_stream,
        case("1f1b", *AUTO, "model._target_=tests.gpu.test_faults.waiting"),
        "another stream is current",
        9,  # forwards that wait
    ),
    "gradients that are weighed are captured": Fault(
        Plan,
        "not_captured",
        lambda why: lambda self, stage: "",
        case("pipedream", *AUTO, "correction=gap_aware", "optim.momentum=0.9", samples=44),
        r"== \[\]",
    ),
    "the host waits between windows": Fault(
        Session,
        "train",
        synchronised,
        case("1f1b", *EVEN),
        "cuda.synchronize, runtime/clock",
    ),
    "a loss is read between windows": Fault(
        Session,
        "train",
        looking,
        case("1f1b", *EVEN),
        "_local_scalar_dense, trainer/window_loop",
    ),
    "the first gradient alone is checked": Fault(
        finite,
        "not_finite",
        first_alone,
        case(
            "1f1b",
            *SHORT,
            "model._target_=tests.gpu.test_faults.overflowing",
            "partition=[2]",
            "on_nan=skip",
            samples=60,
        ),
        r"== \[\]",
        2,  # first updates
    ),
    "a loss is overwritten by the next replay": Fault(
        CapturedPass,
        "counted",
        lambda counted: lambda self, target: self.recorded,
        case("1f1b", *GRAPHS),
        "'loss'",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET", 1000)
    one = FAULTS[fault]
    on_a_cpu(one.case)  # without the fault
    errors = AssertionError, Refused, ActionFailed, ChannelError, ConfigError, TrainingStopped
    with planted(one), pytest.raises(errors) as caught:
        equal_the_cpu(one.case, one.waits)
    said, error = list[str](), caught.value
    while error is not None:  # what others wait for then may be noticed sooner
        said.append(str(error))
        error = error.__context__
    assert re.search(one.seen, "\n".join(said)), said


def test_ranks_that_wait_for_each_other_are_named():
    with planted(FAULTS["receives are posted ahead"]), pytest.raises(Hang) as caught:
        on_gpus(case("zbv", *EVEN), exclusive=True)
    assert "rank 0 waits for" in str(caught.value)
    assert "rank 1 waits for" in str(caught.value)
