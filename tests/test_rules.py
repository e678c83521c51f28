"""Rules: which values they take, as what, and in which sentence they refuse others."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from pipetrain.errors import ConfigError
from pipetrain.rules import BOOL, COUNT, PATH, POSITIVE, SHARE, one_of, text, whole


def test_what_obeys_a_rule_is_read_as_python_s_own():
    for rule, value, wanted in [
        (COUNT, np.int64(3), 3),
        (whole(0, 9), 9, 9),
        (POSITIVE, np.float32(0.5), 0.5),
        (SHARE, 0, 0.0),
        (BOOL, False, False),
        (one_of("a", "b"), "b", "b"),
        (text("a name"), "x", "x"),
        (PATH, "x/y", Path("x/y")),
    ]:
        found = rule.read("key", value)
        assert (found, type(found)) == (wanted, type(wanted))
        assert rule.read("key", None, null=True) is None


@pytest.mark.parametrize(
    ("rule", "value", "says"),
    [
        (COUNT, True, "key=True must be a whole number of at least 1"),
        (COUNT, "3", "key='3' must be a whole number of at least 1"),
        (COUNT, [1, 2], "key=[1,2] must be a whole number of at least 1"),
        (whole(0, 9), 10, "key=10 must be a whole number of at least 0 and at most 9"),
        (POSITIVE, math.inf, "key=inf must be a finite number above 0"),
        (SHARE, True, "key=True must be a number from 0 to below 1"),
        (BOOL, 1, "key=1 must be true or false"),
        (one_of("a", "b"), "c", "key=c must be one of a, b"),
        (text("a name"), "", "key= must be a name"),
        (COUNT, 10**400, f"key={'1' + '0' * 79}... must be a whole number of at least 1"),
        (POSITIVE, 10**400, f"key={'1' + '0' * 79}... must be a finite number above 0"),
        (COUNT, "a" * 300, f"key={'a' * 80}... must be a whole number of at least 1"),
        (PATH, "a\udcff", "key=a\udcff must be the path of a file or a folder"),
        (PATH, np.zeros((2, 2)), "key=[[0. 0.] [0. 0.]] must be the path of a file or a folder"),
        (BOOL, {1: "x" * 99}, f"key={{1: '{'x' * 75}... must be true or false"),
    ],
)
def test_what_does_not_is_refused_in_one_sentence(rule, value, says):
    for null in (False, True):
        with pytest.raises(ConfigError) as refused:
            rule.read("key", value, null)
        assert str(refused.value) == says + " or null (in Python None)" * null
