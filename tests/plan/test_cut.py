"""What enters and leaves each stage, what stages hand each other, and which cuts are refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from pipetrain.network.chain import Chain, Pop, Stash
from pipetrain.network.network import INPUT, Made
from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan.cut import Route, copies_output, cut_layers, cuts_that_may_be, divide, merge, refuse_cuts
from pipetrain.plan.estimate import estimate
from tests.support.chains import ENTRY, EXAMPLE, Into, apart, cut_chains, stage_of, steady
from tests.support.models import Join
from tests.support.refusals import outcome, refusal

FLOAT = TensorSpec((2, 3), torch.float32)
MASK = TensorSpec((2, 3), torch.bool)


@steady
@given(cut_chains())
def test_every_value_enters_where_it_is_used_from_where_it_is_made(case):
    _, layers, cuts = case
    joined = cut_layers({2: layers}, cuts, EXAMPLE)
    used: list[dict[Made, bool]] = [{} for _ in range(len(cuts) + 1)]  # from elsewhere: with a gradient?
    used[0][Made(INPUT, 0)] = False
    for index, layer in enumerate(layers):
        here = stage_of(cuts, index)
        for value, reached in zip(layer.takes, layer.reached, strict=True):
            if value.layer != INPUT and stage_of(cuts, value.layer) != here:
                used[here][value] = used[here].get(value, False) or reached
    for stage, slice in enumerate(joined.slices):
        assert slice.enters == tuple(sorted(used[stage]))
        assert slice.enters_grad.needs == tuple(used[stage][value] for value in slice.enters)
        made = [ENTRY if v.layer == INPUT else layers[v.layer].output for v in slice.enters]
        specs = tuple(of.specs[v.number] for of, v in zip(made, slice.enters, strict=True))
        assert joined.entering(stage, 2) == specs
    for stage, slice in enumerate(joined.slices[:-1]):
        later = {v for taken in used[stage + 1 :] for v in taken if stage_of(cuts, v.layer) == stage}
        assert slice.leaves == tuple(sorted(later))
        wanted = tuple(any(taken.get(v, False) for taken in used) for v in slice.leaves)
        assert slice.leaves_grad.needs == wanted
    assert joined.slices[-1].leaves == (Made(len(layers) - 1, 0),)
    assert [(slice.start, slice.end) for slice in joined.slices] == list(pairwise([0, *cuts, len(layers)]))


@steady
@given(cut_chains())
def test_routes_lead_from_each_maker_to_each_user_and_carry_the_same_values(case):
    _, layers, cuts = case
    joined = cut_layers({2: layers}, cuts, EXAMPLE)
    needed = {
        (stage_of(cuts, value.layer), stage_of(cuts, index))
        for index, layer in enumerate(layers)
        for value in layer.takes
        if value.layer != INPUT
    }
    assert joined.edges == sorted(edge for edge in needed if edge[0] != edge[1])
    for route in joined.routes:
        assert route.values
        assert set(route.values) <= set(joined.slices[route.source].leaves)
    for stage in range(1, len(cuts) + 1):  # each value comes by one route
        came = [value for route in joined.routes_into[stage] for value in route.values]
        assert sorted(came) == list(joined.slices[stage].enters)


class HandOn(nn.Module):
    """Works on the first tensor and hands the others on, as a chain that carries its skips by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (self.linear(tensors[0]), *tensors[1:])


class Keep(HandOn):
    """Keeps what it returns, as a layer that changes it in its next forward."""

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.kept = tensors[1] + 1
        return (self.linear(tensors[0]), self.kept, tensors[2])


@pytest.mark.parametrize(("first", "kept"), [(HandOn, False), (Keep, True)])
def test_what_a_layer_keeps_is_known_behind_those_that_hand_it_on(first, kept):
    layers = estimate(nn.Sequential(first(), HandOn(), HandOn()), ValueSpec(EXAMPLE.specs * 3, False).of(2))
    leaves = tuple(Made(2, number) for number in range(3))
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
CUT = cut_layers({2: estimate(model(), ENTRY)}, [2, 5, 7], EXAMPLE)


def numbered(n: int, start: int = 0) -> tuple[Tensor, ...]:
    return tuple(torch.full((2, 3), float(start + k)) for k in range(n))


def values(messages: list[tuple[Tensor, ...]]) -> list[list[float]]:
    return [[float(t.flatten()[0]) for t in tensors] for tensors in messages]


def test_the_routes_can_be_seen():
    pair, one = (Made(1, 0), Made(1, 1)), Made(3, 0)
    assert CUT.routes == (
        Route(0, 1, pair, (True, False)),
        Route(0, 3, pair, (True, False)),
        Route(1, 2, (one, Made(4, 0)), (True, True)),
        Route(2, 3, (Made(6, 0),), (True,)),
    )
    assert [slice.enters for slice in CUT.slices[1:]] == [pair, (one, Made(4, 0)), (*pair, Made(6, 0))]


@pytest.mark.parametrize(
    ("stage", "outputs", "on", "back"),
    [
        # Each later stage gets what it uses; only gradients that are needed go back, and the mask has none.
        (0, 2, [[0, 1], [0, 1]], []),
        (1, 2, [[0, 1]], [[0]]),
        (2, 1, [[0]], [[0, 1]]),
        (3, 0, [], [[0], [1]]),
    ],
)
def test_each_stage_is_handed_what_it_uses_and_handed_back_what_is_needed(stage, outputs, on, back):
    into, out = CUT.routes_into[stage], CUT.routes_from[stage]
    assert values(divide(numbered(outputs), [route.values for route in out])) == on
    grads = numbered(len({value for route in into for value in route.returned}))
    assert values(divide(grads, [route.returned for route in into])) == back


def test_what_enters_is_in_its_order_whatever_route_it_came_by():
    arrived = zip(CUT.routes_into[3], (numbered(2, start=10), numbered(1, start=20)), strict=True)
    assert values([merge((route.values, tensors) for route, tensors in arrived)]) == [[10, 11, 20]]
    with pytest.raises(ValueError, match="zip"):  # fewer tensors than planned
        merge((route.values, numbered(1)) for route in CUT.routes_into[3])


def test_the_gradients_of_a_value_that_two_stages_use_are_added_and_what_has_arrived_stays():
    """It may be a buffer of the channel, or a gradient that another stage of this rank still holds."""
    kept = [numbered(1, start=1), numbered(1, start=2)]
    (grad,) = merge(zip([route.returned for route in CUT.routes_from[0]], kept, strict=True))
    assert torch.equal(grad, torch.full((2, 3), 3.0))
    assert values(kept) == [[1], [2]]
    assert merge([]) == ()


def test_a_message_s_tensors_are_planned():
    planned = {(0, 1): (FLOAT, MASK), (0, 3): (FLOAT, MASK), (1, 2): (FLOAT,) * 2, (2, 3): (FLOAT,)}
    planned |= {(1, 0): (FLOAT,), (3, 0): (FLOAT,), (2, 1): (FLOAT,) * 2, (3, 2): (FLOAT,)}
    assert {edge: CUT.message(edge, 2) for edge in planned} == planned


def test_an_evaluation_hands_on_and_takes_no_gradient():
    evaluated = cut_layers({2: estimate(model(), ENTRY, training=False)}, [2, 5, 7], EXAMPLE)
    assert [(r.edge, r.values, r.returned) for r in evaluated.routes] == [
        (r.edge, r.values, ()) for r in CUT.routes
    ]


@steady
@given(cut_chains())
def test_what_may_be_cut_computes_what_one_process_does(case):
    """Layers that write in place are refused where a user in another stage would not see it."""
    model, layers, cuts = case
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        same = torch.equal(apart(model, cut_layers({2: layers}, cuts, EXAMPLE), x), model(x.clone()))
    said = outcome(lambda: refuse_cuts(Chain(model), layers, cuts))
    assert same or "modifies in place" in str(said)
    assert said is None or any(layer.writes for layer in layers)


def refused(layers: list[nn.Module], cuts: list[int]) -> str:
    model = nn.Sequential(*layers)
    estimated = estimate(copy.deepcopy(model), ENTRY)
    return refusal(lambda: refuse_cuts(Chain(model), estimated, cuts))


def in_place(kept: Stash) -> list[nn.Module]:
    return [nn.Linear(3, 3), kept, nn.ReLU(inplace=True), nn.Linear(3, 3), Pop(kept), Join()]


def allowed(layers: list[nn.Module], cuts: list[int]) -> bool:
    """Whether the stages compute what one process does, where that is not refused."""
    model, x = nn.Sequential(*layers), torch.randn(2, 3)
    estimated = estimate(copy.deepcopy(model), ENTRY)
    refuse_cuts(Chain(model), estimated, cuts)
    with torch.no_grad():
        return torch.equal(apart(model, cut_layers({2: estimated}, cuts, EXAMPLE), x), model(x.clone()))


def test_a_value_that_is_modified_by_another_stage_before_its_last_user_is_refused():
    for cuts in ([2, 3], [2, 4]):
        assert refused(in_place(Stash()), cuts) == (
            "layer 2 (2) modifies in place what comes from layer 1, and layer 4 (4), which uses it later, "
            "would not see that over a cut: let it make a new tensor, or keep both in one stage by partition="
        )
    # In the stage of its user, or before it leaves its own.
    assert all(allowed(in_place(Stash()), cuts) for cuts in ([1], [2], [3], [4], [5], [1, 5], [3, 4], [2, 5]))


def test_two_that_are_kept_of_one_tensor_are_two_over_a_cut():
    def layers() -> list[nn.Module]:
        a, b = Stash(), Stash()
        return [nn.Linear(3, 3), a, b, nn.Linear(3, 3), Pop(a), Swap(), Into(), Pop(b), Join()]

    for cuts in ([3], [4], [6], [3, 5]):
        assert "modifies in place what comes from layer 2, and layer 7 (7), which" in refused(layers(), cuts)
    assert all(allowed(layers(), cuts) for cuts in ([1], [7], [8]))


class Swap(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[1], pair[0]


class Real(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x).mean(2) if x.is_complex() else x


class Spread(nn.Module):
    """(x, complex) -> x."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1].real


class Complex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x)


def test_a_complex_skip_is_refused_wherever_it_would_cross():
    def layers() -> list[nn.Module]:
        kept = Stash()
        return [nn.Linear(3, 3), Complex(), kept, Real(), nn.Linear(3, 3), Pop(kept), Spread()]

    for cut in (4, 5):
        assert refused(layers(), [cut]) == (
            "layer 2 (2) returns complex64[2, 3], and complex tensors cannot cross a cut; choose a partition "
            "that does not cut between layers 2 and 5"
        )
    assert refused(layers(), [2]).endswith("does not cut between layers 1 and 2")
    model = nn.Sequential(*layers())
    assert cuts_that_may_be(Chain(model), estimate(copy.deepcopy(model), ENTRY)) == [1]


class Keeps(nn.Module):
    """Returns its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 0, self.table


class FirstOf(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * 2


class WritesLast(nn.Module):
    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return tensors[0] + tensors[-1].add_(1)


def test_a_tensor_that_a_layer_keeps_is_not_written_to_by_another_stage():
    """In one process the buffer would change; over a cut a copy of it."""

    def layers() -> list[nn.Module]:
        kept = Stash()
        return [nn.Linear(3, 3), Keeps(), kept, FirstOf(), nn.Linear(3, 3), Pop(kept), WritesLast()]

    for cut in (4, 5, 6):
        assert "keeps its output, which a later layer modifies; choose" in refused(layers(), [cut])
