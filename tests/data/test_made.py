from __future__ import annotations

import pytest
import torch

from pipetrain.data.made import regression, shapes

PINNED = {"regression": 3_976_002_624, "shapes": 3_387_615_218}


def test_regression_is_its_function_and_noise_of_the_stated_size():
    data = regression(noise=0.1)
    x, y = data.train.all_inputs, data.train.all_targets
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((4096, 8), (4096, 1), torch.float32, torch.float32)
    smooth = 2 * x[:, 0] * x[:, 1] + x[:, 2] ** 2 - x[:, 3] / 2
    noise = y[:, 0] - smooth
    assert noise.abs().max() <= 0.1 + 1e-6
    assert noise.square().mean().item() == pytest.approx(0.1**2 / 3, rel=0.1)
    assert y.var().item() - 0.1**2 / 3 == pytest.approx(0.62, rel=0.05)
    assert y.mean().item() == pytest.approx(1 / 3, abs=0.05)
    assert len(data.test) == 1024


def test_shapes_are_discs_and_rectangles_before_a_dark_background():
    data = shapes(train=200, test=50, size=32)
    images, classes = data.train.all_inputs, data.train.all_targets
    assert (images.shape, images.dtype) == ((200, 3, 32, 32), torch.float32)
    assert (classes.shape, classes.dtype) == ((200, 32, 32), torch.int64)
    assert (len(data.test), data.classes) == (50, 3)
    shares = classes.flatten().bincount() / classes.numel()
    assert len(shares) == 3
    assert shares.min() > 0.05
    bright = images.mean(1) > 0.35
    assert (bright == (classes > 0)).float().mean() > 0.98
    for image in classes[:20]:  # a rectangle covers all of its own bounding box
        rows, columns = (image == 2).nonzero().unbind(1)
        assert (image[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] == 2).all()


@pytest.mark.parametrize("make", [regression, shapes])
def test_made_data_never_change_and_the_splits_differ(make):
    """Pinned by checksum: figures in conf/ and docs/ are of these samples."""
    first, again, other = make(), make(), make(seed=1)
    assert first.train.checksum() == again.train.checksum() == PINNED[make.__name__]
    assert first.train.checksum() != other.train.checksum()
    assert not torch.equal(first.train.all_inputs[:9], first.test.all_inputs[:9])
