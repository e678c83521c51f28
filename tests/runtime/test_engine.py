"""The interpreter: each action does what it says, and what was simulated is the most that is held."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipetrain.network.values import Gradients, TensorSpec, ValueSpec
from pipetrain.plan.cut import Cut, cut_layers
from pipetrain.plan.estimate import estimate
from pipetrain.runtime.channel import Message
from pipetrain.runtime.clock import Clock
from pipetrain.runtime.engine import Engine
from pipetrain.runtime.feed import Target
from pipetrain.runtime.mailbox import Mailbox
from pipetrain.runtime.order import Order
from pipetrain.runtime.stage import Stage
from pipetrain.schedule.actions import COMPUTE, UPDATE, Op, parse_program
from pipetrain.schedule.lower import lower
from pipetrain.schedule.policy import Bounds
from pipetrain.schedule.programs import one_f_one_b, pipedream
from pipetrain.schedule.timeline import Row, StageStats
from pipetrain.tasks import Classification
from tests.support.parts import part_of


class Tape:
    """A channel that only takes down what is asked of it; what it gives is all ones."""

    ordered = False

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.waited = 0.0  # by its own account: 1 s for each message it gives, 2 s for room for each it takes
        self.carried = 0  # half of its bytes travel

    def check(self) -> None:
        pass

    def expect(self, messages: Sequence[Message], watched: bool = False) -> None:
        assert not watched
        self.seen.append("expect " + " ".join(f"{m.src}>{m.dst}:{m.mb}" for m in messages))

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        assert [TensorSpec(tuple(t.shape), t.dtype) for t in tensors] == list(message.specs)
        self.seen.append(f"send {message.src}>{message.dst}:{message.mb}")
        self.waited += 2.0
        self._count(message)

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        self.seen.append(f"recv {message.src}>{message.dst}:{message.mb}")
        self.waited += 1.0
        self._count(message)
        return tuple(torch.ones(spec.shape, dtype=spec.dtype) for spec in message.specs)

    def drain(self) -> None:
        self.seen.append("drain")

    def _count(self, message: Message) -> None:
        self.carried += message.nbytes // 2


class Ones:
    """Microbatches of one sample."""

    def size(self, mb: int) -> int:
        return 1

    def input(self, mb: int) -> tuple[Tensor, ...]:
        return (torch.ones(1, 3),)

    def target(self, mb: int) -> Target:
        return Target(torch.tensor([1]), 1.0, 0.5)

    def prepare(self) -> None: ...

    def first(self):
        return self.input(0), self.target(0)


def joined(stages: int) -> Cut:
    """Linear layers, each a stage."""
    example = ValueSpec((TensorSpec((3,), torch.float32),))
    layers = estimate(nn.Sequential(*(nn.Linear(3, 3) for _ in range(stages))), example.of(1))
    return cut_layers({1: layers}, range(1, stages), example)


def engine(rank_of: list[int], mine: list[int], bounds: Bounds) -> tuple[Engine, Tape]:
    """The engine of one rank over linear stages."""
    tape = Tape()
    sgd = partial(torch.optim.SGD, lr=0.1)
    stages = {
        index: Stage(
            index,
            part_of(
                nn.Linear(3, 3), before=index, enters_grad=None if index else Gradients((False,), (False,))
            ),
            sgd,
            lambda update: 1.0,
            task=Classification() if index == len(rank_of) - 1 else None,
        )
        for index in mine
    }
    between = Mailbox(tape, joined(len(rank_of)), rank_of, mine)
    made = Engine(stages, between, between, dict.fromkeys(mine, bounds), Clock(torch.device("cpu")))
    return made, tape


def test_the_middle_of_three_stages_does_what_its_list_says_and_its_times_are_counted_and_handed_on():
    program = lower(one_f_one_b(3, 1, 2))
    made, tape = engine([0, 1, 2], [1], Bounds(2, 1, 9))
    updated: list[int] = []
    seen: list[Row] = []
    made.train(Order(program[1]), Ones(), 2, updated.append, seen.append)
    assert tape.seen == [
        "expect 0>1:0 0>1:1 2>1:0 2>1:1",  # all of the window, in the program's order
        "recv 0>1:0",
        "send 1>2:0",
        "recv 0>1:1",
        "send 1>2:1",
        "recv 2>1:0",
        "send 1>0:0",
        "recv 2>1:1",
        "send 1>0:1",
        "drain",
    ]
    assert updated == [1]
    record = made.stats[1]
    assert (record.activations, record.versions, record.max_staleness) == (2, 1, 0)
    assert (record.bytes_sent, record.raw_bytes) == (4 * 3 * 4 // 2, 4 * 3 * 4)
    (row,) = seen
    assert row.actions == program[1]
    moments = [row.began, *(t for span in row.spans for t in (span.start, span.end)), row.ended]
    assert moments == sorted(moments)
    *spans, drain = row.spans
    assert drain.action is None
    blocked = {Op.RECV_F: 1.0, Op.RECV_B: 1.0, Op.SEND_F: 2.0, Op.SEND_B: 2.0}
    assert [span.waited for span in spans] == [blocked.get(a.op, 0.0) for a in program[1]]
    assert record.wait_s == row.waited == pytest.approx(4 * 1.0 + 4 * 2.0, abs=1e-3)
    assert [span.nbytes for span in spans if span.action.op in blocked] == [6] * 8
    computed = sum(span.end - span.start for span in spans if span.action.op in COMPUTE | UPDATE)
    assert 0 < record.busy_s == pytest.approx(computed)


@pytest.mark.parametrize(
    ("program", "bounds", "says"),
    [
        (one_f_one_b(3, 1, 2), Bounds(1, 1, 9), "1F1@0: 2 microbatches in flight, 1 simulated"),
        (pipedream(3, 4, 2), Bounds(2, 1, 9), "1STEP@1: 2 weight versions held, 1 simulated"),
    ],
)
def test_more_than_was_simulated_is_an_error(program, bounds, says):
    made, _ = engine([0, 1, 2], [1], bounds)
    with pytest.raises(AssertionError, match=says):
        made.train(Order(lower(program)[1]), Ones(), 2)


def test_an_evaluation_records_nothing_and_saves_nothing():
    made, tape = engine([0, 1], [1], Bounds(1, 1, 9))
    seen: list[int] = []
    forwards = parse_program("1RECV_F0 1F0@0 1RECV_F1 1F1@0")[0]
    weight = made.stages[1].module.get_parameter("0.weight").detach().clone()
    made.evaluate(Order(forwards, 2), Ones(), seen.append)
    assert seen == [1, 1]
    assert made.stats[1] == StageStats()
    last = made.stages[1]
    assert [tally.samples for tally in (last.take_trained(), last.take_evaluated())] == [0, 2]
    assert made.stages[1].in_flight == 0
    assert torch.equal(made.stages[1].module.get_parameter("0.weight"), weight)
    assert tape.seen == ["expect 0>1:0 0>1:1", "recv 0>1:0", "recv 0>1:1", "drain"]


def test_a_profiler_shows_the_actions():
    made, _ = engine([0, 1, 2], [1], Bounds(2, 1, 9))
    program = lower(one_f_one_b(3, 1, 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        made.train(Order(program[1]), Ones(), 2)
    assert {str(action) for action in program[1]} <= {event.name for event in profiler.events()}
