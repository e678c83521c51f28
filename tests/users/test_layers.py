"""What layers and models of users return and compute."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pipetrain import ConfigError, Pipeline, TrainingStopped
from tests.users import programs

linear = partial(nn.Linear, 4, 4, dtype=torch.float64)


class Calls(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


class Traced(nn.Module):
    """A model that is traced, and calls a function between two layers.

    In training alone it runs its second layer, and changes a buffer that an evaluation reads in the last one.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.last = linear(), linear(), linear()
        self.register_buffer("centre", torch.zeros(4, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        h = self.function(self.first(x))
        if self.training:
            self.centre.mul_(0.5).add_(h.detach().mean(0))
            h = self.second(h)
        y = self.last(h.tanh())
        return y if self.training else y - self.centre * 2


def apart(
    make: Callable[[], nn.Module], loss: Callable[..., Tensor] = mse_loss, *shape: int, **options: Any
) -> float:
    torch.manual_seed(0)
    of = partial(torch.randn, dtype=torch.float64)
    return programs.apart(make(), loss, [(of(8, *shape, 4), of(8, 4))], **options)


# An nn.Sequential


def recurrent() -> nn.Module:
    """Layers return (output, (hidden, cell)), a dict, and a list with None."""
    return nn.Sequential(
        linear(),
        nn.LSTM(4, 4, batch_first=True, dtype=torch.float64),
        Calls(lambda made: {"output": made[0], "states": (made[1][0][0], None)}),
        Calls(lambda made: [made["output"][:, -1] * made["states"][0], made["states"][1]]),
        Calls(lambda made: made[0]),
        linear(),
    )


def of_the_sequence(outputs: Any, targets: Tensor) -> Tensor:
    sequence, (_, _) = outputs
    return mse_loss(sequence[:, -1], targets)


def ends_in_one() -> nn.Module:
    return recurrent()[:2]


def test_layers_and_a_model_return_tuples_in_tuples_and_dicts(ranks):
    for cut in (2, 3, 4):
        assert max(ranks(partial(apart, partition=[cut]), recurrent, mse_loss, 3)) < 1e-12
    assert max(ranks(partial(apart, schedule="zb_h1"), ends_in_one, of_the_sequence, 3)) < 1e-12


class Adapted(nn.Module):
    """A frozen layer with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down, self.up = (nn.Parameter(torch.randn(*s, dtype=torch.float64)) for s in ((2, 4), (4, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def adapted(alone: bool) -> nn.Module:
    """Five layers, with adapters beside all or beside the last one alone."""
    layers = [linear().requires_grad_(False) if alone and n < 4 else Adapted() for n in range(5)]
    return nn.Sequential(*(one for layer in layers for one in (layer, nn.Tanh())))


def test_adapters_train_on_all_stages_and_on_the_last_alone(ranks):
    """Zero bubble schedules too, whose split backwards start from what needs a gradient."""
    for schedule in ("1f1b", "zb_h1", "zbv"):
        for alone in (False, True):
            assert max(ranks(partial(apart, schedule=schedule), partial(adapted, alone))) < 1e-12


def refused(*models: Callable[[], nn.Module]) -> list[str]:
    return [programs.ended(partial(apart, make)) for make in models]


def sized() -> nn.Module:
    return nn.Sequential(linear(), Calls(lambda x: (x, len(x))), Calls(lambda both: both[0]))


def test_a_layer_that_returns_a_number_too_is_refused(ranks):
    for (said,) in ranks(refused, sized):
        assert "layer 1 (1) of the model" in said
        assert "it returns a int, and a layer before the last must return a tensor, or tuples" in said


class Packed(nn.Module):
    """Packs words by their lengths, which it hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4, dtype=torch.float64)
        self.layer = nn.LSTM(4, 4, batch_first=True, dtype=torch.float64)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        words, lengths = both
        x = self.words(words) if words.dim() < 3 else words
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0], lengths


LENGTHS = torch.tensor([4, 1, 3, 2, 2, 4, 1, 1])
TWO_STAGES = partial(Pipeline, optimizer=programs.sgd, schedule="zbv", device="cpu")  # on one rank


def test_lengths_of_the_first_batch_are_planned_with_and_a_trace_of_them_is_refused_by_its_cause():
    model = nn.Sequential(Packed(), Packed(), Calls(lambda both: both[0].sum(1)))
    words, targets = torch.arange(32).reshape(8, 4) % 5, torch.ones(8, 4, dtype=torch.float64)
    for pieces in (1, 2):
        wanted = mse_loss(model((words, LENGTHS)), targets).item()
        with TWO_STAGES(model, mse_loss, partition=[1], microbatches=pieces) as pipe:
            assert pipe.step((words, LENGTHS), targets) == pytest.approx(wanted)

    class Whole(Packed):
        def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
            return super().forward((words, lengths))[0]

    with pytest.raises(
        ConfigError, match=r"packs sequences at .*, whose sizes depend on the data: leave them"
    ):
        TWO_STAGES(Whole(), mse_loss, sample=((words, LENGTHS), targets))


class Features(nn.Module):
    """Returns what its first layer makes too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.layers[0](x)
        return {"features": features, "scores": self.layers[2](self.layers[1](features).tanh())}


def with_features() -> nn.Module:
    return nn.Sequential(linear(), Calls(lambda x: (x, x.tanh())), Calls(lambda both: (both[0], both[1] * 2)))


@pytest.mark.parametrize("make", [Features, with_features])
def test_an_output_that_the_loss_does_not_use_crosses_a_cut_without_a_gradient(make):
    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return mse_loss([*(outputs.values() if isinstance(outputs, dict) else outputs)][-1], targets)

    for schedule in ("interleaved_1f1b", "zbv"):
        assert apart(make, loss, schedule=schedule, partition=[2]) < 1e-12


@pytest.mark.parametrize("uses", [False, True])
def test_a_loss_that_later_uses_other_outputs_is_named(uses):
    used = [uses, not uses]

    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        features = outputs["features"].square().mean() if used[0] else 0.0
        return mse_loss(outputs["scores"], targets) + features

    x = torch.ones(8, 4, dtype=torch.float64)
    with TWO_STAGES(Features(), loss, partition=[2]) as pipe:
        pipe.step(x, x)
        used.reverse()
        found = f"{'no' if uses else 'a'} gradient reaches input"
        with pytest.raises(
            TrainingStopped, match=rf"{found}.* made for the first batch.* outputs the loss uses"
        ):
            pipe.step(x, x)


# A model that is traced


def sized_by_the_data(h: Tensor) -> Tensor:
    """Selects, writes what is selected, counts, and asks a distribution, which looks at its arguments."""
    h = h * h[h > 0].mean()
    h = h.clone()
    h[h > 0] = 0.5 * h[h > 0]
    h = h * (h > 0).nonzero().double().mean() + torch.unique((h > 0).long()).double().sum()
    return h * torch.distributions.Normal(h, torch.ones_like(h)).log_prob(h.detach() + 1)


def test_tensors_whose_size_depends_on_the_data_and_what_only_training_runs(ranks):
    whole = partial(apart, microbatches=1)  # by its mean over the batch
    assert max(ranks(whole, partial(Traced, sized_by_the_data))) < 1e-10


def mapped(h: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * row.sum())(h)


def differentiated(h: Tensor) -> Tensor:
    return torch.func.grad(lambda z: (z**2).sum())(h)


def distances(h: Tensor) -> Tensor:
    return torch.cdist(h, h) @ h


def by_size(h: Tensor) -> Tensor:
    return h * 2 if h.shape[0] > 5 else h


HERE = rf"{Path(__file__).name}:\d+"
CANNOT = {
    mapped: f"uses torch.vmap or torch.func at {HERE}, which cannot be cut: write it for the whole",
    differentiated: f"uses torch.vmap or torch.func at {HERE}|AssertionError: .*; make",  # before torch 2.13
    distances: "depends on the samples of a microbatch where it has more than 25.* compute_mode=",
    by_size: "depends on the samples of a microbatch where it has more than 5, which a trace",
}


def test_code_that_no_trace_holds_is_refused_with_its_place(ranks):
    for sentences in ranks(refused, *(partial(Traced, function) for function in CANNOT)):
        for said, wanted in zip(sentences, CANNOT.values(), strict=True):
            assert re.search(wanted, said), said
