"""Where a model is cut into layers, by hand: each item is an operation, with the modules around it."""

from __future__ import annotations

from collections.abc import Sequence

from pipetrain.network.tracing.grouping import Group, Item, group

PLAIN: set[str] = set()  # elements of lists


def item(path: str, *uses: int, nbytes: int = 10, works: bool = True) -> Item:
    """An operation in module `path`; "" is the model itself."""
    parts = path.split(".") if path else []
    names = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    return Item(tuple(names), uses, nbytes, works)


def named(groups: Sequence[Group]) -> list[tuple[str, int, int]]:
    return [(g.name, g.start, g.end) for g in groups]


def test_children_of_the_model_are_layers():
    items = [item("a", 1), item("b", 2), item("c", 3)]
    assert named(group(items, PLAIN, (), "Model")) == [("a", 0, 1), ("b", 1, 2), ("c", 2, 3)]


def test_a_residual_sum_and_what_follows_in_line_join_what_comes_before():
    items = [item("a", 1, 2), item("b", 2), item("", 3), item("", 4), item("c", 5)]
    # Behind b two values are alive, behind the sum (2) and what follows it (3) one.
    assert named(group(items, PLAIN, (), "Model")) == [("a", 0, 1), ("b", 1, 4), ("c", 4, 5)]


def test_a_skip_is_joined_behind_the_cut():
    items = [item("a", 1, 2), item("b", 2), item("", 3, nbytes=20), item("c", 4)]
    # The sum of both in bytes is alive before and behind the join (2); only before it half of it is b's.
    assert named(group(items, PLAIN, (), "Model")) == [("a", 0, 1), ("b", 1, 2), ("c", 2, 4)]


def test_the_smaller_side_of_a_pooling_crosses():
    items = [item("a", 1), item("", 2, nbytes=2), item("", 3, nbytes=8), item("b", 4)]
    assert named(group(items, PLAIN, (), "Model")) == [("a", 0, 2), ("b", 2, 4)]


def test_no_cut_where_it_is_forbidden():
    items = [item("a", 1), item("", 2), item("b", 3), item("c", 4)]
    assert named(group(items, PLAIN, {1, 2}, "Model")) == [("a", 0, 3), ("c", 3, 4)]
    assert named(group(items, PLAIN, {1, 2, 3}, "Model")) == [("a", 0, 4)]


def test_a_wrapper_and_a_module_with_a_list_are_divided():
    inside = [
        item("net.stem", 1),
        item("net.blocks.0.x", 2),
        item("net.blocks.0.y", 3),
        item("net.blocks.1.x", 4),
    ]
    items = [*inside, item("net.blocks.1.y", 5), item("head", 6)]
    modules = {"net.blocks.0", "net.blocks.1"}
    cut = [("net.stem", 0, 1), ("net.blocks.0", 1, 3), ("net.blocks.1", 3, 5), ("head", 5, 6)]
    assert named(group(items, modules, (), "Model")) == cut
    # Without a list, net is divided because it holds most operations, and then what holds a third of all.
    assert next(g.name for g in group(items, PLAIN, (), "Model")) == "net.stem"


def test_a_block_in_which_more_travels_than_at_its_ends_stays_whole():
    block = [
        item("blocks.0.f.0", 2, 4),
        item("blocks.0.f.1", 3),
        item("blocks.0.f.2", 4),
        item("blocks.0", 5),
    ]
    items = [item("stem", 1, 4), *block, item("blocks.1.f.0", 6), item("blocks.1.f.1", 7), item("head", 8)]
    modules = {"blocks.0", "blocks.1", *(f"blocks.{i}.f.{j}" for i in range(2) for j in range(3))}
    names = [g.name for g in group(items, modules, (), "Model")]
    assert names == ["stem", "blocks.0", "blocks.1.f.0", "blocks.1.f.1", "head"]


def test_idle_layers_join_the_neighbour_to_which_more_is_sent():
    items = [item("a", 1), item("pool", 2, nbytes=2, works=False), item("b", 3)]
    assert named(group(items, PLAIN, (), "Model")) == [("a", 0, 2), ("b", 2, 3)]
    items = [item("a", 1, nbytes=2), item("up", 2, works=False), item("b", 3)]
    assert named(group(items, PLAIN, (), "Model")) == [("a", 0, 1), ("b", 1, 3)]


def test_a_module_that_is_called_twice_has_two_names():
    items = [item("a", 1), item("b", 2), Item(("a@1",), (3,))]
    assert [g.name for g in group(items, PLAIN, (), "Model")] == ["a", "b", "a#2"]


def test_a_model_without_modules_is_one_layer():
    assert named(group([item("", 1), item("", 2)], PLAIN, (), "Model")) == [("Model", 0, 2)]
