"""Precision and layout: what is planned is what runs; whole/test_skips.py trains by both."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipetrain.config.rate import LearningRate
from pipetrain.errors import ConfigError
from pipetrain.model.numerics import Numerics
from pipetrain.model.specs import Size, TensorSpec, ValueSpec, specs_of
from pipetrain.model.tracing.trace import trace
from pipetrain.plan.cost_estimate import estimate
from pipetrain.plan.cut import cut_layers
from pipetrain.runtime.stage.stage import Stage
from pipetrain.runtime.stage.stage_options import StageOptions
from tests.support.cases import Case, make_run
from tests.support.model_zoo import TwoInputs

pytestmark = pytest.mark.slow

NORM = "model._target_=tests.support.models.with_norm"


class Rows(nn.Module):
    """Wants its input's channels outermost."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


def wants_rows() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.ReLU(), Rows(), nn.Linear(64, 10))


ROWS = "model._target_=tests.model.test_numerics.wants_rows"


def test_data_that_crosses_a_cut_is_not_narrowed():
    """Neither is it in one process."""
    example = ValueSpec(tuple(TensorSpec(shape, torch.float32) for shape in ((3, 8, 8), (6,))), single=False)
    numerics, network = Numerics(autocast=True), trace(TwoInputs(), example)
    joined = cut_layers({Size(2): estimate(network, example.of(Size(2)), numerics)}, [1], example)
    sgd = partial(torch.optim.SGD, lr=0.1)
    stage = Stage(0, network.part(joined.slices[0]), sgd, LearningRate(), StageOptions(numerics=numerics))
    made = stage.forward(0, (torch.ones(2, 3, 8, 8), torch.full((2, 6), 1.001)), 0)
    assert [str(spec) for spec in specs_of(made)] == ["float32[2, 6]", "bfloat16[2, 4, 8, 8]"]
    assert specs_of(made) == joined.entering(1, Size(2))
    assert made[0].eq(1.001).all()


def test_auto_is_channels_last_in_float32_unless_a_layer_does_not_take_it():
    def chosen(*overrides: str) -> str:
        return make_run(Case("1f1b", 2, ("partition=[2]", *overrides))).plan.numerics.memory_format

    assert chosen(NORM, "dtype=float32") == "channels_last"
    assert chosen(NORM, "dtype=float64") == "contiguous"
    assert chosen(ROWS, "dtype=float32") == "contiguous"
    with pytest.raises(ConfigError, match=r"layer 2 \(2\) of the model cannot take"):
        chosen(ROWS, "memory_format=channels_last")
    with pytest.raises(ConfigError, match="precision=bf16 needs weights of float32"):
        chosen(NORM, "precision=bf16")


def test_weights_keep_their_values_and_lie_with_their_channels_innermost():
    layer = nn.Conv2d(3, 4, 3)
    before = layer.weight.detach().clone()
    Numerics(channels_last=True).arrange_weights(layer)
    assert torch.equal(layer.weight, before)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    assert not layer.weight.is_contiguous()
