"""fbp: what it decides, and what it gains; whole/test_routes.py: that it is sound whatever the timing."""

from __future__ import annotations

import random
from itertools import product

import pytest

from pipetrain.schedule.actions import Action, Op
from pipetrain.schedule.lower import lower
from pipetrain.schedule.policy import ForwardBackward, Wait, play
from pipetrain.schedule.programs import layer_dist, pipedream
from pipetrain.schedule.simulate import simulate


def slow_last(action: Action) -> float:
    return 100.0 if action.stage == 1 else 1.0


def slow_at_first(action: Action) -> float:
    return 1000.0 if action.stage == 1 and action.mb == 0 else 1.0


LAST = "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


@pytest.mark.parametrize(
    ("in_flight", "batches", "options", "first"),
    [
        # The first stage goes ahead until a gradient comes, or so many are open.
        (8, 5, {}, "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"),
        (2, 5, {}, "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"),
        # No forward without room for what it makes: one message is taken, one waits there and one here.
        (8, 6, {"cost": slow_last, "buffer_size": 1}, "F0 F1 F2 B0 F3 B1"),
        (8, 6, {"cost": slow_last, "buffer_size": 4}, "F0 F1 F2 F3 F4 F5 B0"),
    ],
)
def test_the_order_of_two_stages(in_flight: int, batches: int, options: dict, first: str) -> None:
    program = play(ForwardBackward(in_flight), 2, batches, 1, **options)
    order = [" ".join(f"{a.op}{a.mb}" for a in actions if a.op is not Op.STEP) for actions in program]
    assert order[0].startswith(first)
    assert order[1].startswith(LAST)


def test_with_one_in_flight_or_one_stage_it_is_layer_dist() -> None:
    assert ForwardBackward(1)(3, 2, 4) == layer_dist(3, 2, 4)
    assert ForwardBackward(8)(1, 3, 4) == layer_dist(1, 3, 4)


def test_the_bounds_are_reached() -> None:
    """A last stage that is slow at first lets the first one go ahead as far as it may."""
    for in_flight, m in product((2, 5), (1, 4)):
        policy = ForwardBackward(in_flight)
        run = simulate(lower(play(policy, 2, 12, m, buffer_size=8, cost=slow_at_first)), m, buffer_size=8)
        bounds = policy.bounds(0, 2, 12, m)
        assert (run.activations[0], run.staleness[0]) == (bounds.activations, bounds.staleness)


def test_it_gains_where_times_vary() -> None:
    """On paper, with times that vary by half: the same durations for both, of 64 microbatches on 4 ranks."""
    chance = random.Random(0)
    taken = {(s, op, mb): chance.uniform(0.5, 1.5) for s in range(4) for op in "FB" for mb in range(64)}

    def cost(action: Action) -> float:
        return taken.get((action.stage, str(action.op), action.mb), 0.0)

    static = simulate(lower(pipedream(4, 64, 1)), 1, cost=cost).makespan
    decided = simulate(lower(play(ForwardBackward(8), 4, 64, 1, cost=cost)), 1, cost=cost).makespan
    assert decided < 0.95 * static


class Seen:
    """A view that sees nothing for so many looks, then everything; or no room ever."""

    def __init__(self, blind: int, room: bool) -> None:
        self.blind, self._room = blind, room

    def arrived(self, receive: Action) -> bool:
        self.blind -= 1
        return self.blind < 0

    def room(self, send: Action) -> bool:
        return self._room


def test_what_it_waits_for_and_that_a_message_between_two_looks_is_no_trouble() -> None:
    def first(stage: int, routes: list[tuple[int, int]] | None = None) -> Action | Wait:
        return next(ForwardBackward(2).lowered(stage, 3, lambda: 4, 1, Seen(99, False), routes))

    assert str(first(0)) == "0SEND_F0"
    assert first(1) == Wait((Action(1, Op.RECV_F, 0),))
    routes = [(0, 1), (0, 2), (1, 2)]
    assert str(first(0, routes)) == "0SEND_F0 or 0SEND_F0>2"
    assert str(first(2, routes)) == "2RECV_F0>0 or 2RECV_F0"
    decided = ForwardBackward(2).lowered(1, 2, lambda: 1, 1, Seen(1, True))
    assert [str(next(decided)) for _ in range(4)] == ["1RECV_F0", "1RECV_F0", "1F0@0", "1B0@0"]
