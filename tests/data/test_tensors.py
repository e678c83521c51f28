from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipetrain.data.tensors import Tensors, checksum

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
PAIRED = Tensors((X, X + 100), Y)


def test_rows_are_those_of_the_samples_asked_for():
    ids = torch.tensor([4, 0])
    first, second = PAIRED.inputs(ids, None)
    assert first.tolist() == [[8, 9], [0, 1]]
    assert second.tolist() == [[108, 109], [100, 101]]
    assert PAIRED.targets(ids, None).tolist() == [4, 0]


def test_first_keeps_the_first_samples_of_each_tensor_at_most_all():
    cut = PAIRED.first(2)
    assert (len(cut), len(PAIRED.first(9))) == (2, 6)
    assert [len(tensor) for tensor in (*cut.all_inputs, cut.all_targets)] == [2, 2, 2]


def test_the_checksum_tells_contents_shapes_and_dtypes_apart():
    changed = X.clone()
    changed[5, 1] += 1
    others = [
        PAIRED,
        replace(PAIRED, all_inputs=(changed, X + 100)),
        replace(PAIRED, all_inputs=(X, changed)),
        replace(PAIRED, all_targets=Y + 1),
        replace(PAIRED, all_targets=Y.int()),
        replace(PAIRED, all_inputs=(X.reshape(6, 1, 2), X + 100)),
        PAIRED.first(5),
    ]
    assert len({split.checksum() for split in others}) == len(others)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.uint8])
def test_the_checksum_is_of_the_content_and_not_of_how_it_lies_in_memory(dtype):
    tensor = (torch.arange(24).reshape(2, 3, 4) % 2).to(dtype)
    turned = tensor.transpose(0, 2).contiguous().transpose(0, 2)
    assert not turned.is_contiguous()
    assert checksum([turned]) == checksum([tensor])
