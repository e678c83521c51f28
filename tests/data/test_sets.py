from __future__ import annotations

import pytest
import torch

from pipetrain.data import Split
from pipetrain.errors import ConfigError

SPLIT = Split(torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 32, 32), torch.arange(5))


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
