from __future__ import annotations

import torch
from sklearn.datasets import load_digits

from pipetrain.data import digits


def test_split_is_stratified_and_fixed():
    data = digits.load()
    assert (data.name, data.classes) == ("digits", 10)
    assert [split.images.shape for split in (data.train, data.test)] == [(1437, 3, 32, 32), (360, 3, 32, 32)]
    assert (data.train.images.dtype, data.train.labels.dtype) == (torch.uint8, torch.int64)
    counts = data.test.labels.bincount()
    assert counts.min() >= 34
    assert counts.max() <= 37
    # Pinned: accuracies of different versions compare only while the split stays as it is.
    assert data.test.labels[:12].tolist() == [2, 9, 3, 5, 6, 9, 5, 6, 9, 5, 2, 1]


def test_each_sample_is_in_one_split():
    data = digits.load()
    images = torch.cat([data.train.images, data.test.images]).flatten(1)
    small = torch.from_numpy(load_digits().images)
    # The mean of the enlarged image follows the mean of the small one: the two sets are the same.
    large = images.double().mean(1).sort().values
    assert len(large) == len(small)
    assert torch.allclose(large, (small.flatten(1).mean(1) * 255 / 16).sort().values, atol=3)


def test_the_file_and_the_package_give_the_same(monkeypatch):
    read = digits._table()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    asked = digits._table()
    assert (asked == read).all()
    assert asked.shape == (1797, 65)
