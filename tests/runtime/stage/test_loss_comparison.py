"""The loss of a batch beside that of its microbatches, in batches after the first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipetrain import Pipeline, TrainingStopped
from pipetrain.runtime.stage import loss_comparison as batch_loss
from pipetrain.runtime.stage.loss_comparison import BatchLoss
from tests.users.programs import mlp, sgd


def masked(outputs: Tensor, targets: Any) -> Tensor:
    labels, mask = targets
    return (cross_entropy(outputs, labels, reduction="none") * mask).sum() / mask.sum()


def data(begins: int, n: int = 10) -> list[Any]:
    """Batches of 8 whose masks differ from sample to sample from one of them on."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(n):
        x, y = torch.randn(8, 6, generator=generator).double(), torch.randint(5, (8,), generator=generator)
        mask = (
            torch.rand(8, generator=generator).double() + 0.5 if number >= begins else torch.ones(8).double()
        )
        made.append((x, (y, mask)))
    return made


def trained(loss: Any, batches: Any, schedule: str = "1f1b", **options: Any) -> list[Any]:
    losses: list[Any] = []
    with Pipeline(mlp(), loss, sgd, schedule, **{"microbatches": 2, "device": "cpu", **options}) as pipe:
        try:
            for number in pipe.train(batches):
                losses.append(number)
        except TrainingStopped as stop:
            losses.append(str(stop))
    return losses


@pytest.mark.parametrize(("begins", "ends"), [(1, 1), (2, 3), (4, 7)])
def test_a_mask_that_first_matters_later_is_seen_at_the_next_batch_that_is_compared(begins, ends):
    *losses, said = trained(masked, data(begins))
    assert len(losses) == ends
    assert said.startswith(f"the loss of the batch of update {ends} is 1.")
    assert "give weight=, a function of the targets that says what they count for" in said
    assert len(trained(masked, data(begins), weight=lambda targets: targets[1].sum())) == 10
    assert len(trained(masked, data(begins), microbatches=1)) == 10
    assert len(trained(masked, data(10))) == 10


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("gpipe", {"microbatches": 4, "recompute": "always"}),
        ("zb_h1", {"on_nan": "skip"}),
        ("pipedream", {"window": 10}),
        ("pipedream_2bw", {"window": 10}),
    ],
)
def test_every_order_compares(schedule, options):
    assert "of update 3 is" in trained(masked, data(2), schedule, **options)[-1]


def drawing(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs + torch.randn_like(outputs), targets)


class Counting:
    """Weighs itself by the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return cross_entropy(outputs, targets) * (1 + self.calls * 1e-7)


class Averaging(nn.Module):
    """Changes a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.scale.mul_(1 + 1e-7)
        return cross_entropy(outputs, targets) * self.scale


calls = 0


def counting_function() -> Callable[[Tensor, Tensor], Tensor]:
    global calls
    calls, own = 0, 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        global calls
        nonlocal own
        calls, own = calls + 1, own + 1
        return cross_entropy(outputs, targets) * (1 + (calls + own) * 1e-7)

    return loss


@pytest.mark.parametrize("make", [lambda: drawing, Counting, Averaging, counting_function])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_loss_is_compared_without_a_trace_and_not_where_a_second_call_is_another(
    make, schedule, monkeypatch
):
    """To compare it changes no number of the training."""
    batches = [(x, y) for x, (y, _) in data(10)]
    torch.manual_seed(0)
    seen = trained(make(), batches, schedule)
    monkeypatch.setattr(BatchLoss, "needs_outputs", lambda self: False)
    torch.manual_seed(0)
    assert seen == trained(make(), batches, schedule)
    assert len(seen) == 10


def test_large_outputs_are_not_kept(monkeypatch):
    monkeypatch.setattr(batch_loss, "MOST_KEPT", 4 * 5 - 1)
    assert len(trained(masked, data(2))) == 10


def test_what_is_next_to_nothing_beside_earlier_losses_may_be_rounding():
    """As of a loss of both signs."""
    compared: Any = BatchLoss(cast(Any, None))
    compared._look(0, [100.0, 100.0, 50.0, 50.0])
    compared._look(1, [1e-4, 1.01e-4, 0.0, 0.0])
    compared._look(3, [math.nan, 1.0, 0.0, 0.0])
    with pytest.raises(TrainingStopped, match="update 7 is 1, and that of its microbatches"):
        compared._look(7, [1.0, 1.01, 0.0, 0.0])
    compared._look(15, [1.0, 1.01, 1.0, 1.1])
    compared._look(31, [1.0, 1.01, 0.0, 0.0])  # is compared no more
