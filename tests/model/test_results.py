"""What counts as a difference between two runs."""

from __future__ import annotations

import math

import torch

from pipetrain.model.results import GRADIENT, LOSS, Results, difference


def test_a_gradient_that_is_rounding_is_no_difference():
    """Beside the largest one; a bias before a BatchNorm has such."""
    one = {"output 0": torch.ones(2), f"{GRADIENT}a": torch.ones(3), f"{GRADIENT}b": torch.zeros(3) + 1e-9}
    assert not difference(one, {**one, f"{GRADIENT}b": torch.zeros(3)})
    for name, off in (("output 0", 0.01), (f"{GRADIENT}a", 0.01), (f"{GRADIENT}b", 1e-5)):
        assert difference(one, {**one, name: one[name] + off}).startswith(f"{name} differs by")


def test_numbers_shapes_dtypes_and_what_is_there_alone_differ():
    full = {"output 0": torch.tensor([1.0, math.nan, math.inf]), LOSS: torch.tensor(1.0)}
    assert not difference(full, {name: tensor.clone() for name, tensor in full.items()})
    others: list[tuple[Results, str]] = [
        ({"output 0": torch.tensor([1.0, 2.0, math.inf])}, "output 0 differs by nan, of 1"),
        ({"output 0": torch.ones(2)}, r"output 0 differs: float32[3] and float32[2]"),
        ({"output 0": full["output 0"].double()}, r"output 0 differs: float32[3] and float64[3]"),
        ({LOSS: torch.tensor(1.0002)}, "the loss differs by 0.0002, of 1"),
        ({"buffer seen": torch.ones(1)}, "buffer seen is new"),
    ]
    for other, says in others:
        assert difference(full, full | other) == says
    assert difference(full, {LOSS: full[LOSS]}) == "output 0 is missing"
    half = {"output 0": torch.ones(2, dtype=torch.bfloat16)}
    assert not difference(half, {"output 0": torch.full((2,), 1.2)}, lowered=True)
    assert difference(half, {"output 0": torch.full((2,), 1.5)}, lowered=True)
    assert difference(half, {"output 0": torch.full((2,), 1.2)}, lowered=True, most=0.05)
