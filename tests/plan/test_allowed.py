"""Which cuts are possible: across a refused one, layers would behave otherwise than in one process."""

from __future__ import annotations

import copy

import torch
from hypothesis import given
from torch import Tensor, nn

from pipetrain.network.chain import Chain, Pop, Stash
from pipetrain.plan.allowed import cuts_that_may_be, refuse_cuts
from pipetrain.plan.cut import cut_layers
from pipetrain.plan.estimate import estimate
from tests.support.chains import ENTRY, EXAMPLE, Into, apart, cut_chains, steady
from tests.support.models import Join
from tests.support.refusals import outcome, refusal


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
