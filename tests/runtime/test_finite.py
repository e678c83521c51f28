"""A number that is not finite is named where it began, over a whole pipeline."""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipetrain.errors import TrainingStopped
from pipetrain.runtime.finite import StopOnNaN, all_finite, not_finite
from tests.support.cases import Case, run_in_threads

MODEL = ("model._target_=tests.support.models.spoilt", "partition=[2,4]", "microbatches=4", "epochs=2")
MODEL += ("window=2", "+model.at=7")


@pytest.mark.parametrize(
    ("schedule", "layer", "gradient", "says"),
    [
        ("1f1b", 1, False, r"activation of microbatch 6 is not finite \(first in layer layer1\) at stage 0,"),
        ("pipedream", 4, False, r"loss of microbatch 6 is nan \(first in layer layer4\) at stage 2, update"),
        ("pipedream", 3, True, "gradient of microbatch 6 is not finite at stage 1, update"),
        # It goes to no other stage: the batch's sum shows it, also where W makes it.
        ("1f1b", 1, True, r"gradient of layer1\.0\.bias is not finite at stage 0, update"),
        ("zb_h1", 1, True, r"gradient of layer1\.0\.bias is not finite at stage 0, update"),
    ],
)
def test_the_stage_is_named_and_of_a_forward_the_layer(schedule, layer, gradient, says):
    words = (*MODEL, f"+model.layer={layer}", f"+model.gradient={gradient}")
    with pytest.raises(TrainingStopped, match=f"^the {says}"):
        run_in_threads(Case(schedule, 3, words))


class Event:
    """An event of a GPU: what it marks has not happened until somebody waits for it."""

    happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


def test_on_a_gpu_it_stops_when_the_loss_has_arrived():
    stage: Any = SimpleNamespace(index=1, rehearses=False, weights=SimpleNamespace(updates=2))
    observer, events = StopOnNaN(stage), [Event(), Event()]
    losses = [torch.tensor([1.0, 0.0]), torch.tensor([float("nan"), 0.0])]  # and whether the gradient is bad
    observer._coming = deque(([mb], mb, losses[mb], events[mb]) for mb in range(2))
    observer.settle(wait=False)  # nothing has arrived
    events[1].happened = True
    observer.settle(wait=False)  # in order: the first has not
    stage.weights.updates = 3
    with pytest.raises(TrainingStopped, match="microbatch 1 is nan at stage 1, update 1: stopped 2 updates"):
        observer.settle(wait=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_number_anywhere_is_found_and_large_ones_are_no_false_alarm(dtype):
    fine = torch.full((7,), torch.finfo(dtype).max, dtype=dtype)  # whose sum is infinite
    assert all_finite([fine, -fine])
    for at, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
        spoilt = fine.clone()
        spoilt[at] = bad
        assert not all_finite([fine, spoilt])


def test_one_reduction_tells_whatever_the_default_dtype_is():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = [not_finite([torch.tensor([1, bad], dtype=torch.float32)]).item() for bad in (2, math.nan)]
    finally:
        torch.set_default_dtype(before)
    assert found == [0, 1]
