"""Where a model is cut into layers, by hand: each item is an operation, with the modules around it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from pipetrain.model.tracing.grouping import Item, group


def item(path: str, *uses: int, nbytes: int = 10, works: bool = True) -> Item:
    """An operation in module `path`; "" is the model itself."""
    parts = path.split(".") if path else []
    names = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    return Item(tuple(names), uses, nbytes, works)


def layers(items: Sequence[Item], elements: Collection[str] = (), forbidden: Collection[int] = ()) -> str:
    """The layers, each with its first operation. `elements`: of lists."""
    return " ".join(f"{name}:{start}" for name, start in group(items, elements, forbidden, "Model").items())


AROUND_A_SUM = [item("a", 1), item("", 2), item("b", 3), item("c", 4)]
WRAPPED = [
    item("net.stem", 1),
    item("net.blocks.0.x", 2),
    item("net.blocks.0.y", 3),
    item("net.blocks.1.x", 4),
    item("net.blocks.1.y", 5),
    item("head", 6),
]
WIDE_INSIDE = [
    item("stem", 1, 4),
    item("blocks.0.f.0", 2, 4),
    item("blocks.0.f.1", 3),
    item("blocks.0.f.2", 4),
    item("blocks.0", 5),
    item("blocks.1.f.0", 6),
    item("blocks.1.f.1", 7),
    item("head", 8),
]
CASES: dict[str, tuple[list[Item], str]] = {
    "children of the model": ([item("a", 1), item("b", 2), item("c", 3)], "a:0 b:1 c:2"),
    # Behind b two values are alive, behind the sum (2) and what follows it (3) one.
    "a residual sum and what follows in line join what comes before": (
        [item("a", 1, 2), item("b", 2), item("", 3), item("", 4), item("c", 5)],
        "a:0 b:1 c:4",
    ),
    # The sum of both in bytes is alive before and behind the join (2); only before it half of it is b's.
    "a skip is joined behind the cut": (
        [item("a", 1, 2), item("b", 2), item("", 3, nbytes=20), item("c", 4)],
        "a:0 b:1 c:2",
    ),
    "the smaller side of a pooling crosses": (
        [item("a", 1), item("", 2, nbytes=2), item("", 3, nbytes=8), item("b", 4)],
        "a:0 b:2",
    ),
    "an idle layer joins the neighbour to which more is sent": (
        [item("a", 1), item("pool", 2, nbytes=2, works=False), item("b", 3)],
        "a:0 b:2",
    ),
    "or the one behind it": (
        [item("a", 1, nbytes=2), item("up", 2, works=False), item("b", 3)],
        "a:0 b:1",
    ),
    "a module that is called twice has two names": (
        [item("a", 1), item("b", 2), Item(("a@1",), (3,))],
        "a:0 b:1 a#2:2",
    ),
    "a model without modules is one layer": ([item("", 1), item("", 2)], "Model:0"),
}


@pytest.mark.parametrize("name", CASES)
def test_where_a_layer_begins(name):
    items, wanted = CASES[name]
    assert layers(items) == wanted


def test_no_cut_where_it_is_forbidden():
    assert layers(AROUND_A_SUM, forbidden={1, 2}) == "a:0 c:3"
    assert layers(AROUND_A_SUM, forbidden={1, 2, 3}) == "a:0"


def test_a_wrapper_and_a_module_with_a_list_are_divided():
    blocks = {"net.blocks.0", "net.blocks.1"}
    assert layers(WRAPPED, blocks) == "net.stem:0 net.blocks.0:1 net.blocks.1:3 head:5"
    # Without a list, net is divided because it holds most operations, and then what holds a third of all.
    assert layers(WRAPPED).startswith("net.stem:0 ")


def test_a_block_in_which_more_travels_than_at_its_ends_stays_whole():
    elements = {"blocks.0", "blocks.1", *(f"blocks.{i}.f.{j}" for i in range(2) for j in range(3))}
    assert layers(WIDE_INSIDE, elements) == "stem:0 blocks.0:1 blocks.1.f.0:5 blocks.1.f.1:6 head:7"
