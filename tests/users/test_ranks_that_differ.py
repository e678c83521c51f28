"""Ranks whose programs differ are told so, all alike, before one waits for another."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pipetrain import ConfigError, Pipeline
from pipetrain.schedule.programs import gpipe, one_f_one_b

SGD = torch.optim.SGD


def same(ranks: int, batches: int, microbatches: int) -> Any:
    """A schedule of one name, with a program of its own on each rank."""
    return (gpipe if os.environ["RANK"] == "1" else one_f_one_b)(ranks, batches, microbatches)


APART: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "cuts": ({"partition": [2]}, {"partition": [4]}, r"partition=\[4\], and rank 0 has \[2\]"),
    "strategy": ({"partition": "even"}, {"partition": [3]}, r'partition=\[3\], and rank 0 has "even"'),
    "microbatches": ({"microbatches": 2}, {"microbatches": 4}, "microbatches=4, and rank 0 has 2"),
    "schedule": ({}, {"schedule": "gpipe"}, 'schedule="gpipe", and rank 0 has "1f1b"'),
    "other edges": ({}, {"schedule": "zbv"}, 'schedule="zbv", and rank 0 has "1f1b"'),
    "program": ({"schedule": same}, {"schedule": same}, r"program=\d+, and rank 0 has \d+"),
    "rate": ({}, {"optimizer": partial(SGD, lr=0.2)}, r"optimizer.lr=0.2, and rank 0 has 0.1"),
    "optimizer": ({}, {"optimizer": torch.optim.Adam}, 'optimizer="Adam", and rank 0 has "SGD"'),
    "groups": (
        {"param_groups": {"norms_and_biases": {"weight_decay": 0.5}}},
        {"param_groups": {"norms_and_biases": {"weight_decay": 0}}},
        r"optimizer.1.weight_decay=0, and rank 0 has 0.5",
    ),
    "clipping": ({"clip_grad_norm": 1.0}, {}, "clip_grad_norm=null, and rank 0 has 1.0"),
    "codec": ({}, {"codec_forward": "half"}, "codec_forward={.*Half.*}, and rank 0 has {.*Identity"),
}


def told(name: str) -> str:
    """Return what a rank is told that has arguments of its own; then make a Pipeline that is alike on all."""
    options: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1), "device": "cpu", "threads": 1}
    layers = [nn.Linear(4, 4) for _ in range(6)]
    said = "nothing"
    try:
        mine = APART[name][int(os.environ["RANK"])]
        Pipeline(nn.Sequential(*layers), cross_entropy, **{**options, "microbatches": 2, **mine})
    except ConfigError as error:
        said = str(error)
    Pipeline(nn.Sequential(*layers), cross_entropy, **options).close()
    return said


@pytest.mark.parametrize("name", APART)
def test_what_differs_between_ranks_is_named_on_all_of_them(ranks, name) -> None:
    first, second = ranks(told, name)
    assert first == second
    found, way_out = first.split(": give Pipeline ")
    assert way_out == "the same arguments on every rank"
    assert found.startswith("rank 1 has ")
    assert re.search(APART[name][2], found), found
