"""Modules as they are, over stages and schedules, against one process of plain PyTorch in float64."""

from __future__ import annotations

import pytest

from tests.support.parity import Way, compare
from tests.support.subjects import MADE, subject

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(
    ("schedule", "ranks"), [("1f1b", 2), ("gpipe", 3), ("pipedream", 3), ("pipedream_2bw", 2)]
)
def test_as_one_process(name, schedule, ranks):
    compare(subject(name), Way(schedule, ranks))
