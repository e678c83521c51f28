"""What a `_target_` names, how it is called, and what is said where it cannot be."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from pipetrain import models
from pipetrain.commands.cli import values_of
from pipetrain.data import made as module
from pipetrain.instantiate import NotMade, RefersToNothing, Unresolved, located, make


def seen(*given: Any, **named: Any) -> tuple[Any, ...]:
    return given, named


SEEN = f"{__name__}.seen"


def test_a_dotted_name_is_an_attribute_before_it_is_a_module():
    assert located("pipetrain.models.gpt") is models.gpt  # there is a module of this name too
    assert located("pipetrain.data.made.shapes") is module.shapes
    assert located("torch.nn.Linear.forward") is nn.Linear.forward


def test_arguments_are_made_before_what_they_are_given_to():
    inner = {"_target_": "builtins.complex", "real": 1, "imag": 2}
    node = {"_target_": SEEN, "_args_": [inner, 3], "more": ({"deep": [inner]}, None)}
    assert make(node) == ((1 + 2j, 3), {"more": [{"deep": [1 + 2j]}, None]})
    assert make({"_target_": SEEN, "_recursive_": False, "it": inner}) == ((), {"it": inner})
    later = make({"_target_": SEEN, "_partial_": True, "it": inner})
    assert isinstance(later, partial)
    assert (later.func, later.keywords) == (seen, {"it": 1 + 2j})
    assert make(node, later=True)() == make(node)


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (
            {"_target_": "no.such"},
            "ImportError: Error loading 'no.such': ModuleNotFoundError: No module named",
        ),
        (
            {"_target_": "torch.nn.Sequential.no"},
            "ImportError: Error loading 'torch.nn.Sequential.no': Attrib",
        ),
        ({"_target_": ""}, "ImportError: Error loading '': ValueError: Empty module name"),
        ({"_target_": 3}, "ImportError: Error loading '3': ModuleNotFoundError: "),
        ({"_target_": "math.pi"}, "Expected a callable target, got '3.14159"),
        ({"_target_": "builtins.len", "_args_": [{"_target_": "builtins.len"}]}, "TypeError: len() takes"),
        ({"_target_": "builtins.int", "_args_": ["x\ny"]}, "ValueError: invalid literal for int()"),
    ],
)
def test_what_cannot_be_made_says_why_in_one_line(node, says):
    with pytest.raises(NotMade) as error:
        make(node)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


def test_a_configuration_becomes_plain_values_and_what_refers_to_nothing_is_refused_where_it_is_read():
    text = """
        a: {x: ["${n}", 2.5], y: "${gone.at.all}", dtype: "${oc.env:NOWHERE_SET}"}
        b: {_target_: math.hypot, _partial_: true, first: "???"}
        c: {_target_: math.hypot, first: "???"}
        d: [1, "${gone}"]
        e: "${a.x}"
        n: 1
    """
    values = values_of(OmegaConf.create(text))
    assert type(values["a"]["x"]) is list
    assert (values["a"]["x"], values["e"], values["n"], values["d"][0]) == ([1, 2.5], [1, 2.5], 1, 1)
    assert values["a"]["y"] == Unresolved("Interpolation key 'gone.at.all' not found")
    assert "NOWHERE_SET" in values["a"]["dtype"].why
    assert values["d"][1] == Unresolved("Interpolation key 'gone' not found")
    assert make(values["b"])(3, 4) == 5
    with pytest.raises(RefersToNothing, match=r"^Missing mandatory value: c\.first$"):
        make(values["c"])
    assert torch.equal(make({"_target_": "torch.tensor", "data": values["e"]}), torch.tensor([1, 2.5]))
