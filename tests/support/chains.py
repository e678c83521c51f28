"""Random chains with skips and layers that write in place, and where to cut them."""

from __future__ import annotations

import copy

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipetrain.model.chain import Chain, Pop, Stash
from pipetrain.model.network import INPUT, ValueId
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.plan.cost_estimate import Layer, estimate
from pipetrain.plan.cut import Cut
from tests.support.models import Pair

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
