"""Batches as loaders give them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, default_collate

from pipetrain import Pipeline, TrainingStopped
from pipetrain.schedule.asynchronous import AsynchronousV
from pipetrain.schedule.programs import pipedream
from tests.support.plain import evaluated, of_pairs, plainly
from tests.support.reference import DELAYS, Loop, by_stage

pytestmark = pytest.mark.processes
CUT = 2  # the first layer of stage 1


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def pipe_of(schedule: Any = "1f1b", model: nn.Module | None = None, **options: Any) -> Pipeline:
    options = {"partition": [CUT], "device": "cpu", **options}
    return Pipeline(model or mlp(), functional.cross_entropy, sgd, schedule, **options)


def plain(batches: Iterable[tuple[Tensor, Tensor]], stashing: bool = False) -> list[float]:
    """Return the losses of one process; with `stashing`, stage 0 reads weights of one update before."""
    model, delay = mlp(), DELAYS["pipedream" if stashing else "1f1b"](2, 1)

    def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, weights, (x,)), y)

    loop = Loop(model, sgd(model.parameters()), loss_of)
    read = by_stage(dict(model.named_parameters()), [CUT], delay)
    return [loss for (loss,) in loop.window(read, [[(1.0, x, y)] for x, y in copied(batches)])]


def copied(batches: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(x.clone(), y.clone()) for x, y in batches]


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator).double(), torch.randint(5, (size,), generator=generator)


# Rows of a loader


class OneBuffer:
    """Yields one tensor, filled again for each batch."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.x, self.y = batch(8, 0)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for seed in range(self.batches):
            for mine, new in zip((self.x, self.y), batch(8, seed), strict=True):
                mine.copy_(new)
            yield self.x, self.y


def evaluate_one_buffer() -> float:
    return pipe_of().evaluate(OneBuffer(3))["loss"]


def train_one_buffer(schedule: str, window: int | None) -> list[float]:
    return list(pipe_of(schedule, microbatches=1).train(OneBuffer(5), window))


def test_a_loader_may_fill_one_buffer_again(ranks):
    losses = evaluated(mlp(), of_pairs(functional.cross_entropy), OneBuffer(3))
    assert ranks(evaluate_one_buffer) == pytest.approx([sum(losses) / 3] * 2, rel=1e-12)
    for schedule, window in (("1f1b", 1), ("1f1b", 2), ("pipedream", None)):
        wanted = plain(OneBuffer(5), schedule == "pipedream")
        for losses in ranks(train_one_buffer, schedule, window):
            assert losses == pytest.approx(wanted, rel=1e-12)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from OneBuffer(3)


def test_a_dataloader_may_have_no_length():
    with pipe_of(partition="even") as pipe:
        losses = list(pipe.train(DataLoader(Stream(), batch_size=None)))
    assert losses == pytest.approx(plain(OneBuffer(3)), rel=1e-12)


# Batches of an evaluation


class Centred(nn.Module):
    """Looks at the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def centred() -> nn.Sequential:
    model = mlp()
    model.insert(4, Centred())
    return model


SIZES = [8, 3, 1, 20, 2]


def evaluate_centred() -> float:
    pipe = pipe_of("gpipe", centred(), microbatches=4)
    return pipe.evaluate([batch(size, size) for size in SIZES])["loss"]


def test_an_evaluation_gives_the_model_the_loaders_batches(ranks):
    with torch.no_grad():
        model = centred()
        total = sum(len(y) * functional.cross_entropy(model(x), y) for x, y in (batch(n, n) for n in SIZES))
    assert ranks(evaluate_centred) == pytest.approx([float(total) / sum(SIZES)] * 2, rel=1e-12)


# Batches that a sampler does not tell


class Pairs(Sampler[int]):
    """Says that it has fewer samples than it yields."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


class Varying(Sampler[list[int]]):
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3], [4, 5, 6, 7], [8, 9]])


DATA: Dataset[Any] = TensorDataset(*batch(24, 0))


def without_some(samples: list[Any]) -> Any:
    return default_collate([(x, y) for x, y in samples if y != 2])


def doubled(samples: list[Any]) -> Any:
    return default_collate([*samples, *samples])


LOADERS: dict[str, dict[str, Any]] = {
    "fewer samples": {"batch_size": 8, "collate_fn": without_some},
    "more samples": {"batch_size": 5, "collate_fn": doubled},
    "a sampler": {"batch_size": 4, "sampler": Pairs()},
    "a batch sampler": {"batch_sampler": Varying()},
}


def train_loader(name: str, schedule: str) -> list[float]:
    return list(pipe_of(schedule, microbatches=1).train(DataLoader(DATA, **LOADERS[name])))


@pytest.mark.parametrize("name", LOADERS)
def test_every_schedule_takes_the_batches_that_come(ranks, name):
    batches = list(DataLoader(DATA, **LOADERS[name]))
    for schedule in ("1f1b", "pipedream"):
        wanted = plain(batches, schedule == "pipedream")
        for losses in ranks(train_loader, name, schedule):
            assert losses == pytest.approx(wanted, rel=1e-12)


# Windows of schedules that a program gives


def train_schedules(*schedules: Any) -> list[list[float]]:
    losses = []
    for schedule in schedules:
        with pipe_of(schedule, microbatches=1, partition="even") as pipe:
            losses.append(list(pipe.train([batch(8, seed) for seed in range(6)])))
    return losses


def test_the_window_follows_from_the_program_of_a_schedule(ranks):
    flushed, named, given, made, one = ranks(
        train_schedules, "1f1b", "pipedream", pipedream, "v_async", AsynchronousV()
    )[0]
    assert flushed == pytest.approx(plain([batch(8, seed) for seed in range(6)]), rel=1e-12)
    assert named == given != flushed
    assert made == one != flushed


# Batches in which nothing counts


def normed() -> nn.Sequential:
    model = mlp()
    model.insert(1, nn.BatchNorm1d(8).double())
    return model


def decaying(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1)


def with_nothing(*empty: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of which some have ignored labels alone."""
    batches = [batch(8, seed) for seed in range(6)]
    for number in empty:
        batches[number][1][:] = -100
    return batches


def train_with_nothing(
    schedule: str, *empty: int
) -> tuple[list[float], float, dict[str, float], list[float]]:
    pipe = Pipeline(normed(), functional.cross_entropy, decaying, schedule, microbatches=1, device="cpu")
    batches = with_nothing(*empty)
    losses = list(pipe.train(batches))
    assert pipe.updates == len(losses)
    stepped = pipe.step(*batches[empty[0]]) if schedule == "1f1b" else math.nan
    assert pipe.updates == len(losses)
    return (
        losses,
        stepped,
        pipe.evaluate(batches),
        pipe.state_dict().get("1.running_mean", torch.empty(0)).tolist(),
    )


@pytest.mark.parametrize("empty", [(0, 3), (5,)])
def test_a_batch_in_which_nothing_counts_is_skipped(ranks, empty):
    model, loss = normed(), of_pairs(functional.cross_entropy)
    counting = [(x, y) for x, y in with_nothing(*empty) if (y >= 0).any()]
    losses = plainly(model, decaying(model.parameters()), loss, counting)
    mean_loss = sum(evaluated(model, loss, counting)) / len(counting)
    (found, stepped, test, mean), _ = ranks(train_with_nothing, "1f1b", *empty)
    assert found == pytest.approx(losses, rel=1e-12)
    assert math.isnan(stepped)
    assert test["loss"] == pytest.approx(mean_loss, rel=1e-12)
    assert mean == pytest.approx(model[1].running_mean.tolist(), rel=1e-12)
    late, *_ = ranks(train_with_nothing, "pipedream", *empty)[0]
    assert len(late) == len(losses)


class Listed(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are read one by one."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.tensors[0][number], self.tensors[1][number]


def stream(
    schedule: str, kind: Any, batches: list[tuple[Tensor, Tensor]], cut: Any = (3,), on_nan: str = "stop"
) -> list[float]:
    """Train a pass over a DataLoader that says its sizes; return the losses, the updates, and the weights."""
    data = kind(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    pipe = pipe_of(schedule, normed(), partition=cut, on_nan=on_nan)
    losses = list(pipe.train(DataLoader(data, batch_size=8)))
    weights = pipe.state_dict().values()
    return [*losses, pipe.updates, *(float(t.double().abs().sum()) for t in weights)]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "pipedream_2bw"])
def test_a_streamed_pass_is_that_of_the_batches_that_count(ranks, schedule):
    batches, counting = with_nothing(0, 3), [b for n, b in enumerate(with_nothing()) if n not in (0, 3)]
    wanted = ranks(stream, schedule, TensorDataset, counting)[0]
    assert wanted[4] == 4
    assert ranks(stream, schedule, TensorDataset, batches)[0] == wanted
    assert ranks(stream, schedule, Listed, batches)[0] == wanted


def test_where_all_seemed_to_count_a_batch_of_nothing_is_named(ranks):
    sentence = "in the batch of microbatch 2, update 2, none of the targets counts: leave it out"
    with pytest.raises(TrainingStopped, match=sentence):
        stream("pipedream", Listed, with_nothing(2), "even")
    losses, _ = ranks(stream, "pipedream", Listed, with_nothing(2), (3,), "skip")
    assert [number for number, loss in enumerate(losses) if math.isnan(loss)] == [2]
