"""Ranks whose programs differ are told so, all alike, before one waits for another."""

from __future__ import annotations

import os
import random
import re
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pipetrain import Pipeline
from pipetrain.schedule.programs import gpipe, one_f_one_b
from tests.users.programs import ended

SGD = torch.optim.SGD


def same(ranks: int, batches: int, microbatches: int) -> Any:
    """A schedule of one name, with a program of its own on each rank."""
    return (gpipe if os.environ["RANK"] == "1" else one_f_one_b)(ranks, batches, microbatches)


def halving(update: int) -> float:
    return 0.5 ** (update // 2)


def ending(update: int) -> float:
    return [1.0, 1.0, 0.5, 0.5][update]


class Own(nn.Module):
    """Says something on rank 0 alone, which is nobody else's business, and draws by Python."""

    def __init__(self, name: str = "clone") -> None:
        super().__init__()
        self.name, self.rank = name, os.environ.get("RANK")
        self.verbose = self.rank == "0"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = getattr(torch, self.name)(x) * random.choice([0.5, 1, 2])
        return result


def layers(last: nn.Module | None = None, frozen: str = "nothing") -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), Own(), last or nn.Dropout(0.5))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    return model


APART: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "cuts": ({"partition": [2]}, {"partition": [4]}, r"partition=\[4\], and rank 0 has \[2\]"),
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
    "rates": (
        {"lr_schedule": halving},
        {"lr_schedule": ending},
        r"lr_schedule\(10\)=nothing, and rank 0 has 0.0",
    ),
    "frozen": (
        {},
        {"model": partial(layers, frozen="bias")},
        r'layer 0=.*"0.weight", "float32.*, and rank 0 has .*"0.bias"',
    ),
    "class": ({}, {"model": partial(layers, nn.ReLU())}, 'layer 5=.*"ReLU".*, and rank 0 has .*"Dropout"'),
    "attribute": (
        {},
        {"model": partial(layers, nn.Dropout(0.1))},
        'layer 5=.*operations .*, and rank 0 has .*"Dropout".*operations',
    ),
    "mode": (
        {},
        {"model": partial(layers, nn.Dropout(0.5).eval())},
        "layer 5=.*, and rank 0 has .*operations",
    ),
    "own attribute": (
        {"model": partial(layers, Own("tanh"))},
        {"model": partial(layers, Own("relu"))},
        'layer 5=.*"Own".*operations .*, and rank 0 has .*"Own".*operations',
    ),
    "codec": ({}, {"codec_forward": "half"}, r'codec_forward="Half\(.*\)", and rank 0 has "Identity\('),
}


def told() -> list[str]:
    """Return what a rank is told that has arguments of its own; then make a Pipeline that is alike on all."""
    batch = torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64)
    options: dict[str, Any] = {
        "optimizer": partial(SGD, lr=0.1),
        "device": "cpu",
        "threads": 1,
        "sample": batch,
    }
    said = []
    for different in APART.values():
        mine = {"microbatches": 2, "model": layers, **different[int(os.environ["RANK"])]}
        said.append(ended(lambda mine=mine: Pipeline(mine.pop("model")(), cross_entropy, **options | mine)))
    Pipeline(layers(), cross_entropy, **options).close()
    return said


def test_what_differs_between_ranks_is_named_on_all_of_them(ranks) -> None:
    first, second = ranks(told)
    assert first == second
    for said, (_, _, difference) in zip(first, APART.values(), strict=True):
        found, way_out = said.split(": give all ranks ")
        assert way_out == "the same arguments, code and files"
        assert re.search(f"^Refused: rank 1 has .*{difference}", found), said


def numbers(of_numpy: bool) -> list[float]:
    """Return the losses with options as Python's or NumPy's numbers; those of rank 1 are always Python's."""
    whole, real = (np.int64, np.float32) if of_numpy and os.environ["RANK"] == "0" else (int, float)
    torch.manual_seed(0)
    random.seed(0)
    options = {"buffer_size": whole(2), "clip_grad_norm": real(0.5), "partition": [whole(2)]}
    options |= {"microbatches": whole(2), "param_groups": {"norms_and_biases": {"weight_decay": real(0.5)}}}
    with Pipeline(layers(), cross_entropy, partial(SGD, lr=real(0.125)), seed=whole(1), **options) as pipe:
        batch = torch.arange(16.0).reshape(4, 4), torch.arange(4)
        return list(pipe.train([batch] * 4, window=whole(2)))


def test_options_may_be_numbers_of_numpys(ranks) -> None:
    assert ranks(numbers, True) == ranks(numbers, False)
