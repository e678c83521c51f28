"""What enters and leaves each stage, what stages hand each other, and which cuts are refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipetrain.model.chain import Chain, Pop, Stash
from pipetrain.model.network import INPUT, ValueId
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.plan.cost_estimate import Layer, estimate
from pipetrain.plan.cut import (
    Cut,
    Route,
    copies_output,
    cut_layers,
    cuts_that_may_be,
    divide,
    merge,
    refuse_cuts,
)
from tests.support.edge_case_models import Lambda
from tests.support.models import Join, Pair
from tests.support.refusals import outcome, refusal

steady = settings(derandomize=True, deadline=None, max_examples=40)
EXAMPLE = ValueSpec((TensorSpec((3,), torch.float32),))
ENTRY = EXAMPLE.of(Size(2))


class Into(nn.Module):
    """(x, more, ...) -> x, to which all others were added in place."""

    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor:
        first, *others = tensors
        for other in others:
            first.add_(other)
        return first


class Sum(nn.Module):
    """Any tensors -> half of their sum."""

    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(tensors).sum(0) / 2


STEPS = st.sampled_from(["linear", "pair", "view", "in place", "in place", "stash", "stash", "pop", "pop"])
IN_PLACE = st.booleans()


@st.composite
def chains(draw: st.DrawFn) -> nn.Sequential:
    """Skips of one tensor or two, that overlap, nest or share a value, and layers that write in place."""
    layers: list[nn.Module] = [nn.Linear(3, 3)]
    open_skips: list[Stash] = []

    def pop(stash: Stash) -> None:
        open_skips.remove(stash)
        layers.extend([Pop(stash), Into() if draw(IN_PLACE) else Sum()])

    for step in draw(st.lists(STEPS, max_size=9)):
        if step == "linear":
            layers.append(nn.Linear(3, 3))
        elif step == "view":
            layers.append(nn.Identity())
        elif step == "in place":
            layers.append(nn.LeakyReLU(0.5, inplace=True))
        elif step == "stash":
            open_skips.append(Stash())
            layers.append(open_skips[-1])
        elif step == "pair":
            pair = Stash()
            layers.extend([Pair(nn.Linear(3, 3)), pair, Sum()])
            open_skips.append(pair)
        elif open_skips:
            pop(draw(st.sampled_from(open_skips)))
    while open_skips:
        pop(draw(st.sampled_from(open_skips)))
    layers.append(nn.Linear(3, 3))
    return nn.Sequential(*layers)


@st.composite
def cut_chains(draw: st.DrawFn) -> tuple[nn.Sequential, list[Layer], list[int]]:
    model = draw(chains())
    cuts = sorted(draw(st.sets(st.integers(1, len(model) - 1), max_size=3)))
    with torch.random.fork_rng():
        return model, estimate(copy.deepcopy(model), ENTRY), cuts


def stage_of(cuts: list[int], layer: int) -> int:
    return sum(cut <= layer for cut in cuts)


def apart(model: nn.Sequential, joined: Cut, x: Tensor) -> Tensor:
    """Run the stages as ranks would: what goes over a route is a tensor of its own."""
    arrived = {(0, ValueId(INPUT, 0)): x.clone()}
    for stage, slice in enumerate(joined.slices):
        left = Chain(model).part(slice)(*(arrived[stage, value] for value in slice.enters))
        made = dict(zip(slice.leaves, left, strict=True))
        for route in joined.routes_from[stage]:
            arrived |= {(route.target, value): made[value].clone() for value in route.values}
    return left[0]


FLOAT = TensorSpec((2, 3), torch.float32)
MASK = TensorSpec((2, 3), torch.bool)


@steady
@given(cut_chains())
def test_values_enter_where_they_are_used_and_what_may_be_cut_computes_what_one_process_does(
    case,
):
    """Layers that write in place are refused where a user in another stage would not see it."""
    model, layers, cuts = case
    joined = cut_layers({Size(2): layers}, cuts, EXAMPLE)
    used: list[dict[ValueId, bool]] = [{} for _ in range(len(cuts) + 1)]  # from elsewhere: with a gradient?
    used[0][ValueId(INPUT, 0)] = False
    for index, layer in enumerate(layers):
        here = stage_of(cuts, index)
        for value, reached in zip(layer.takes, layer.reached, strict=True):
            if value.layer != INPUT and stage_of(cuts, value.layer) != here:
                used[here][value] = used[here].get(value, False) or reached
    for stage, slice in enumerate(joined.slices):
        assert slice.enters == tuple(sorted(used[stage]))
        assert slice.enters_grad.needs == tuple(used[stage][value] for value in slice.enters)
        came = [value for route in joined.routes_into[stage] for value in route.values]
        assert sorted(came) == [value for value in slice.enters if value.layer != INPUT]
        wanted = tuple(any(taken.get(v, False) for taken in used) for v in slice.leaves)
        assert stage == len(cuts) or slice.leaves_grad.needs == wanted
    assert joined.edges == sorted(joined.edges)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        same = torch.equal(apart(model, joined, x), model(x.clone()))
    said = outcome(lambda: refuse_cuts(Chain(model), layers, cuts))
    assert same or "modifies in place" in str(said)
    assert said is None or any(layer.writes for layer in layers)


class Keep(nn.Module):
    """Keeps what it returns, as a layer that changes it in its next forward."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        self.kept = pair[1] + 1
        return pair[0] * 2, self.kept


HAND_ON = Lambda(lambda pair: (pair[0] * 2, pair[1]))


@pytest.mark.parametrize(("first", "kept"), [(HAND_ON, False), (Keep(), True)])
def test_what_a_layer_keeps_is_known_behind_those_that_hand_it_on(first, kept):
    layers = estimate(nn.Sequential(first, HAND_ON), ValueSpec(EXAMPLE.specs * 2, False).of(Size(2)))
    leaves = tuple(ValueId(1, number) for number in range(2))
    assert copies_output(layers, leaves, 0) is kept
    assert not copies_output(layers, leaves, 1)  # a copy came from another stage


# Messages, by hand


class Masked(nn.Linear):
    """x -> (layer(x), x > 0): a number with a gradient and one without."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x > 0


class Use(nn.Module):
    """Numbers and masks -> their product."""

    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([t.float() for t in tensors]).prod(0)


def model() -> nn.Sequential:
    """Layers 1 and 2 keep a pair and a tensor."""
    pair, one = Stash(), Stash()
    return nn.Sequential(
        *(Masked(3, 3), pair, Use(), one, nn.Linear(3, 3), Pop(one), Use(), Pop(pair), Use(), nn.Linear(3, 3))
    )


# 0: Masked, the pair; 1: Use, one, Linear; 2: Pop(one), Use; 3: Pop(pair) and the rest.
CUT = cut_layers({Size(2): estimate(model(), ENTRY)}, [2, 5, 7], EXAMPLE)


def test_the_routes_and_the_tensors_of_their_messages_can_be_seen():
    """Each later stage gets what it uses; only gradients that are needed go back, and the mask has none."""
    pair, one = (ValueId(1, 0), ValueId(1, 1)), ValueId(3, 0)
    assert CUT.routes == (
        Route(0, 1, pair, (True, False)),
        Route(0, 3, pair, (True, False)),
        Route(1, 2, (one, ValueId(4, 0)), (True, True)),
        Route(2, 3, (ValueId(6, 0),), (True,)),
    )
    assert [slice.enters for slice in CUT.slices[1:]] == [pair, (one, ValueId(4, 0)), (*pair, ValueId(6, 0))]
    planned = {(0, 1): (FLOAT, MASK), (0, 3): (FLOAT, MASK), (1, 2): (FLOAT,) * 2, (2, 3): (FLOAT,)}
    planned |= {(1, 0): (FLOAT,), (3, 0): (FLOAT,), (2, 1): (FLOAT,) * 2, (3, 2): (FLOAT,)}
    assert {edge: CUT.message(edge, Size(2)) for edge in planned} == planned
    evaluated = cut_layers({Size(2): estimate(model(), ENTRY, training=False)}, [2, 5, 7], EXAMPLE)
    assert [(r.edge, r.values, r.returned) for r in evaluated.routes] == [
        (r.edge, r.values, ()) for r in CUT.routes
    ]


def numbered(n: int, start: int = 0) -> tuple[Tensor, ...]:
    return tuple(torch.full((2, 3), float(start + k)) for k in range(n))


def values(messages: list[tuple[Tensor, ...]]) -> list[list[float]]:
    return [[float(t.flatten()[0]) for t in tensors] for tensors in messages]


def test_what_leaves_is_divided_among_routes_and_what_enters_is_merged_in_its_order():
    """What has arrived may be a buffer of the channel, or a gradient that another stage here still holds."""
    into, out = CUT.routes_into[3], CUT.routes_from[0]
    assert values(divide(numbered(2), [route.values for route in out])) == [[0, 1], [0, 1]]
    assert values(divide(numbered(2), [route.returned for route in into])) == [[0], [1]]
    arrived = zip(into, (numbered(2, start=10), numbered(1, start=20)), strict=True)
    assert values([merge((route.values, tensors) for route, tensors in arrived)]) == [[10, 11, 20]]
    kept = [numbered(1, start=1), numbered(1, start=2)]  # gradients of a value that two stages use
    assert values([merge(zip([route.returned for route in out], kept, strict=True))]) == [[3]]
    assert values(kept) == [[1], [2]]
    with pytest.raises(ValueError, match="zip"):  # fewer tensors than planned
        merge((route.values, numbered(1)) for route in into)


# What is refused


def in_place(kept: Stash, other: Stash) -> list[nn.Module]:
    return [nn.Linear(3, 3), kept, nn.ReLU(inplace=True), nn.Linear(3, 3), Pop(kept), Join()]


def two_names(a: Stash, b: Stash) -> list[nn.Module]:
    """Both are kept of one tensor, and are two over a cut."""
    swap = Lambda(lambda pair: (pair[1], pair[0]))
    return [nn.Linear(3, 3), a, b, nn.Linear(3, 3), Pop(a), swap, Into(), Pop(b), Join()]


def complex_skip(kept: Stash, other: Stash) -> list[nn.Module]:
    whole, real = Lambda(lambda x: torch.complex(x, x)), Lambda(lambda x: torch.view_as_real(x).mean(2))
    spread = Lambda(lambda pair: pair[0] + pair[1].real)
    return [nn.Linear(3, 3), whole, kept, real, nn.Linear(3, 3), Pop(kept), spread]


class Keeps(nn.Module):
    """Returns its buffer, which in one process would change; over a cut a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 0, self.table


def written_buffer(kept: Stash, other: Stash) -> list[nn.Module]:
    first, writes = Lambda(lambda pair: pair[0] * 2), Lambda(lambda of: of[0] + of[-1].add_(1))
    return [nn.Linear(3, 3), Keeps(), kept, first, nn.Linear(3, 3), Pop(kept), writes]


WHY = {
    # In the stage of its user, or before it leaves its own.
    in_place: ([1, 2, 3, 4, 5], [2, 4], "layer 2 (2) modifies in place what layer 4 uses later"),
    two_names: ([1, 2, 7, 8], [4], "layer 6 (6) modifies in place what layer 7 uses later, behind a cut"),
    complex_skip: ([1], [4], "layer 2 (2) returns complex64[2, 3], and complex tensors cannot"),
    written_buffer: ([1], [4], "layer 2 (2) keeps its output, which a later layer modifies"),
}


@pytest.mark.parametrize("build", WHY)
def test_a_cut_is_refused_where_a_stage_would_not_see_what_one_process_does(build):
    may_be, cuts, says = WHY[build]
    network = Chain(nn.Sequential(*build(Stash(), Stash())))
    layers = estimate(copy.deepcopy(network.model), ENTRY)
    assert cuts_that_may_be(network, layers) == may_be
    said = refusal(lambda: refuse_cuts(network, layers, cuts))
    assert says in said
    assert re.search(r": choose a partition that keeps layers \d and \d in one stage$", said)
