from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from pipetrain.data import Padded, load_data
from pipetrain.data.collated import CollatedSplit
from pipetrain.data.sampling import Sampled
from pipetrain.data.splits import Draw
from pipetrain.errors import ConfigError
from pipetrain.model.specs import Size

WORDS = [[3, 4, 5], [6], [7, 8, 9, 10], [11, 12], [13, 14, 15]]
PADDED = -100
ALL = torch.arange(len(WORDS))


def texts(longest: int = 4) -> list[dict[str, list[int]]]:
    return [{"ids": words[:longest]} for words in WORDS]


def pad_right(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """As Hugging Face's collators do, with the tokens as targets."""
    most = max(len(sample["ids"]) for sample in samples)
    rows = [sample["ids"] + [0] * (most - len(sample["ids"])) for sample in samples]
    ids = torch.tensor(rows)
    return {"ids": ids, "mask": (ids > 0).long(), "labels": ids.where(ids > 0, PADDED)}


class Masked:
    """Pads to a multiple on the left, and hides tokens at random, which are the targets."""

    def __init__(self, multiple: int = 1) -> None:
        self.multiple = multiple

    def __call__(self, samples: list[dict[str, list[int]]]) -> tuple[Tensor, Tensor]:
        most = -(-max(len(sample["ids"]) for sample in samples) // self.multiple) * self.multiple
        ids = torch.tensor([[0] * (most - len(sample["ids"])) + sample["ids"] for sample in samples])
        hidden = (torch.rand(ids.shape) < 0.5) & (ids > 0)
        return ids.masked_fill(hidden, 1), ids.where(hidden, PADDED)


COLUMNS = {"inputs": {"ids": "ids", "mask": "mask"}, "targets": "labels"}


def split_of(dataset: Any = None, collate: Any = pad_right, columns: Any = COLUMNS) -> CollatedSplit:
    return CollatedSplit(dataset or texts(), "data.train", columns, torch.float32, collate)


def masked(multiple: int = 1) -> CollatedSplit:
    return split_of(None, Masked(multiple), None)


@pytest.mark.parametrize("ids", [[0, 1], [1], [3, 2, 0], [4, 0]])
def test_a_batch_is_as_the_function_makes_it_and_its_pieces_too(ids):
    split = pickle.loads(pickle.dumps(split_of()))
    assert isinstance(split, Padded)
    batch = pad_right([texts()[of] for of in ids])
    lengths = split.lengths(torch.tensor(ids))
    assert lengths == (batch["ids"].shape[1],)
    for piece in (ids, ids[:1], ids[-1:]):
        rows = [ids.index(of) for of in piece]
        padded = split.padded(lengths)
        inputs, targets = padded.inputs(torch.tensor(piece), None), padded.targets(torch.tensor(piece), None)
        wanted = {name: t[rows] for name, t in batch.items()}
        torch.testing.assert_close(inputs, {"ids": wanted["ids"], "mask": wanted["mask"]})
        torch.testing.assert_close(targets, wanted["labels"])


def test_inputs_and_targets_draw_the_same_whatever_is_read_beside_them():
    split, ids = masked().padded((4,)), torch.tensor([0, 3, 2])
    inputs, targets = split.inputs(ids, Draw(5, 1)), split.targets(ids, Draw(5, 1))
    assert torch.equal(inputs == 1, targets != PADDED)
    assert (inputs == 1).any()
    assert torch.equal(split.targets(ids[1:2], Draw(5, 1)), targets[1:2])
    assert not torch.equal(split.inputs(ids, Draw(5, 2)), inputs)


def test_lengths_are_those_that_the_function_makes():
    split = masked(multiple=3)
    assert [split.lengths(ALL[n : n + 1]) for n in range(3)] == [(3,), (3,), (6,)]
    assert split.inputs(ALL[:1], None).shape == (1, 6)  # by itself


def test_the_form_says_which_dimensions_differ():
    samples = Sampled(split_of(), [5], None, 0, 0, 60.0)
    form = samples.form
    assert form is not None
    assert [str(spec) for spec in (*form.inputs.specs, *form.targets.specs)] == ["int64[length A]"] * 3
    assert samples.size([ALL[:1], ALL[1:2]]) == Size(2, (3,))


def images(sizes: list[tuple[int, int]]) -> list[tuple[Tensor, int]]:
    return [(torch.ones(1, *size), n) for n, size in enumerate(sizes)]


def pad_images(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    high, wide = (max(image.shape[n] for image, _ in samples) for n in (1, 2))
    made = torch.zeros(len(samples), 1, high, wide)
    for row, (image, _) in zip(made, samples, strict=True):
        row[:, : image.shape[1], : image.shape[2]] = image
    return made, torch.tensor([label for _, label in samples])


def test_images_have_two_lengths_of_which_each_may_be_another_sample_s():
    split = split_of(images([(2, 5), (4, 3), (2, 2)]), pad_images, None)
    assert split.lengths(torch.arange(3)) == (4, 5)
    image = split.padded((4, 5)).inputs(torch.tensor([2]), None)
    assert image.shape == (1, 1, 4, 5)
    assert image.sum() == 4
    form = Sampled(split, [3], None, 0, 0, 60.0).form
    assert form is not None
    assert str(form.inputs.specs[0]) == "float32[1, length A, length B]"


def test_two_samples_that_are_as_long_as_the_batch_are_no_longer_than_it():
    split = split_of(images([(4, 9), (4, 3), (2, 5)]), pad_images, None)
    batch = torch.tensor([1, 2])
    assert split.lengths(batch) == (4, 5)
    assert split.padded((4, 5)).inputs(batch, None).sum((1, 2, 3)).tolist() == [12, 10]


def test_what_counts_is_seen_at_the_length_of_the_batch():
    """And not of targets that are filled with zeros."""
    nothing = [{"ids": [0]}, {"ids": [0, 0]}, *texts()]
    split = split_of(nothing)
    samples = Sampled(split, [2, 5], None, 0, 0, 60.0)
    assert samples.counting(0, lambda targets: (targets != PADDED).sum()) == [1]


def test_both_splits_have_the_lengths_of_both():
    """Of the test set all have one length, and the longest is in the training set."""
    data = {"name": "own", "collate": {"_target_": f"{__name__}.pad_right"}, "columns": COLUMNS}
    data |= {
        "train": {"_target_": f"{__name__}.texts"},
        "test": {"_target_": f"{__name__}.texts", "longest": 1},
    }
    made = load_data(data)
    assert isinstance(made.test, Padded)
    assert made.test.lengths(ALL[:2]) == (1,)
    for split in (made.train, made.test):
        assert split.targets(ALL[1:2], None).shape == (1, 4)
    # What no sample of it is as long as is filled with 0.
    assert made.test.targets(ALL[1:2], None).tolist() == [[6, 0, 0, 0]]


def test_a_limit_leaves_the_rest_unread():
    data = {"name": "own", "collate": {"_target_": f"{__name__}.pad_right"}, "columns": COLUMNS}
    data |= {name: {"_target_": f"{__name__}.texts"} for name in ("train", "test")}
    made = load_data(data | {"train_limit": 2, "test_limit": 1})
    assert isinstance(made.train, Padded)
    assert made.train.targets(ALL[1:2], None).shape == (1, 3)
    assert (len(made.train), len(made.test)) == (2, 1)


def test_a_class_is_called_once_and_a_function_with_a_list_of_samples():
    data = {"name": "own", "collate": {"_target_": f"{__name__}.Masked", "multiple": 3}}
    data |= {name: {"_target_": f"{__name__}.texts"} for name in ("train", "test")}
    train = load_data(data).train
    assert isinstance(train, Padded)
    assert train.lengths(ALL[:1]) == (3,)


def joining(samples: list[dict[str, list[int]]]) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor([token for sample in samples for token in sample["ids"]])
    return tokens, tokens


def sorting(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    return pad_right(sorted(samples, key=lambda sample: -len(sample["ids"])))


class Cropped(list[dict[str, list[int]]]):
    """Texts whose lengths are drawn."""

    def __getitem__(self, number: Any) -> Any:
        return {"ids": super().__getitem__(number)["ids"][: int(torch.randint(1, 5, ()))]}


def test_samples_whose_length_is_drawn_are_refused():
    split = split_of(Cropped(texts()))
    padded = split.padded(split.lengths(ALL))
    with pytest.raises(ConfigError, match="a sample must be as long each time that it is read"):
        [padded.targets(ALL, Draw(1, epoch)) for epoch in range(20)]


def raising(samples: list[Any]) -> Any:
    raise KeyError("ids")


@pytest.mark.parametrize(
    ("dataset", "collate", "columns", "said"),
    [
        (
            (torch.ones(2), torch.ones(2)),
            pad_right,
            None,
            "data.train is a tuple, and data.collate needs a map",
        ),
        (None, raising, None, "data.train: data.collate cannot take sample 0: KeyError: 'ids'"),
        (None, pad_right, None, "sample 0 must be (inputs, targets); got a dict of ids, mask, labels"),
        (
            None,
            lambda samples: (len(samples), 1),
            None,
            "makes inputs [] of 1 samples: it must return tensors [n",
        ),
        (
            None,
            joining,
            None,
            "makes inputs [3] of 1 samples: it must return tensors [n, ...], with a row for each",
        ),
        (
            None,
            sorting,
            COLUMNS,
            "data.collate changes the order of samples 0 and 1, as if it sorted them by",
        ),
        (
            None,
            lambda samples: (torch.ones((1,) * (1 + len(samples[0]["ids"]))), torch.ones(1)),
            None,
            "data.collate makes inputs float32[1] of sample 1, and float32[1, 1, 1] of sample 0: only sizes",
        ),
    ],
)
def test_what_cannot_be_collated_is_refused(dataset, collate, columns, said):
    with pytest.raises(ConfigError) as error:
        split_of(dataset, collate, columns)
    assert said in str(error.value)


def test_without_the_function_samples_of_several_lengths_are_refused():
    data = {name: {"_target_": f"{__name__}.texts"} for name in ("train", "test")}
    with pytest.raises(ConfigError, match=r"data\.collate= names a function that pads them"):
        load_data({"name": "own", "columns": {"inputs": "ids", "targets": "ids"}, **data})
