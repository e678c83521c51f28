"""Batches as loaders give them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, default_collate

from pipetrain import Pipeline, TrainingStopped
from pipetrain.schedule.asynchronous import AsynchronousV
from pipetrain.schedule.programs import pipedream, ssp
from tests.support.parity import evaluated, of_pairs, plainly
from tests.support.reference import DELAYS, Loop
from tests.users.programs import batch, mlp, sgd

pytestmark = pytest.mark.processes
CUT = 2  # the first layer of stage 1


def pipe_of(schedule: Any = "1f1b", model: Any = None, optimizer: Any = sgd, **options: Any) -> Pipeline:
    options = {"partition": [CUT], "device": "cpu", **options}
    return Pipeline(model or mlp(), cross_entropy, optimizer, schedule, **options)


def plain(batches: Iterable[tuple[Tensor, Tensor]], schedule: str = "1f1b") -> Any:
    """Return about the losses of one process, whose stage 0 reads the weights that the schedule lets it."""
    model = mlp()

    def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, weights, (x,)), y)

    loop = Loop(model, sgd(model.parameters()), loss_of)
    delay = DELAYS[schedule](2, 1)
    read = {n: (n, partial(delay, int(n.split(".")[0]) >= CUT)) for n, _ in model.named_parameters()}
    copied = [[(1.0, x.clone(), y.clone())] for x, y in batches]
    return pytest.approx([loss for (loss,) in loop.window(read, copied)], rel=1e-12)


class OneBuffer(IterableDataset[Any]):
    """Yields one tensor, filled again for each batch."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        buffer = batch()
        for seed in range(5):
            for mine, new in zip(buffer, batch(8, seed), strict=True):
                mine.copy_(new)
            yield buffer


class Counted(OneBuffer):
    def __len__(self) -> int:
        return 5


def with_one_buffer() -> tuple[float, list[list[float]]]:
    """Train a loader that has no length too."""
    losses, counted = [], Counted()
    with pipe_of() as pipe:
        loss = pipe.evaluate(counted)["loss"]
    endless = DataLoader(OneBuffer(), batch_size=None)
    for schedule, window, loader in (
        ("1f1b", 1, endless),
        ("1f1b", 2, counted),
        ("pipedream", None, counted),
    ):
        with pipe_of(schedule, microbatches=1) as pipe:
            losses.append(list(pipe.train(loader, window)))
    return loss, losses


def test_a_loader_may_fill_one_buffer_again_and_have_no_length(ranks):
    mean = sum(evaluated(mlp(), of_pairs(cross_entropy), OneBuffer())) / 5
    flushed, stashed = plain(OneBuffer()), plain(OneBuffer(), "pipedream")
    for loss, losses in ranks(with_one_buffer):
        assert loss == pytest.approx(mean, rel=1e-12)
        assert losses == [flushed, flushed, stashed]


class Centred(nn.Module):
    """Looks at the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


UNEVEN = [batch(size, size) for size in (8, 3, 1, 20, 2)]


def evaluate_centred() -> float:
    return pipe_of("gpipe", mlp(Centred()), microbatches=4).evaluate(UNEVEN)["loss"]


def test_an_evaluation_gives_the_model_the_loaders_batches(ranks):
    losses = evaluated(mlp(Centred()), of_pairs(cross_entropy), UNEVEN)
    mean = sum(len(y) * loss for (_, y), loss in zip(UNEVEN, losses, strict=True)) / 34
    assert ranks(evaluate_centred) == pytest.approx([mean] * 2, rel=1e-12)


# Batches that a sampler does not tell


class Pairs(Sampler[int]):
    """Says that it has fewer samples than it yields."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


VARYING = [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9]]
DATA: Dataset[Any] = TensorDataset(*batch(24, 0))


def without_some(samples: list[Any]) -> Any:
    return default_collate([(x, y) for x, y in samples if y != 2])


def doubled(samples: list[Any]) -> Any:
    return default_collate([*samples, *samples])


def loaders() -> list[DataLoader[Any]]:
    return [
        DataLoader(DATA, 8, collate_fn=without_some),
        DataLoader(DATA, 5, collate_fn=doubled),
        DataLoader(DATA, 4, sampler=Pairs()),
        DataLoader(DATA, batch_sampler=VARYING),
    ]


def trained(schedules: Sequence[Any], loaders: Sequence[Any], **options: Any) -> list[list[float]]:
    losses = []
    for schedule, loader in product(schedules, loaders):
        with pipe_of(schedule, microbatches=1, **options) as pipe:
            losses.append(list(pipe.train(loader)))
    return losses


def test_every_schedule_takes_the_batches_that_come(ranks):
    schedules = "1f1b", "pipedream"
    wanted = [plain(loader, schedule) for schedule, loader in product(schedules, loaders())]
    assert ranks(trained, schedules, loaders()) == [wanted] * 2


def test_the_window_follows_from_the_program_of_a_schedule(ranks):
    schedules = "1f1b", "pipedream", pipedream, "v_async", AsynchronousV(), "ssp", partial(ssp, buffer=3)
    six = [batch(8, seed) for seed in range(6)]
    flushed, named, given, made, one, ring, longer = ranks(
        partial(trained, partition="even"), schedules, [six]
    )[0]
    assert named == given == ring != flushed
    assert made == one != flushed
    assert longer not in (flushed, ring)


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


class Listed(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are read one by one."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.tensors[0][number], self.tensors[1][number]


def streams(batches: list[tuple[Tensor, Tensor]]) -> list[DataLoader[Any]]:
    """Return loaders that say their sizes: of tensors, of which all is known, and of samples."""
    data = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    return [DataLoader(kind(*data), batch_size=8) for kind in (TensorDataset, Listed)]


def passed(schedule: str, loader: Any, **options: Any) -> tuple[list[float], float, dict[str, Tensor]]:
    """Train a pass; return the losses, that of an evaluation, and the weights."""
    with pipe_of(schedule, normed(), decaying, **options) as pipe:
        losses = list(pipe.train(loader))
        if schedule == "1f1b":
            assert math.isnan(pipe.step(*with_nothing(0)[0]))
        assert pipe.updates == len(losses)
        return losses, pipe.evaluate(loader)["loss"], pipe.state_dict()


@pytest.mark.parametrize("empty", [(0, 3), (5,)])
def test_a_batch_in_which_nothing_counts_is_skipped(ranks, empty):
    model, loss = normed(), of_pairs(cross_entropy, 4)
    batches = with_nothing(*empty)
    counting = [(x, y) for x, y in batches if (y >= 0).any()]
    losses = plainly(model, decaying(model.parameters()), loss, counting)
    test_loss = sum(evaluated(model, loss, counting)) / len(counting)
    for loader in (batches, *streams(batches)):
        (*found, state), _ = ranks(passed, "1f1b", loader)
        assert found == [pytest.approx(one, rel=1e-12) for one in (losses, test_loss)]
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-12, atol=1e-12)
    (late, *_), _ = ranks(passed, "pipedream", batches)
    assert len(late) == len(counting)
    (*wanted, weights), _ = ranks(passed, "pipedream", streams(counting)[0])
    for loader in streams(batches)[: 2 if 0 in empty else 1]:  # the next test is of others
        (*found, state), _ = ranks(passed, "pipedream", loader)
        assert found == wanted
        assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())


def test_where_all_seemed_to_count_a_batch_of_nothing_is_named(ranks):
    sentence = "in the batch of microbatch 2, update 2, none of the targets counts: leave it out"
    _, loader = streams(with_nothing(2))
    with pytest.raises(TrainingStopped, match=sentence):
        passed("pipedream", loader, partition="even")
    (losses, *_), _ = ranks(partial(passed, on_nan="skip"), "pipedream", loader)
    assert [number for number, loss in enumerate(losses) if math.isnan(loss)] == [2]
