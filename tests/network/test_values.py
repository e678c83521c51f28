"""Specs of values: their sizes and words."""

from __future__ import annotations

import pytest
import torch

from pipetrain.network.values import TensorSpec, ValueSpec, as_tuple

HALF = TensorSpec((2, 3), torch.float16)
IDS = TensorSpec((5,), torch.int64)


def test_sizes_and_words():
    assert TensorSpec((4, 3, 2), torch.float64).nbytes == 4 * 3 * 2 * 8
    both = ValueSpec((HALF, IDS), single=False)
    assert both.nbytes == 2 * 3 * 2 + 5 * 8
    assert str(both) == "float16[2, 3] + int64[5]"


def test_a_spec_is_like_its_value():
    x, ids = torch.zeros(2, 3, dtype=torch.float16), torch.arange(5)
    assert ValueSpec.like(x) == ValueSpec((HALF,), single=True)
    assert ValueSpec.like((x,)) == ValueSpec((HALF,), single=False)
    assert ValueSpec.like((x, ids)) == ValueSpec((HALF, IDS), single=False)
    assert ValueSpec.like({"x": x, "ids": ids}) == ValueSpec((HALF, IDS), single=False, names=("x", "ids"))
    assert ValueSpec.like(x) != ValueSpec.like((x,))


def test_an_example_is_of_one_sample():
    batch = torch.zeros(4, 2, 3, dtype=torch.float16)
    assert ValueSpec.in_batch(batch) == ValueSpec((HALF,))
    assert ValueSpec.in_batch(batch).of(4) == ValueSpec.like(batch)


def test_as_tuple():
    x = torch.zeros(1)
    for value in (x, (x,), [x]):
        (only,) = as_tuple(value)
        assert only is x
    for wrong, named in (((), "tuple"), ([x, 3], "list"), ({"a": 1}, "dict")):
        with pytest.raises(TypeError, match=f"a tensor or a tuple of tensors, not {named}"):
            as_tuple(wrong)
