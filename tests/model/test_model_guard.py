"""What a program changes of a traced model is refused where the model then computes something else."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError
from pipetrain.model.model_guard import ModelGuard
from pipetrain.model.tensor_places import named_tensors, on_meta, replace
from pipetrain.model.tracing.trace import trace
from pipetrain.model.tracing.traced_network import Traced
from tests.support.traced_comparison import example


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.0)
        self.cfg, self.taus, self.table = SimpleNamespace(tau=1.0, rates={"drop": 0.5}), [1.0], {"tau": 1.0}
        self.offset, self.epoch, self.history = torch.zeros(4), 0, list[float]()
        self.function = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        tau = self.cfg.tau * self.taus[0] * self.table["tau"] * (2.0 if self.epoch > 3 else 1.0)
        kept = self.drop(self.function(self.a(x)))
        if self.training:
            kept = nn.functional.dropout(kept, self.cfg.rates["drop"])
        return self.b(kept) / tau + self.offset


def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 3 * output


CHANGES = {
    "cfg.tau": lambda model: setattr(model.cfg, "tau", 0.2),
    "cfg.rates.drop": lambda model: model.cfg.rates.update(drop=0.1),
    "cfg": lambda model: setattr(model, "cfg", SimpleNamespace(tau=0.2, rates={"drop": 0.5})),
    "taus": lambda model: model.taus.__setitem__(0, 0.2),
    "table.tau": lambda model: model.table.update(tau=0.2),
    "epoch": lambda model: setattr(model, "epoch", 4),
    "offset": lambda model: setattr(model, "offset", torch.ones(4)),
    "function": lambda model: setattr(model, "function", torch.sigmoid),
    "forward": lambda model: setattr(model, "forward", lambda x: model.b(model.a(x))),
    "drop.p": lambda model: setattr(model.drop, "p", 0.3),
    "training": lambda model: model.eval(),
    "b": lambda model: setattr(model, "b", nn.Linear(4, 4)),
    "b.bias": lambda model: setattr(model.b, "bias", nn.Parameter(torch.ones(4))),
    r"a._forward_hooks.\d+": lambda model: model.a.register_forward_hook(hook),
    r"_forward_pre_hooks.\d+": lambda model: model.register_forward_pre_hook(lambda *_: print()),
}


def cut(model: nn.Module, meta: int = 0) -> ModelGuard:
    """As on a rank that has some of the tensors; every `meta`th is without numbers."""
    network = trace(model, example((4,)))
    tensors = list(named_tensors(model).values())[::meta] if meta else ()
    replace([model], {id(tensor): on_meta(tensor) for tensor in tensors})
    return ModelGuard(model, network)


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_model_computes_with_is_refused_by_its_name(name):
    model = Model()
    unchanged = cut(model, 2)
    unchanged.refuse_changes(True)
    CHANGES[name](model)
    with pytest.raises(ConfigError, match=rf"which do not follow, this has changed: {name}; do so before"):
        unchanged.refuse_changes(True)


def test_an_evaluation_goes_on_where_training_alone_is_another():
    model = Model()
    unchanged = cut(model)
    model.cfg.rates["drop"] = 0.1
    unchanged.refuse_changes(False)
    with pytest.raises(ConfigError, match=r"has changed: cfg\.rates\.drop"):
        unchanged.refuse_changes(True)


@pytest.mark.slow
@pytest.mark.parametrize("meta", [0, 1])
def test_what_it_does_not_compute_with_may_change_and_is_seen_when_it_matters(meta, monkeypatch, caplog):
    model, traced = Model(), list[bool]()
    unchanged = cut(model, meta)
    again = Traced.computes_as_cut

    def counted(self: Traced, training: bool) -> bool:
        traced.append(training)
        return again(self, training)

    monkeypatch.setattr(Traced, "computes_as_cut", counted)
    for loss in range(3):  # a list that grows is looked at once
        model.history.append(float(loss))
        unchanged.refuse_changes(True)
    assert traced == [True]
    for model.epoch in (1, 2, 3):  # a number each time, as it may begin to matter
        unchanged.refuse_changes(True)
    model.epoch = 4
    with pytest.raises(ConfigError, match="has changed: epoch"):
        unchanged.refuse_changes(True)
    assert len(traced) == 5
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split()[1] for line in said] == ["history", "epoch", "epoch", "epoch"]


def test_tensors_that_training_itself_puts_there_are_no_change():
    model = Model()
    unchanged = cut(model)
    others = {id(tensor): on_meta(tensor) for tensor in named_tensors(model).values()}
    replace([model], others, *unchanged.held.content)
    assert not unchanged.held.changed()
