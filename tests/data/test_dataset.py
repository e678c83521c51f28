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

from pipetrain.data.dataset import as_split
from pipetrain.data.sets import Draw, Split
from pipetrain.errors import ConfigError
from pipetrain.network.values import as_tuple

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


@pytest.mark.parametrize("item", [0.1, (0.1, 0.1), {"x": 0.1}, [0.1, 0.1]])
def test_pythons_floats_are_exact_in_float64_and_float32_by_default(item):
    for dtype in (torch.float64, torch.float32):
        split = split_of(lambda i: (item, 0.1), dtype=dtype)
        for half in (split.inputs, split.targets):
            for tensor in as_tuple(half(torch.tensor([0, 1]), None)):
                assert torch.equal(tensor, torch.full(tensor.shape, 0.1, dtype=dtype))


def refusal(made: object, columns: Any = None) -> str:
    with pytest.raises(ConfigError) as error:
        as_split(made, "data.train", columns)
    assert "\n" not in str(error.value)
    return str(error.value)


def as_dicts(index: int) -> dict[str, Any]:
    return {"x": X[index].tolist(), "label": index}


@pytest.mark.parametrize(
    "made",
    [
        (X, Y),
        [X, Y],
        (X.numpy(), Y.numpy()),
        TensorDataset(X, Y),
        Own(lambda i: (X[i], Y[i])),
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
        inputs, targets = cut.inputs(IDS, None), cut.targets(IDS, Draw(0, 3))
        assert torch.equal(inputs, X[IDS])
        assert torch.equal(targets, Y[IDS])


@pytest.mark.parametrize("made", [((X, Y), (Y, X)), Own(lambda i: ((X[i], Y[i]), (Y[i], X[i])))])
def test_inputs_and_targets_may_be_tuples(made):
    split = as_split(made, "data.train")
    for value, expected in ((split.inputs(IDS, None), (X, Y)), (split.targets(IDS, None), (Y, X))):
        assert isinstance(value, tuple)
        assert all(torch.equal(got, whole[IDS]) for got, whole in zip(value, expected, strict=True))
    assert isinstance(split_of(lambda i: ((X[i],), i)).inputs(IDS, None), tuple)  # of one


def test_columns_name_the_inputs_and_targets_of_dicts():
    one = split_of(as_dicts, columns={"inputs": "x", "targets": "label"})
    assert torch.equal(one.inputs(IDS, None), X[IDS])
    two = split_of(as_dicts, columns={"inputs": ["x", "label"], "targets": "label"})
    x, label = two.inputs(IDS, None)
    assert torch.equal(x, X[IDS])
    assert torch.equal(label, two.targets(IDS, None))


@pytest.mark.parametrize("format_", [None, "torch", "numpy"])
def test_a_hugging_face_data_set_comes_in_by_its_columns(format_):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"x": X.tolist(), "mask": Y.tolist(), "label": Y.tolist()})
    split = as_split(made.with_format(format_), "data.train", {"inputs": ["x", "mask"], "targets": "label"})
    x, mask = split.inputs(IDS, None)
    assert torch.equal(x, X[IDS])
    assert torch.equal(mask, Y[IDS])
    assert torch.equal(split.targets(IDS, None), Y[IDS])


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
    split = split_of(noisy)
    together = numbers(split, [1, 2, 5], Draw(7, 3))
    alone = [numbers(split.first(6), [i], Draw(7, 3))[0] for i in (5, 2, 1)]
    assert together == alone[::-1]
    drawn = [
        row for draw in (Draw(7, 3), Draw(7, 4), Draw(8, 3), None) for row in numbers(split, [1, 2, 5], draw)
    ]
    for generator in range(3):
        assert len({row[generator] for row in drawn}) == 12


def test_random_numbers_of_a_sample_never_change():
    """Pinned: a run that is resumed by another version must see the samples that it would have seen."""
    assert numbers(split_of(noisy), [2], Draw(7, 3)) == [
        pytest.approx([0.927304744720459, 0.34737229347229004, 0.794016420841217])
    ]


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


def fail(index: int) -> Any:
    random.random()
    if index == 4:
        raise KeyError("label")
    return X[index], index


def test_random_state_of_the_run_is_left_alone_also_by_an_item_that_fails():
    before = states()
    split = split_of(fail, length=4)
    split.inputs(torch.tensor([1, 2]), Draw(0, 0))
    split.checksum()
    refusal(Own(fail))
    assert states() == before


def test_a_generator_of_the_data_set_s_own_is_refused():
    own = np.random.default_rng(0)
    said = refusal(Own(lambda i: (X[i] + own.random(), i)))
    assert said.startswith("data.train: sample 0 differs from one reading to the next: draw random numbers")


# Checksum, pickle


def test_the_checksum_is_of_type_length_and_samples():
    prints = [
        split_of(lambda i: (X[i], i)).checksum(),
        split_of(lambda i: (X[i], i), length=5).checksum(),
        split_of(lambda i: (X[i] + (i == 5), i)).checksum(),
        split_of(lambda i: (X[i], i + (i == 3))).checksum(),
        as_split([(X[i], i) for i in range(6)], "data.train").checksum(),
    ]
    assert len(set(prints)) == 5
    assert split_of(lambda i: (X[i], i)).checksum() == prints[0]
    assert split_of(noisy).checksum() == split_of(noisy).checksum()


def test_the_checksum_reads_the_first_the_last_and_at_most_64_samples():
    read: set[int] = set()
    split = split_of(lambda i: (read.add(i) or X[0], i), length=10_000)
    read.clear()
    split.checksum()
    assert {0, 9_999} <= read
    assert len(read) == 64


def test_a_split_can_be_pickled_as_its_data_set_can():
    split = pickle.loads(pickle.dumps(split_of(noisy).first(4)))
    assert numbers(split, [3, 1], Draw(1, 1)) == numbers(split_of(noisy), [3, 1], Draw(1, 1))
    assert len(split) == 4


# Refusals


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ((X, Y[:5]), "holds tensors of several lengths: give a row of each for each sample"),
        (((X, X[:4]), Y), "holds tensors of several lengths"),
        ((X, torch.tensor(1)), "holds tensors of several lengths"),
        ([], "has no sample"),
        (TensorDataset(X, X, Y), "sample 0 must be (inputs, targets); got a Tensor: return two values"),
        (Stream(), "is a Stream, which has no length and no samples by number: give a map-style Dataset"),
        (None, "is a NoneType, which"),
        (Own(lambda i: (X[i], i, i)), "got a tuple: return two values from its __getitem__"),
        (
            Own(as_dicts),
            "got a dict of x, label: return two values from its __getitem__, or name",
        ),
        (Own(lambda i: (X[i], "cat")), "the targets of sample 0 are a str, and must be a tensor, a number"),
        (Own(lambda i: ((), i)), "the inputs of sample 0 are a tuple, and must be"),
        (Own(fail), "sample 4 cannot be read (KeyError: 'label')"),
        (
            Own(lambda i: (X.flatten()[: i + 1], i)),
            "the inputs of sample 1 are float32[2], and of sample 0 float32[1]: all samples must have one",
        ),
        (
            Own(lambda i: (X[i], i if i < 3 else 0.5)),
            "the targets of sample 3 are float32[], and of sample 0 int64[]",
        ),
    ],
)
def test_what_is_no_data_set_is_refused_in_one_sentence(made, says):
    assert says in refusal(made)


@pytest.mark.parametrize(
    ("made", "columns", "says"),
    [
        (
            Own(as_dicts),
            {"inputs": "x"},
            "data.columns must name the columns of inputs and of targets; got inputs",
        ),
        (
            Own(as_dicts),
            {"inputs": ["x", "mask"], "targets": "label"},
            "sample 0 cannot be read (LookupError: no column mask: data.columns can name x, label)",
        ),
        (
            Own(lambda i: (X[i], i)),
            {"inputs": "x", "targets": "y"},
            "cannot be read (LookupError: no",
        ),
    ],
)
def test_columns_that_cannot_be_are_refused_in_one_sentence(made, columns, says):
    assert says in refusal(made, columns)


def test_a_shape_that_differs_later_is_said_with_the_same_sentence():
    split = split_of(lambda i: (X.flatten()[: 1 + (i == 50)], i), length=60)
    with pytest.raises(
        ConfigError, match=r"inputs of sample 50 are float32\[2\], and of sample 0 float32\[1\]"
    ):
        split.inputs(torch.tensor([50]), None)  # also in a microbatch of its own
    split.targets(torch.tensor([50]), None)
