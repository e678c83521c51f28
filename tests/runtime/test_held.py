"""What is measured of a stage's memory is what is alive, and what was predicted."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipetrain.network.chain import Chain
from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan.costs import Table
from pipetrain.plan.cut import cut_layers
from pipetrain.plan.estimate import estimate
from pipetrain.runtime.held import Meter
from pipetrain.runtime.microbatch import Saving
from pipetrain.runtime.stage import Stage
from pipetrain.schedule.actions import Action, Op
from pipetrain.schedule.memory import Held
from pipetrain.settings import Mode
from tests.support.live import Live

SHAPE = (4, 3, 8, 8)
STAGE = 1  # the second of three, so that its inputs need gradients


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 1),
        nn.Tanh(),
        nn.Conv2d(4, 2, 1),
    )


def made() -> tuple[Stage, ValueSpec, list]:
    torch.manual_seed(0)
    model = network()
    example = ValueSpec((TensorSpec(SHAPE[1:], torch.float32),))
    entry = example.of(SHAPE[0])
    layers = estimate(model.train(), entry)
    joined = cut_layers({SHAPE[0]: layers}, [1, 6], example)
    part = Chain(model).part(joined.slices[STAGE])
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return Stage(STAGE, part, sgd, lambda update: 1.0), entry, layers


def numbers() -> tuple[Tensor]:
    """What enters the stage, or comes back: nobody else holds it."""
    return (torch.rand(4, 4, 8, 8),)


def run(stage: Stage, meter: Meter, op: Op, mb: int, saving: Saving) -> Held:
    """Do an action as the engine does, and return what is held after it."""
    action = Action(STAGE, op, mb)
    does = {
        Op.F: lambda: stage.forward(mb, numbers(), 0, saving=saving),
        Op.R: lambda: stage.recompute(mb, 0),
        Op.B: lambda: stage.backward(mb, numbers(), 0),
        Op.I: lambda: stage.backward_input(mb, numbers(), 0),
        Op.W: lambda: stage.backward_weight(mb, 0),
    }
    with meter.during(action):
        does[op]()
    return meter.after(action, [])[STAGE]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_each_state_of_a_microbatch_holds_what_was_predicted(split, recomputed):
    stage, entry, layers = made()
    meter = Meter({STAGE: stage}, torch.device("cpu"))
    of_one = Table(layers, entry).sizes(1, 6, Mode.NEVER)
    saving, near = Saving(split, recomputed), pytest.approx
    states = [(Op.F, of_one.before_r if recomputed else of_one.saved)]
    states += [(Op.R, of_one.saved)] if recomputed else []
    states += [(Op.I, of_one.after_i), (Op.W, 0)] if split else [(Op.B, 0)]
    for mb in range(2):
        for op, expected in states:
            held = run(stage, meter, op, mb, saving)
            assert held["activations"] == near(expected, rel=0.01, abs=64), op
    assert held["gradients"] == held["weights"] - sum(b.nbytes for b in stage.module.buffers())
    assert (held["versions"], held["optimizer"], held["messages"]) == (0, 0, 0)
    stage.reduce()
    stage.step(keep=True)
    after = meter.after(Action(STAGE, Op.STEP, version=1), [])[STAGE]
    assert after["gradients"] == 0
    assert after["optimizer"] == after["versions"] == held["gradients"]


def test_nothing_that_stays_alive_is_missed():
    stage, _, _ = made()
    meter = Meter({STAGE: stage}, torch.device("cpu"))
    x = (torch.rand(4, 4, 8, 8),)
    action = Action(STAGE, Op.F, 0)
    with Live() as live, meter.during(action):
        outputs = stage.forward(0, x, 0)
        alive = live.now
    held = meter.after(action, [])[STAGE]["activations"]
    assert outputs[0].nbytes < alive
    assert held - x[0].nbytes == pytest.approx(
        alive, rel=0.02
    )  # and the check's sum, the norm's new statistics


def test_measuring_keeps_nothing_alive():
    """A node that saves its own output would, if it held the tensor itself, hold itself."""
    stage, _, _ = made()
    meter = Meter({STAGE: stage}, torch.device("cpu"))
    x = torch.rand(3, requires_grad=True)
    with meter.during(Action(STAGE, Op.F, 0)):
        y = torch.exp(x)
    storage = weakref.ref(y.untyped_storage())
    del y
    assert storage() is None


def test_a_message_counts_at_its_stage_unless_the_stage_holds_it_anyway():
    stage, _, _ = made()
    meter = Meter({STAGE: stage}, torch.device("cpu"))
    own = torch.rand(10)
    messages = [((0, STAGE), own), ((0, STAGE), own[:5])]
    assert meter.after(Action(STAGE, Op.RECV_F, 0), messages)[STAGE]["messages"] == 40
    outputs: tuple[Tensor, ...] = stage.forward(0, (torch.rand(4, 4, 8, 8),), 0)
    assert meter.after(Action(STAGE, Op.F, 0), [((STAGE, 2), outputs[0])])[STAGE]["messages"] == 0
    assert meter.close().stages[STAGE]["messages"] == 40  # the most
