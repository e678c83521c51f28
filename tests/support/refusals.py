"""Wrong values of every kind, and what is said of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from pipetrain.commands.cli import values_of
from pipetrain.errors import ConfigError
from pipetrain.schedule.actions import ScheduleError
from tests.support.cases import config

WORDS = st.text("abcxyz019 _-.,:/[]{}'\"=é", max_size=8)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-100, 10**9),
    st.floats(),
    WORDS,
    st.lists(st.one_of(st.integers(-9, 99), st.booleans(), WORDS, st.none()), max_size=3),
    st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=2),
)


TARGETS = ["pipetrain.models.mlp", "pipetrain.models", "torch.nn.Sequential", "torch.nn.Linear", "math.pi"]
TARGETS += ["builtins.dict", "builtins.len", "torch.optim.SGD", "pipetrain.schedule.programs.gpipe", "a.b"]
ARGUMENTS = st.dictionaries(
    st.sampled_from(["depth", "width", "num_classes", "lr", "momentum", "virtual", "colour"]),
    st.one_of(st.integers(-2, 12), WORDS, st.none(), st.floats(-1, 2), st.booleans()),
    max_size=2,
)


@cache
def _composed(*overrides: str) -> DictConfig:
    return config(["data=digits", *overrides])


def changed(key: str, value: Any, *overrides: str) -> dict[str, Any]:
    """The values of a configuration in which one is another."""
    cfg = _composed(*overrides).copy()
    OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    values: dict[str, Any] = values_of(cfg)
    return values


def refusal(action: Any) -> str:
    """What an action is refused with: one line."""
    with pytest.raises((ConfigError, ScheduleError)) as error:
        action()
    said = str(error.value)
    assert said
    assert "\n" not in said
    return said


def outcome(action: Any) -> Any:
    """What an action gives, or the text that it is refused with."""
    try:
        return action()
    except ConfigError as error:
        return str(error) or "nothing"
