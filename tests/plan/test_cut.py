"""What enters and leaves each stage of random chains with skips, and which of them may be cut where."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipetrain.network.chain import Chain, Pop, Stash
from pipetrain.network.network import INPUT, Made
from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan.allowed import cuts_that_may_be, refuse_changing, refuse_cuts
from pipetrain.plan.balance import lighter_cuts
from pipetrain.plan.cut import Cut, copies_output, cut_layers
from pipetrain.plan.estimate import Layer, estimate
from tests.support.models import Join, Pair
from tests.support.refusals import outcome, refusal

steady = settings(derandomize=True, deadline=None, max_examples=40)
EXAMPLE = ValueSpec((TensorSpec((3,), torch.float32),))
ENTRY = EXAMPLE.of(2)


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


def apart(model: nn.Sequential, joined: Cut, x: Tensor) -> Tensor:
    """Run the stages as ranks would: what goes over a route is a tensor of its own."""
    arrived = {(0, Made(INPUT, 0)): x.clone()}
    for stage, slice in enumerate(joined.slices):
        left = Chain(model).part(slice)(*(arrived[stage, value] for value in slice.enters))
        made = dict(zip(slice.leaves, left, strict=True))
        for route in joined.routes_from[stage]:
            arrived |= {(route.target, value): made[value].clone() for value in route.values}
    return left[0]


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
    assert said is None or any(layer.writes_input for layer in layers)


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
    assert refused(layers(), [2]).endswith("choose a partition that does not cut before layer 2")
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


@pytest.mark.parametrize("what", ["tensors", "gradients"])
def test_what_changes_with_the_size_is_refused(what):
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
            if what == "tensors":
                return x if len(x) == 2 else (x,)
            return x if len(x) == 2 else x.detach() + 1

    class Either(nn.Module):
        def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor:
            return x if isinstance(x, Tensor) else x[0]

    model = nn.Sequential(nn.Linear(3, 3), Changes(), Either(), nn.Linear(3, 3))
    entries = [ValueSpec((TensorSpec((n, 3), torch.float32),)) for n in (2, 3)]
    sizes = [estimate(copy.deepcopy(model), entry) for entry in entries]
    reason = "it is one tensor or a tuple" if what == "tensors" else "gradients are needed there"
    assert refusal(lambda: refuse_changing(sizes, [2])) == (
        f"whether {reason} behind layer 1 (1) changes with the size of a microbatch, or in evaluation; "
        f"choose a partition that does not cut before layer 2"
    )


class HandOn(nn.Module):
    """Works on the first tensor and hands the others on, as a chain that carries its skips by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (self.linear(tensors[0]), *tensors[1:])


class Keep(HandOn):
    """Keeps what it returns, as a layer that changes it in its next forward."""

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.kept = tensors[1] + 1
        return (self.linear(tensors[0]), self.kept, tensors[2])


@pytest.mark.parametrize(("first", "kept"), [(HandOn, False), (Keep, True)])
def test_what_a_layer_keeps_is_known_behind_many_that_hand_it_on(first, kept):
    """Found once a layer: by every way that a tensor may have taken, it would be 3^40 looks."""
    model = nn.Sequential(first(), *(HandOn() for _ in range(40)))
    entry = ValueSpec((TensorSpec((4,), torch.float32),) * 3, single=False).of(2)
    layers = estimate(model, entry)
    leaves = tuple(Made(40, number) for number in range(3))
    assert copies_output(layers, leaves, 0, 41) is kept
    assert not copies_output(layers, leaves, 1, 41)  # a copy came from another stage


class Plus(nn.Module):
    """The sum of two tensors."""

    def forward(self, tensors: tuple[Tensor, Tensor]) -> Tensor:
        return tensors[0] + tensors[1]


def skipping() -> nn.Sequential:
    """Layers 0 to 6: linear, Stash, linear, linear, Pop, join, linear."""
    stash, (a, b, c, d) = Stash(), (nn.Linear(4, 4) for _ in range(4))
    return nn.Sequential(a, stash, b, c, Pop(stash), Plus(), d)


@pytest.mark.parametrize(
    ("cuts", "lighter"),
    [
        ([2, 3, 5], [2, 3, 4]),  # behind the Pop the skip would travel twice
        ([2, 5], [2, 5]),  # the stage of the Pop has it anyway
        ([4], [4]),
        ([4, 5], [4, 5]),  # the stage between would be empty
        ([3, 6], [3, 6]),  # no layer there only hands on
    ],
)
def test_a_cut_is_moved_to_where_fewer_bytes_cross(cuts, lighter):
    entry = ValueSpec((TensorSpec((4,), torch.float32),)).of(2)
    assert lighter_cuts(estimate(skipping(), entry), cuts, entry) == lighter
