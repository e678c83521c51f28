"""A number that is not finite is named where it began, over a whole pipeline."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipetrain.config.rate import LearningRate
from pipetrain.errors import TrainingStopped
from pipetrain.runtime.stage.nonfinite import SkipOnNaN, StopOnNaN, all_finite, not_finite
from pipetrain.runtime.stage.parameter_store import ParameterStore
from pipetrain.runtime.stage.weight_versions import Weights
from tests.support.cases import Case
from tests.support.thread_ranks import run_in_threads

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
    looks = [partial(observer._check_numbers, [mb], mb) for mb in range(2)]
    observer._arriving = deque(zip(looks, losses, events, strict=True))
    observer.check(wait=False)  # nothing has arrived
    events[1].happened = True
    observer.check(wait=False)  # in order: the first has not
    stage.weights.updates = 3
    with pytest.raises(TrainingStopped, match="microbatch 1 is nan at stage 1, update 1: stopped 2 updates"):
        observer.check(wait=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_number_anywhere_is_found_and_large_ones_are_no_false_alarm(dtype):
    fine = torch.full((7,), torch.finfo(dtype).max, dtype=dtype)  # whose sum is infinite
    empty = fine[:0]
    assert all_finite([fine, -fine])
    assert not not_finite([fine, -fine, empty])
    for at, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
        spoilt = fine.clone()
        spoilt[at] = bad
        assert not all_finite([fine, spoilt])
        assert not_finite([fine, spoilt, empty])


def test_one_reduction_tells_whatever_the_default_dtype_is():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = [not_finite([torch.tensor([1, bad], dtype=torch.float32)]).item() for bad in (2, math.nan)]
    finally:
        torch.set_default_dtype(before)
    assert found == [0, 1]


MODELS, SKIP = "model._target_=tests.support.", ("on_nan=skip", "epochs=2", "microbatches=4")
MOMENTUM, ADAMW = ("optim.momentum=0.9",), ("optim=adamw", "optim.lr=0.003")
OWN = ("optim._target_=torch.optim.RMSprop", "~optim.momentum")


@pytest.mark.parametrize(
    ("schedule", "ranks", "words"),
    [
        ("1f1b", 2, ("edge_case_models.strikes", "partition=[1]", *MOMENTUM, "clip_grad_norm=0.1")),
        ("pipedream", 3, ("edge_case_models.strikes", "partition=[2,3]", "window=3", *ADAMW)),
        ("pipedream_2bw", 2, ("edge_case_models.strikes", "partition=[2]", "window=3", *MOMENTUM, "ema=0.9")),
        ("1f1b", 2, ("edge_case_models.strikes", "partition=[1]", *OWN)),
        ("zb_h1", 3, ("edge_case_models.norms", "+model.struck=true", "batchnorm=batch", *MOMENTUM)),
        ("1f1b", 3, ("models.skipping_struck", "partition=[3,9]", *ADAMW)),
    ],
    ids=str,
)
def test_numbers_that_arrive_late_as_of_a_gpu_count_as_those_that_are_there_at_once(
    schedule, ranks, words, monkeypatch
):
    """To the last bit; an own optimizer is not stepped."""
    case = Case(schedule, ranks, (MODELS + words[0], *words[1:], *SKIP))
    state, epochs = run_in_threads(case)

    def arrives(self: SkipOnNaN, look: Any, numbers: torch.Tensor) -> None:
        self._arriving.append((look, numbers.clone(), Event()))

    monkeypatch.setattr(SkipOnNaN, "_read_later", arrives)
    again, others = run_in_threads(case)
    assert [name for name, tensor in state.items() if not torch.equal(tensor, again[name])] == []
    for one, other in zip(epochs, others, strict=True):
        assert (one.trained, one.evaluated) == (other.trained, other.evaluated)
        assert [of.skipped for of in one.stages.values()] == [of.skipped for of in other.stages.values()]
    assert sum(of.skipped for of in others[0].stages.values()) > 0


@pytest.mark.parametrize(("fused", "reads"), [(True, [True, False, False]), (False, [True, True, True])])
def test_a_fused_optimizer_of_torch_skips_by_itself_once_its_state_is_there(fused, reads):
    layer, read = torch.nn.Linear(3, 3), list[bool]()
    store = ParameterStore(layer, partial(torch.optim.AdamW, lr=0.1, fused=fused))
    weights = Weights(store, LearningRate(lambda update: 1.0))

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            read[-1] |= func is torch.ops.aten._local_scalar_dense.default and args[0] is skip
            return func(*args, **(kwargs or {}))

    before = [p.detach().clone() for p in layer.parameters()]
    for bad in (0, 1, 0):
        layer.weight.grad, layer.bias.grad = torch.full((3, 3), math.nan if bad else 1.0), torch.ones(3)
        skip = torch.tensor(float(bad))
        read.append(False)
        with Reads():
            weights.step(False, skip)
        moved = [not torch.equal(p, was) for p, was in zip(layer.parameters(), before, strict=True)]
        assert moved == [not bad] * 2
        before = [p.detach().clone() for p in layer.parameters()]
    assert read == reads
    assert weights.updates == 3
