"""Modules as they are, over stages and schedules, against one process of plain PyTorch in float64.

Three updates of uneven microbatches and an evaluation: weights, buffers and losses must be the same.
"""

from __future__ import annotations

import pytest

from tests.support import subjects
from tests.support.parity import ADAMW, Way, compare

pytestmark = pytest.mark.slow

FLUSH, FLUSH_3 = Way("1f1b", 2), Way("gpipe", 3)
STASH_2, STASH = Way("pipedream_2bw", 2), Way("pipedream", 3)
VIRTUAL = Way("interleaved_1f1b", 2)
WAYS: dict[str, tuple[Way, ...]] = {
    "gpt2": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL, Way("1f1b", 2, ADAMW), Way("pipedream", 3, ADAMW)),
    "gpt2 untied, with dropout": (FLUSH, FLUSH_3, STASH_2, STASH),
    "llama": (FLUSH, STASH),
    "llama tied": (FLUSH_3, STASH_2, STASH),
    "bert": (FLUSH, FLUSH_3, STASH_2, STASH, Way("interleaved_1f1b", 2, ADAMW)),
    "vit": (FLUSH_3, STASH_2),
    "resnet50": (FLUSH, STASH),
    "convnext": (FLUSH, STASH),
    "segformer": (FLUSH, FLUSH_3, STASH_2, STASH),
    "transformer": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL),
    "two inputs": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL),
    "branches": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL),
    "branches with dropout": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL),
    "encoder": (FLUSH, FLUSH_3, STASH_2, STASH),
    "unet": (FLUSH, FLUSH_3, STASH_2, STASH, VIRTUAL),
}


@pytest.mark.parametrize("name", subjects.SUBJECTS)
def test_trains_as_one_process(name):
    subject = subjects.make(name)
    for way in WAYS[name]:
        compare(subject, way)
