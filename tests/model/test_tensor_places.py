"""What modules hold: seen to be another, and put back."""

from __future__ import annotations

import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipetrain.model.tensor_places import Held, attributes_of, places, standing_in


class Config:
    def __init__(self) -> None:
        self.tau, self.inner = 1.0, SimpleNamespace(sizes=[1, [2]])
        self.itself = self  # a cycle


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale, self.rate, self.size = torch.ones(1), 0.5, (1, [2])
        self.cfg, self.seen, self.recent = Config(), [1.0], deque([1, 2], 2)
        self.names, self.table = {"a"}, {"x": {"y": torch.ones(2)}}


def into_a_table(model: Any) -> None:
    model.table["x"]["y"] = torch.zeros(2)


CHANGES = {
    "rate": lambda model: setattr(model, "rate", 0.25),
    "scale": lambda model: setattr(model, "scale", torch.ones(1)),
    "size.1": lambda model: model.size[1].append(3),
    "cfg.tau": lambda model: setattr(model.cfg, "tau", 0.2),
    "cfg.inner.sizes.1": lambda model: model.cfg.inner.sizes[1].clear(),
    "cfg.new": lambda model: setattr(model.cfg, "new", 1),
    "seen": lambda model: model.seen.append(2.0),
    "recent": lambda model: model.recent.append(3),
    "names": lambda model: model.names.add("b"),
    "table.x.y": into_a_table,
    "layer.training": lambda model: model.layer.eval(),
    "layer._parameters.bias": lambda model: setattr(model.layer, "bias", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_module_holds_in_any_depth_is_seen_to_change_and_put_back(name: str):
    model = Model()
    held = Held(attributes_of(model))
    CHANGES[name](model)
    assert held.changed()
    assert [changed for changed, *_ in held.changes()] == [name]
    held.put_back()
    assert not held.changed()


def test_equal_numbers_and_other_numbers_in_a_tensor_are_no_change():
    model = Model()
    held = Held(attributes_of(model))
    model.rate = float("0.5")
    model.scale.zero_()
    assert not held.changed()
    assert not [*held.changes()]
    model.layer._forward_hooks[0] = print
    assert held.changed()


def test_it_is_compared_without_a_call_of_python_for_each():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(50)))
    held, events = Held(attributes_of(model)), list[str]()
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        held.changed()
    finally:
        sys.setprofile(None)
    assert len(events) < 50  # of 100 entries; a collection of garbage may be among them


def test_a_tensor_in_a_container_of_containers_has_a_place_and_what_a_forward_keeps_is_gone():
    model = Model()
    assert sum(place.tensor is model.table["x"]["y"] for place in places(model)) == 1
    other, of = torch.zeros(2), model.table["x"]["y"]

    def forward(x: Tensor) -> None:
        model.seen.append(x)
        model.cfg.inner.last = model.last = x

    with standing_in(model, {id(of): other}):
        assert model.table["x"]["y"] is other
        forward(other)
    assert model.table["x"]["y"] is of
    assert (model.seen, hasattr(model, "last"), [*vars(model.cfg.inner)]) == ([1.0], False, ["sizes"])
