"""A tree of values as JSON and tensors, and back."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipetrain.model.packing import ABSENT, from_bytes, packed, to_bytes, unpacked

NUMBERS = st.lists(st.floats(-9, 9), max_size=3)
TENSORS = st.one_of(
    NUMBERS.map(torch.tensor),
    NUMBERS.map(lambda some: torch.complex(torch.tensor(some), torch.ones(len(some)))),
    st.integers(0, 9).map(torch.tensor),
)
ARRAYS = NUMBERS.map(np.array)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), TENSORS, ARRAYS
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.sets(st.text(), max_size=3),
        st.dictionaries(st.text(), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=3),
    ),
    max_leaves=8,
)


def equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, list | tuple | deque) and isinstance(b, list | tuple | deque):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def told(value: Any, now: Any = None, **known: Any) -> Any:
    """Return what comes back of a value, into what is there."""
    tensors: list[Tensor] = []
    tree = packed(value, tensors, torch.empty(0), {id(of): name for name, of in known.items()})
    return unpacked(from_bytes(to_bytes(tree)), tensors, Tensor.clone, known, now)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(TREES)
def test_any_tree_comes_back(tree):
    assert equal(told(tree), tree)


class Thing:
    def __init__(self, **of: Any) -> None:
        vars(self).update(of)


def test_what_is_there_stays_with_other_content():
    inner = Thing(number=1, work=len)
    inner.itself = inner
    inside = Thing(number=2, work=sum)
    now = {"counts": Counter("a"), "few": deque("ab", 2), "things": [inside], "draws": torch.Generator()}
    things, few, draws = now["things"], now["few"], now["draws"]
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    given = {"counts": Counter("bb"), "few": deque("xyz"), "things": [inner], "draws": generator}
    assert told(given, now) is now
    assert (now["counts"], now["things"], now["few"], now["draws"]) == (Counter("bb"), things, few, draws)
    assert (few, few.maxlen, inside.number, inside.work) == (deque("yz"), 2, 1, sum)
    assert torch.equal(torch.rand(2, generator=draws), torch.rand(2, generator=generator))


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (random.Random, random.Random.random),
        (np.random.default_rng, np.random.Generator.random),
        (lambda seed: np.random.Generator(np.random.MT19937(seed)), np.random.Generator.random),
        (np.random.RandomState, np.random.RandomState.rand),
    ],
)
def test_generators_go_on_where_others_were(make, draw):
    given, now = make(1), make(2)
    draw(given)
    assert told({"draws": given}, {"draws": now})["draws"] is now
    assert draw(now) == draw(given)


def test_what_is_known_by_a_name_is_that_and_of_others_a_dict_has_nothing():
    weight, other = torch.ones(2), torch.zeros(2)
    tensors: list[Tensor] = []
    tree = packed({weight: [1, weight], other: 2}, tensors, weight, {id(weight): "a", id(other): "b"})
    assert not tensors
    assert unpacked(tree, tensors, Tensor.clone, {"a": other}) == {other: [1, other]}
    for made_since in (Thing(x=1), [Thing(x=1)], {"a": [1, Thing(x=1)]}):  # nothing is there that it could be
        assert told(made_since) is ABSENT
    for filled in (Thing(x=1), torch.Generator()):
        with pytest.raises(TypeError, match=r"values of type (Thing|Generator)"):
            packed([filled], [], weight)
    for strange in (len, [object()], {1: torch.nn.ReLU()}):
        with pytest.raises(TypeError, match=r"values of type (builtin_function_or_method|object|ReLU)"):
            told(strange)
