from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipetrain.data import Data, Images, Split, digits
from pipetrain.data.splits import Tensors, checksum

SPLIT = Images(
    torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 32, 32),
    torch.arange(5),
    mean=(0.5, 0.5, 0.5),
    std=(0.2, 0.2, 0.2),
)
DATA = Data("own", SPLIT, SPLIT.first(3), classes=5)
X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
PAIRED = Tensors((X, X + 100), Y)


def test_first_keeps_the_first_samples_at_most_all():
    split = replace(SPLIT, mean=(0.0,) * 3, std=(1 / 255,) * 3)
    two, ids = split.first(2), torch.arange(2)
    assert two.targets(ids, None).tolist() == two.inputs(ids, None)[:, 0, 0, 0].tolist() == [0, 1]
    assert (len(two), len(split.first(9)), len(split)) == (2, 5, 5)
    assert isinstance(two, Split)
    first, second = PAIRED.inputs(torch.tensor([4, 0]), None)
    assert (first.tolist(), second.tolist()) == ([[8, 9], [0, 1]], [[108, 109], [100, 101]])
    cut = PAIRED.first(2)
    assert (len(cut), len(PAIRED.first(9))) == (2, 6)
    assert [len(tensor) for tensor in (*cut.all_inputs, cut.all_targets)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("wrong", "says", "classes"),
    [
        ({"mean": [0, 1, 0.5], "std": tuple(np.float32([0.1, 0.2, 0.3]))}, "", 5),
        ({"labels": torch.tensor([0, 1, 2, 3, -100])}, "labels[4] is -100, and with 5 classes", 5),
        ({"labels": torch.arange(4)}, "has 5 images and 4 labels: each image needs one label", 5),
        ({"images": SPLIT.images.float()}, "images must be uint8[3, h, w] a sample; they are float32[3", 5),
        ({"labels": SPLIT.labels.int()}, "labels must be int64[] a sample; they are int32[]", 5),
        ({"mean": (0.5, 0.5)}, "mean must be three finite numbers, and std above 0; got (0.5, 0.5)", 5),
        ({"std": (0.5, 0.0, 0.5)}, "std must be three finite numbers, and std above 0; got (0.5, 0.0", 5),
        ({}, "classes must be a whole number, 1 or more; got 0", 0),
    ],
)
def test_images_that_are_wrong_are_named_with_what_is_wrong(wrong, says, classes):
    said = replace(SPLIT, **wrong).fault(classes)
    assert said.startswith(says)
    assert bool(said) == bool(says)


def test_the_fingerprint_tells_data_sets_apart():
    tensors = replace(DATA, train=PAIRED)
    others = [
        DATA,
        *(replace(DATA, **{name: replace(SPLIT, labels=SPLIT.labels + 1)}) for name in ("train", "test")),
        *(replace(DATA, train=split) for split in (replace(SPLIT, images=SPLIT.images + 1), SPLIT.first(4))),
        replace(DATA, name="other"),
        replace(DATA, classes=6),
        *(replace(DATA, train=replace(SPLIT, **{name: (0.2, 0.21, 0.2)})) for name in ("mean", "std")),
        tensors,
        replace(tensors, train=replace(PAIRED, all_inputs=(X, X + 99))),
        replace(tensors, train=replace(PAIRED, all_inputs=(X.reshape(6, 1, 2), X + 100))),
        replace(tensors, train=replace(PAIRED, all_targets=Y.int())),
        replace(tensors, train=PAIRED.first(5)),
    ]
    assert len({data.fingerprint for data in others}) == len(others)
    assert DATA.fingerprint.startswith("own 5+3 ")


def test_the_checksum_does_not_depend_on_threads_or_on_how_tensors_lie_in_memory():
    """Two ranks with different numbers of cores refused each other."""
    before, prints = torch.get_num_threads(), set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            prints.add(digits.load().fingerprint)
    finally:
        torch.set_num_threads(before)
    assert len(prints) == 1
    tensor = torch.arange(24).reshape(2, 3, 4).bfloat16()
    turned = tensor.transpose(0, 2).contiguous().transpose(0, 2)
    assert not turned.is_contiguous()
    assert checksum([turned]) == checksum([tensor])
