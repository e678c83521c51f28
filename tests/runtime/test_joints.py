"""What leaves a stage is divided into messages, and what enters one is joined of them, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipetrain.network.boundary import Boundary, TensorSpec
from pipetrain.network.chain import Pop, Stash
from pipetrain.network.network import Made
from pipetrain.plan.crossing import seams
from pipetrain.plan.estimate import estimate
from pipetrain.runtime.channel import Edge
from pipetrain.runtime.joints import Joints

FLOAT = TensorSpec((2, 3), torch.float32)
MASK = TensorSpec((2, 3), torch.bool)
ENTRY = Boundary((FLOAT,), needs_grad=(False,), requires_grad=(False,))


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
JOINED = seams(estimate(model(), ENTRY), [2, 5, 7], ENTRY)
JOINTS = Joints(JOINED)


def numbered(n: int, start: int = 0) -> tuple[Tensor, ...]:
    return tuple(torch.full((2, 3), float(start + k)) for k in range(n))


def values(messages: dict[Edge, tuple[Tensor, ...]]) -> dict[Edge, list[float]]:
    return {edge: [float(t.flatten()[0]) for t in tensors] for edge, tensors in messages.items()}


def test_the_joints_can_be_seen():
    assert [slice.enters for slice in JOINED.slices[1:]] == [
        (Made(1, 0), Made(1, 1)),
        (Made(3, 0), Made(4, 0)),
        (Made(1, 0), Made(1, 1), Made(6, 0)),
    ]
    assert JOINTS.routes == [(0, 1), (0, 3), (1, 2), (2, 3)]


def test_each_later_stage_is_handed_what_it_uses():
    assert values(dict(JOINTS.handed_on(0, numbered(2)))) == {(0, 1): [0, 1], (0, 3): [0, 1]}
    assert values(dict(JOINTS.handed_on(1, numbered(2)))) == {(1, 2): [0, 1]}
    assert values(dict(JOINTS.handed_on(2, numbered(1)))) == {(2, 3): [0]}
    assert dict(JOINTS.handed_on(3, numbered(1))) == {}


def test_what_enters_is_in_its_order_whatever_route_it_came_by():
    arrived = {(0, 3): numbered(2, start=10), (2, 3): numbered(1, start=20)}
    joined = JOINTS.inputs(3, arrived.pop)
    assert [float(t[0, 0]) for t in joined] == [10, 11, 20]
    assert not arrived


def test_only_gradients_that_are_needed_go_back():
    """The mask has none."""
    assert values(dict(JOINTS.handed_back(3, numbered(2)))) == {(3, 0): [0], (3, 2): [1]}
    assert values(dict(JOINTS.handed_back(2, numbered(2)))) == {(2, 1): [0, 1]}
    assert values(dict(JOINTS.handed_back(1, numbered(1)))) == {(1, 0): [0]}
    assert dict(JOINTS.handed_back(0, ())) == {}


def test_the_gradients_of_a_value_that_two_stages_use_are_added():
    arrived = {(1, 0): numbered(1, start=1), (3, 0): numbered(1, start=2)}
    (grad,) = JOINTS.output_grads(0, arrived.pop)
    assert torch.equal(grad, torch.full((2, 3), 3.0))
    assert not arrived
    assert [float(t[0, 0]) for t in JOINTS.output_grads(1, {(2, 1): numbered(2, start=5)}.pop)] == [5, 6]
    assert JOINTS.output_grads(3, {}.pop) == ()


def test_adding_does_not_change_what_has_arrived():
    """It may be a buffer of the channel, or a gradient that another stage of this rank still holds."""
    arrived = {(1, 0): numbered(1, start=1), (3, 0): numbered(1, start=2)}
    kept = [arrived[1, 0][0], arrived[3, 0][0]]
    JOINTS.output_grads(0, arrived.pop)
    assert [float(t[0, 0]) for t in kept] == [1, 2]


@pytest.mark.parametrize(
    ("edge", "specs"),
    [
        ((0, 1), (FLOAT, MASK)),
        ((0, 3), (FLOAT, MASK)),
        ((1, 2), (FLOAT, FLOAT)),
        ((1, 0), (FLOAT,)),
        ((3, 0), (FLOAT,)),
        ((3, 2), (FLOAT,)),
    ],
)
def test_a_message_s_tensors_are_planned(edge, specs):
    assert JOINTS.specs(edge, JOINED.entries[max(edge)]) == specs


def test_a_message_of_fewer_tensors_than_planned_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        JOINTS.inputs(3, {(0, 3): numbered(1), (2, 3): numbered(1)}.pop)


def test_an_evaluation_hands_on_and_takes_no_gradient():
    evaluated = seams(estimate(model(), ENTRY, training=False), [2, 5, 7], ENTRY)
    joints = Joints(evaluated)
    assert joints.routes == JOINTS.routes
    assert values(dict(joints.handed_on(0, numbered(2)))) == {(0, 1): [0, 1], (0, 3): [0, 1]}
    assert joints.specs((0, 3), evaluated.entries[3]) == (FLOAT, MASK)
