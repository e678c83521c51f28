"""An image looks the same in whatever batch it is made, and its augmentation is the usual one."""

from __future__ import annotations

import zlib
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.data import Augment, Draw, Images
from pipetrain.data.augment import draw, key

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
IMAGES = torch.randint(0, 256, (200, 3, 32, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
IDS = torch.arange(len(IMAGES))
SPLIT = Images(IMAGES, IDS, MEAN, STD, Augment(crop=4, flip=True))
DRAW = Draw(seed=3, epoch=5)


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(60)), st.integers(1, 60))
def test_any_order_and_any_batch_gives_the_same_images(order, size):
    whole = SPLIT.inputs(IDS, DRAW)
    assert whole.is_contiguous()
    for ids in torch.tensor(order).split(size):
        assert torch.equal(SPLIT.inputs(ids, DRAW), whole[ids])


def position(image: torch.Tensor, augmented: torch.Tensor, crop: int) -> list[tuple[int, int, bool]]:
    """Find by brute force which crops and flips of a padded image give what was made of it."""
    padded = torch.nn.functional.pad(image, (crop,) * 4)
    places = product(range(2 * crop + 1), range(2 * crop + 1), (False, True))
    return [
        (row, column, flip)
        for row, column, flip in places
        for cut in [padded[:, row : row + 32, column : column + 32]]
        if torch.equal(cut.flip(-1) if flip else cut, augmented)
    ]


def test_each_image_is_one_crop_of_the_padded_image_flipped_or_not():
    out = Augment(4, True)(IMAGES, IDS, Draw(0, 0))
    found = [position(image, made, 4) for image, made in zip(IMAGES[:40], out, strict=False)]
    assert all(len(hits) == 1 for hits in found)
    rows, columns, flips = zip(*(hits[0] for hits in found), strict=True)
    assert len(set(rows)) == len(set(columns)) == 9
    assert 10 < sum(flips) < 30
    assert rows != columns


def test_the_images_of_a_seed_never_change():
    """Pinned, as the order of samples is."""
    assert zlib.crc32(Augment(4, True)(IMAGES, IDS, Draw(7, 2)).contiguous().numpy()) == 1494605681


def test_evaluation_only_normalises_and_the_source_is_left_alone():
    before = IMAGES.clone()
    SPLIT.inputs(IDS, DRAW)
    assert torch.equal(IMAGES, before)
    out = replace(SPLIT, dtype=torch.float64).inputs(IDS, None)
    mean, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (MEAN, STD))
    assert torch.equal(out, (IMAGES.double() / 255 - mean) / std)


def test_draw_is_splitmix64():
    """The first numbers of the reference generator (Vigna's splitmix64.c) from the state 1234567."""
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert draw(1234567, np.arange(3, dtype=np.uint64)).tolist() == first


@given(st.integers(-(2**63), 2**63), st.integers(0, 2**40))
def test_key_tells_every_number_and_order_apart(seed, epoch):
    assert len({key(seed, epoch), key(seed, epoch + 1), key(seed + 1, epoch), key(seed)}) == 4
    assert seed == epoch or key(seed, epoch) != key(epoch, seed)
