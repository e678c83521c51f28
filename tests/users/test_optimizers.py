"""Optimizers as users write them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pipetrain import ConfigError, Pipeline


@pytest.mark.parametrize("chosen", [lambda model, p: model.parameters(), lambda model, p: [*p][1:]])
def test_a_function_that_does_not_use_its_parameters_is_refused(chosen):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    before = {name: p.clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(
        ConfigError, match=r"holds other parameters than .* was given.* as in lambda p: SGD\(p, \.\.\.\)"
    ):
        Pipeline(model, cross_entropy, lambda p: torch.optim.SGD(chosen(model, p), 0.1))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
