from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipetrain.data import ImageData, Split
from pipetrain.data.sets import prove
from pipetrain.errors import ConfigError

SPLIT = Split(torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 32, 32), torch.arange(5))
DATA = ImageData("own", SPLIT, SPLIT.first(3), classes=5, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))


def test_first_keeps_the_first_samples():
    first = SPLIT.first(2)
    assert len(first) == 2
    assert first.labels.tolist() == first.images[:, 0, 0, 0].tolist() == [0, 1]


def test_first_of_more_than_there_are_is_all():
    assert len(SPLIT.first(9)) == len(SPLIT) == 5


@pytest.mark.parametrize("n", [0, -1])
def test_first_of_none_is_refused(n):
    with pytest.raises(ConfigError, match="1 or more"):
        SPLIT.first(n)


def with_label(label: int, sample: int) -> Split:
    labels = SPLIT.labels.clone()
    labels[sample:] = label
    return replace(SPLIT, labels=labels)


IMAGES_MUST = "images must be a tensor torch.uint8 [n, 3, 32, 32] on cpu; got "
LABELS_MUST = "labels must be a tensor torch.int64 [n] on cpu; got "


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (with_label(5, 2), "labels[2] is 5, and with 5 classes labels are 0 to 4"),
        (with_label(-100, 4), "labels[4] is -100, and with 5 classes labels are 0 to 4"),
        (replace(SPLIT, labels=torch.arange(4)), "has 5 images and 4 labels: each image needs one label"),
        (replace(SPLIT, images=SPLIT.images[:4]), "has 4 images and 5 labels: each image needs one label"),
        (Split(SPLIT.images[:0], SPLIT.labels[:0]), "has no sample"),
        (replace(SPLIT, images=SPLIT.images.float()), f"{IMAGES_MUST}torch.float32 [n, 3, 32, 32] on cpu"),
        (replace(SPLIT, images=SPLIT.images[:, :1]), f"{IMAGES_MUST}torch.uint8 [n, 1, 32, 32] on cpu"),
        (replace(SPLIT, images=SPLIT.images[..., :28]), f"{IMAGES_MUST}torch.uint8 [n, 3, 32, 28] on cpu"),
        (replace(SPLIT, images=SPLIT.images[0]), f"{IMAGES_MUST}torch.uint8 [n, 32, 32] on cpu"),
        (replace(SPLIT, images=SPLIT.images.to("meta")), f"{IMAGES_MUST}torch.uint8 [n, 3, 32, 32] on meta"),
        (replace(SPLIT, images=SPLIT.images.numpy()), f"{IMAGES_MUST}ndarray"),
        (replace(SPLIT, labels=SPLIT.labels.int()), f"{LABELS_MUST}torch.int32 [n] on cpu"),
        (replace(SPLIT, labels=SPLIT.labels[:, None]), f"{LABELS_MUST}torch.int64 [n, 1] on cpu"),
        (replace(SPLIT, labels=torch.tensor(3)), f"{LABELS_MUST}torch.int64 [] on cpu"),
        (replace(SPLIT, labels=[0, 1, 2, 3, 4]), f"{LABELS_MUST}list"),
        ((SPLIT.images, SPLIT.labels), "must be a pipetrain.data.Split; got tuple"),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_split_that_is_wrong_is_named_with_what_is_wrong(split, wrong, says):
    with pytest.raises(ConfigError) as refusal:
        prove(replace(DATA, **{split: wrong}))
    assert (
        str(refusal.value)
        == f"the data set own cannot be used: {split} {says}; correct what data.source gives"
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"classes": 0}, "classes must be a whole number, 1 or more; got 0"),
        ({"classes": 10.0}, "got 10.0"),
        ({"classes": True}, "got True"),
        ({"classes": torch.tensor(5)}, "got tensor(5)"),
        ({"mean": (0.5, 0.5)}, "mean must be three finite numbers; got (0.5, 0.5)"),
        ({"mean": 0.5}, "mean must be three finite numbers; got 0.5"),
        ({"mean": ("a", "b", "c")}, "mean must be three finite numbers"),
        ({"mean": (0.5, math.nan, 0.5)}, "mean must be three finite numbers"),
        ({"std": np.full((3, 1), 0.5)}, "std must be three finite numbers above 0; got array"),
        ({"std": (0.5, 0.5, math.inf)}, "std must be three finite numbers above 0"),
        ({"std": (0.5, 0.0, 0.5)}, "std must be three finite numbers above 0; got (0.5, 0.0, 0.5)"),
        ({"std": (0.5, -0.1, 0.5)}, "std must be three finite numbers above 0"),
    ],
)
def test_a_number_that_is_wrong_is_named(wrong, says):
    with pytest.raises(ConfigError) as refusal:
        prove(replace(DATA, **wrong))
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("numbers", [[0, 1, 0.5], tuple(np.float32([0.1, 0.2, 0.3]))])
def test_what_is_right_is_let_through(numbers):
    prove(DATA)
    prove(replace(DATA, mean=numbers))
