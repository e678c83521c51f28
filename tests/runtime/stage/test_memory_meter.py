"""What is measured of a stage's memory is what is alive, and what was predicted."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipetrain.config.rate import LearningRate
from pipetrain.config.settings import Mode
from pipetrain.correction import Correction, GapAware
from pipetrain.model.chain import Chain
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.plan.cost_estimate import estimate
from pipetrain.plan.costs import Table, by_work
from pipetrain.plan.cut import cut_layers
from pipetrain.runtime.stage.memory_meter import Meter
from pipetrain.runtime.stage.microbatch import Saving
from pipetrain.runtime.stage.stage import Stage
from pipetrain.runtime.stage.stage_options import StageOptions
from pipetrain.schedule.actions import Action, Op
from pipetrain.schedule.memory import Items

EXAMPLE = ValueSpec((TensorSpec((3, 8, 8), torch.float32),))


STAGE = 1  # the second of three, so that its inputs need gradients


class Live(TorchDispatchMode):
    """The bytes of the tensors with data that were made within and are alive: `now`, and at their `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._met: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._meet((args, kwargs), made=False)
        result = func(*args, **(kwargs or {}))
        self._meet(result, made=True)
        self.peak = max(self.peak, self.now)
        return result

    def _meet(self, values: Any, made: bool) -> None:
        for tensor in tree_leaves(values):
            if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor) or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            if id(storage) not in self._met:
                size = storage.nbytes() if made else 0
                self.now += size
                self._met[id(storage)] = weakref.ref(storage, partial(self._forget, id(storage), size))

    def _forget(self, key: int, size: int, _: object) -> None:
        self.now -= size
        del self._met[key]


def measured(correction: Correction | None = None) -> tuple[Stage, Meter, Items]:
    """A stage, what measures it, and what it was predicted to hold."""
    torch.manual_seed(0)
    conv, act = partial(nn.Conv2d, kernel_size=1), nn.ReLU(inplace=True)
    model = nn.Sequential(
        conv(3, 4), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), act, conv(4, 4), nn.Tanh(), conv(4, 2)
    )
    layers = estimate(model.train(), EXAMPLE.of(Size(4)))
    part = Chain(model).part(cut_layers({Size(4): layers}, [1, 6], EXAMPLE).slices[STAGE])
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    stage = Stage(STAGE, part, sgd, LearningRate(), StageOptions(correction=correction))
    meter = Meter({STAGE: stage}, torch.device("cpu"))
    table = Table(layers, EXAMPLE.of(Size(4)), by_work(layers, 1), correction=correction or Correction())
    return stage, meter, table.sizes(1, 6, Mode.NEVER)


def numbers() -> tuple[Tensor]:
    """What enters the stage, or comes back: nobody else holds it."""
    return (torch.rand(4, 4, 8, 8),)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_each_state_of_a_microbatch_holds_what_was_predicted(split, recomputed):
    stage, meter, one = measured()
    states = {Op.F: one.before_r if recomputed else one.saved}
    states |= {Op.R: one.saved} if recomputed else {}
    states |= {Op.I: one.after_i, Op.W: 0} if split else {Op.B: 0}
    held = one.weights
    for mb in range(2):
        does = {
            Op.F: lambda mb: stage.forward(mb, numbers(), 0, saving=Saving(split, recomputed)),
            Op.R: lambda mb: stage.recompute(mb, 0),
            Op.B: lambda mb: stage.backward(mb, numbers(), 0),
            Op.I: lambda mb: stage.backward_input(mb, numbers(), 0),
            Op.W: lambda mb: stage.backward_weight(mb, 0),
        }
        for op, expected in states.items():
            with meter.during(Action(STAGE, op, mb)):
                does[op](mb)
            held += one.gradients * (mb == 0 and op in (Op.B, Op.W))
            assert meter.after([])[STAGE] - held == pytest.approx(expected, rel=0.01, abs=128), op
    stage.reduce()
    stage.step(keep=True)
    assert meter.after([])[STAGE] == one.weights + one.versions + one.gradients  # as much momentum


def test_what_a_correction_keeps_is_held_and_the_gradients_of_two_versions():
    stage, meter, one = measured(GapAware())
    stage.forward(0, numbers(), 0)
    stage.backward(0, numbers(), 0)
    stage.reduce()
    stage.step(keep=True)
    momentum = one.gradients
    assert meter.after([])[STAGE] == one.weights + one.versions + one.optimizer + momentum
    for mb in (1, 2):
        stage.forward(mb, numbers(), mb - 1)
        stage.backward(mb, numbers(), mb - 1)
    gradients = one.gradients + one.apart
    assert meter.after([])[STAGE] == one.weights + one.versions + one.optimizer + momentum + gradients
    stage.reduce()
    assert meter.after([])[STAGE] == one.weights + one.versions + one.optimizer + momentum + one.gradients


def test_what_is_alive_is_counted_once_and_none_kept_alive():
    stage, meter, one = measured()
    x, own = numbers(), torch.rand(10)
    assert meter.after([((0, STAGE), own), ((0, STAGE), own[:5])])[STAGE] == one.weights + 40
    with Live() as live, meter.during(Action(STAGE, Op.F, 0)):
        outputs = stage.forward(0, x, 0)
        alive = live.now
    held = meter.after([((STAGE, 2), outputs[0])])[STAGE]  # a message that the stage holds anyway
    # Beside the check's sum and the norm's new statistics:
    assert outputs[0].nbytes < alive == pytest.approx(held - one.weights - x[0].nbytes, rel=0.02)
    del outputs, x
    stage.backward(0, numbers(), 0)
    assert meter.after([])[STAGE] == one.weights + one.gradients
    assert meter.close().stages == {STAGE: held}  # the most


def test_a_node_that_saves_its_own_output_does_not_keep_itself_alive():
    _, meter, _ = measured()
    with meter.during(Action(STAGE, Op.F, 0)):
        storage = weakref.ref(torch.exp(torch.rand(3, requires_grad=True)).untyped_storage())
    assert storage() is None
