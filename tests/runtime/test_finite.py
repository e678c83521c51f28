"""A number that is not finite is named where it began: stage, microbatch and layer, over a whole pipeline."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipetrain.errors import TrainingStopped
from pipetrain.runtime.finite import StopOnNaN, witness
from tests.support.cases import Case, run_in_threads

MODEL = ("model._target_=tests.support.models.spoilt", "partition=[2,4]", "microbatches=4", "epochs=2")


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(("layer", "stage"), [(1, 0), (3, 1), (4, 2)])
def test_the_origin_is_named_wherever_it_is(layer, stage, gradient, schedule):
    words = (*MODEL, f"+model.layer={layer}", "+model.at=7", f"+model.gradient={gradient}", "window=2")
    with pytest.raises(TrainingStopped) as stop:
        run_in_threads(Case(schedule, 3, words))
    what = "gradient" if gradient else "loss" if stage == 2 else "activation"
    is_what = "nan" if what == "loss" else "not finite"
    assert str(stop.value).startswith(
        f"the {what} of microbatch 6 is {is_what} (first in layer layer{layer}) at stage {stage}, update "
    )


# On a GPU


def blame(mb: int):
    return lambda values: f"the loss of microbatch {mb} is {values[0]}"


class Event:
    """An event of a GPU: what it marks has not happened until somebody waits for it."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


def test_on_a_gpu_it_stops_when_the_loss_has_arrived():
    stage: Any = SimpleNamespace(index=1, rehearses=False, weights=SimpleNamespace(updates=2))
    stage.name, stage.module = str, nn.Linear(1, 1)
    observer, events = StopOnNaN(stage), [Event(), Event()]
    losses = [torch.tensor(1.0), torch.tensor(float("nan"))]
    observer._coming = deque(([(blame(mb), mb, 1)], losses[mb], events[mb]) for mb in range(2))
    observer.settle(wait=False)  # nothing has arrived
    events[1].happened = True
    observer.settle(wait=False)  # in order: the first has not
    stage.weights.updates = 3
    with pytest.raises(
        TrainingStopped, match="microbatch 1 is nan at stage 1, update 1: stopped 2 updates l"
    ):
        observer.settle(wait=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_witness_tells_of_one_number_anywhere(bad, size):
    fine = torch.randn(5)
    for at in range(size):
        spoilt = torch.randn(size)
        spoilt[at] = bad
        assert witness([fine, spoilt]).isfinite().tolist() == [True, False]


def test_finite_numbers_whose_sum_is_not_are_no_false_alarm():
    assert witness([torch.full((9,), 3e38), torch.full((9,), 60000.0, dtype=torch.half)]).isfinite().all()
