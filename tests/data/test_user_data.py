from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from pipetrain.data.splits import Draw, Split
from pipetrain.data.user_data import as_split
from pipetrain.errors import ConfigError
from pipetrain.model.specs import as_tuple

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
IDS = torch.tensor([4, 0, 3])


@dataclass
class Own(Dataset[Any]):
    """A data set of `length` items, made by a function of their number."""

    item: Callable[[int], Any]
    length: int = 6

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


def split_of(item: Callable[[int], Any], length: int = 6, **options: Any) -> Split:
    return as_split(Own(item, length), "data.train", **options)


def as_dicts(index: int) -> dict[str, Any]:
    return {"x": X[index].tolist(), "label": index}


@pytest.mark.parametrize(
    "made",
    [
        [X.numpy(), Y.numpy()],
        TensorDataset(X, Y),
        Own(lambda i: [X[i].numpy(), i]),
        Own(lambda i: (X[i].tolist(), np.int64(i))),
        [(X[i], i) for i in range(6)],
        Subset(TensorDataset(X.flip(0), Y.flip(0)), list(reversed(range(6)))),
        as_split((X, Y), "data.train"),
    ],
)
def test_every_way_in_gives_the_same_tensors(made):
    split = as_split(made, "data.train")
    for cut, length in ((split, 6), (split.first(5), 5), (split.first(9), 6)):
        assert len(cut) == length
        assert torch.equal(cut.inputs(IDS, None), X[IDS])
        assert torch.equal(cut.targets(IDS, Draw(0, 3)), Y[IDS])


@pytest.mark.parametrize("made", [((X, Y), (Y, X)), Own(lambda i: ((X[i], Y[i]), (Y[i], X[i])))])
def test_inputs_and_targets_may_be_tuples(made):
    split = as_split(made, "data.train")
    for value, expected in ((split.inputs(IDS, None), (X, Y)), (split.targets(IDS, None), (Y, X))):
        assert isinstance(value, tuple)
        assert all(torch.equal(got, whole[IDS]) for got, whole in zip(value, expected, strict=True))
    assert isinstance(split_of(lambda i: ((X[i],), i)).inputs(IDS, None), tuple)  # of one


@pytest.mark.parametrize("item", [(0.1, 0.1), {"x": 0.1}, [0.1, 0.1]])
def test_pythons_floats_have_the_runs_dtype_exactly(item):
    split = split_of(lambda i: (item, 0.1), dtype=torch.float64)
    for half in (split.inputs, split.targets):
        for tensor in as_tuple(half(torch.tensor([0, 1]), None)):
            assert torch.equal(tensor, torch.full(tensor.shape, 0.1, dtype=torch.float64))


@pytest.mark.parametrize("format_", ["dicts", None, "numpy"])
def test_columns_name_the_inputs_and_targets_of_dicts_and_of_hugging_face(format_):
    made: Any = Own(as_dicts)
    if format_ != "dicts":
        datasets = pytest.importorskip("datasets")
        made = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()}).with_format(format_)
    one = as_split(made, "data.train", {"inputs": "x", "targets": "label"})
    two = as_split(made, "data.train", {"inputs": ["x", "label"], "targets": {"y": "label"}})
    x, label = two.inputs(IDS, None)
    for found, whole in (
        *((one.inputs(IDS, None), X), (one.targets(IDS, None), Y)),
        *((x, X), (label, Y), (two.targets(IDS, None)["y"], Y)),
    ):
        assert torch.equal(found, whole[IDS])


# Random numbers


def noisy(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An item whose inputs and targets have the same random numbers, of all three generators."""
    noise = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])
    return noise, noise + index


def numbers(split: Split, ids: list[int], draw: Draw | None) -> list[list[float]]:
    x = split.inputs(torch.tensor(ids), draw)
    y = split.targets(torch.tensor(ids), draw)
    assert torch.equal(x + torch.tensor(ids)[:, None], y)  # as read by two ranks
    return x.tolist()


def test_random_numbers_depend_on_seed_epoch_and_sample_alone():
    """Pinned: a run that is resumed by another version must see the samples that it would have seen."""
    split = split_of(noisy)
    pinned = [0.927304744720459, 0.34737229347229004, 0.794016420841217]
    assert numbers(split, [2], Draw(7, 3)) == [pytest.approx(pinned)]
    together = numbers(split, [1, 2, 5], Draw(7, 3))
    sent = pickle.loads(pickle.dumps(split.first(6)))
    assert together == [numbers(sent, [i], Draw(7, 3))[0] for i in (5, 2, 1)][::-1]
    draws = (Draw(7, 3), Draw(7, 4), Draw(8, 3), None)
    drawn = [row for draw in draws for row in numbers(split, [1, 2, 5], draw)]
    for generator in range(3):
        assert len({row[generator] for row in drawn}) == 12


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


def fail(index: int) -> Any:
    random.random()
    if index == 4:
        raise KeyError("label")
    return X[index], index


def test_random_state_of_the_run_is_left_alone_also_by_an_item_that_fails():
    before = states()
    split_of(noisy, length=4).inputs(torch.tensor([1, 2]), Draw(0, 0))
    with pytest.raises(ConfigError):
        split_of(fail)
    assert states() == before


def test_the_checksum_is_of_type_length_and_at_most_64_samples():
    prints = [
        split_of(lambda i: (X[i], i)).checksum(),
        split_of(lambda i: (X[i], i), length=5).checksum(),
        split_of(lambda i: (X[i] + (i == 5), i)).checksum(),
        split_of(lambda i: (X[i], i + (i == 3))).checksum(),
        as_split([(X[i], i) for i in range(6)], "data.train").checksum(),
    ]
    assert len(set(prints)) == 5
    assert split_of(noisy).checksum() == split_of(noisy).checksum()
    read: set[int] = set()
    split = split_of(lambda i: (read.add(i) or X[0], i), length=10_000)
    read.clear()
    split.checksum()
    assert {0, 9_999} <= read
    assert len(read) == 64


# Refusals


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


OWN_GENERATOR = np.random.default_rng(0)
REFUSED: list[tuple[Any, Any, str]] = [
    (((X, X[:4]), Y), None, "holds tensors of several lengths: give a row of each for each sample"),
    ([], None, "data.train has no sample"),
    (TensorDataset(X, X, Y), None, "sample 0 must be (inputs, targets); got a Tensor: return two values"),
    (Stream(), None, "is a Stream, which has no length and no samples by number: give a map-style"),
    (
        Own(as_dicts),
        None,
        "got a dict of x, label: return two values from its __getitem__ or from data.collate, or name",
    ),
    (Own(lambda i: (X[i], "cat")), None, "the targets of sample 0 are a str, and must be a tensor"),
    (Own(lambda i: (X.flatten()[: i + 1], i)), None, "inputs of sample 1 are float32[2], and of sample 0"),
    (Own(lambda i: (X[i] + OWN_GENERATOR.random(), i)), None, "sample 0 differs from one reading to"),
    (Own(as_dicts), {"inputs": "x"}, "data.columns must name the columns of inputs and of targets; got i"),
    (Own(as_dicts), {"inputs": ["mask"], "targets": "x"}, "sample 0 cannot be read: KeyError: 'mask'"),
]


@pytest.mark.parametrize(("made", "columns", "says"), REFUSED)
def test_what_is_no_data_set_is_refused_in_one_sentence(made, columns, says):
    with pytest.raises(ConfigError) as error:
        as_split(made, "data.train", columns)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
