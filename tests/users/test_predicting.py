"""The outputs of a model for new data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pipetrain import Pipeline
from tests.support.process_ranks import Ranks
from tests.users.programs import batch, ended, mlp, sgd

pytestmark = pytest.mark.processes


def predicted(schedule: str) -> Any:
    x, y = batch(70)
    net = mlp(nn.BatchNorm1d(8), nn.Dropout(0.5))
    pipe = Pipeline(net, functional.cross_entropy, sgd, schedule=schedule, microbatches=2)
    list(pipe.train([(x[:8], y[:8]), (x[8:16], y[8:16])]))
    loaders = [
        DataLoader(TensorDataset(x), batch_size=7),
        DataLoader(TensorDataset(x, y), batch_size=7),
        list(torch.split(x, 7)),
    ]
    torch.set_default_dtype(torch.float64)
    found = [list(pipe.predict(loader)) for loader in loaders]
    torch.set_default_dtype(torch.float32)
    assert net.training
    whole = pipe.collect()
    pipe.close()
    if pipe.rank:
        return [outputs == [None] * 10 for outputs in found]
    whole.eval()
    with torch.no_grad():
        wanted = whole(x)
    return [float((torch.cat(outputs) - wanted).abs().max()) for outputs in found]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_outputs_are_those_of_one_process_in_order_on_rank_0(ranks: Ranks, schedule: str) -> None:
    first, second = ranks(predicted, schedule)
    assert max(first) < 1e-12
    assert second == [True] * 3


class Two(nn.Module):
    """Takes two tensors, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.outer = nn.Linear(8, 5)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.inner(a) + self.inner(b))
        return {"scores": self.outer(h), "hidden": h}


def named() -> Any:
    torch.manual_seed(0)
    net, (x, y) = Two().double(), batch()

    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs["scores"], targets)

    labelled = {"a": x, "b": x + 1, "label": y}
    pipe = Pipeline(net, loss, sgd, microbatches=2, targets="label", sample=labelled)
    torch.manual_seed(0)
    with torch.no_grad():
        wanted = Two().double()(x, x + 1)
    found = list(pipe.predict([{"a": x, "b": x + 1}, labelled]))
    pipe.close()
    if pipe.rank:
        return found
    return [{name: float((one[name] - wanted[name]).abs().max()) for name in wanted} for one in found]


def test_a_dict_goes_in_and_comes_out(ranks: Ranks) -> None:
    first, second = ranks(named)
    assert [sorted(one) for one in first] == [["hidden", "scores"]] * 2
    assert max(max(one.values()) for one in first) < 1e-12
    assert second == [None, None]


def refused() -> list[str]:
    x, y = batch()
    with Pipeline(mlp(), functional.cross_entropy, sgd, microbatches=2) as pipe:
        unplanned = ended(lambda: list(pipe.predict([x])))
        pipe.step(x, y)
        return [unplanned, ended(lambda: list(pipe.predict([x[:, :3]])))]


def test_without_a_plan_or_with_other_inputs_it_is_refused_in_a_sentence(ranks: Ranks) -> None:
    other = "batch 0 has inputs float64[3] a sample, and those of the first batch were float64[6]"
    for unplanned, differing in ranks(refused):
        assert unplanned.endswith(
            ": the plan is made with the first batch: give Pipeline sample=(inputs, targets)"
        )
        assert other in differing
