from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import Action, Op, ScheduleError
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import lower
from pipetrain.schedule.policy import ForwardBackward, Wait, play
from pipetrain.schedule.programs import layer_dist, pipedream
from pipetrain.schedule.simulate import Cost, simulate, unit_cost


def picture(
    in_flight: int, ranks: int, batches: int, cost: Cost = unit_cost, buffer_size: int = 2
) -> list[str]:
    program = play(ForwardBackward(in_flight), ranks, batches, 1, buffer_size=buffer_size, cost=cost)
    return [" ".join(f"{a.op}{a.mb}" for a in actions if a.op is not Op.STEP) for actions in program]


def test_the_first_stage_goes_ahead_until_a_gradient_comes() -> None:
    assert picture(8, 2, 5) == ["F0 F1 F2 F3 F4 B0 B1 B2 B3 B4", "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"]
    assert picture(2, 2, 5) == ["F0 F1 B0 F2 B1 F3 B2 F4 B3 B4", "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"]


def test_no_forward_without_room_for_what_it_makes() -> None:
    """A slow last stage: one message is taken, one waits there and one here, and no more is begun."""

    def slow(action: Action) -> float:
        return 100.0 if action.stage == 1 else 1.0

    assert picture(8, 2, 6, slow, buffer_size=1)[0].startswith("F0 F1 F2 B0 F3 B1")
    assert picture(8, 2, 6, slow, buffer_size=4)[0].startswith("F0 F1 F2 F3 F4 F5 B0")


@pytest.mark.parametrize("ranks", range(1, 6))
def test_with_one_in_flight_it_is_layer_dist(ranks: int) -> None:
    for batches, m in [(1, 1), (3, 1), (2, 4)]:
        assert ForwardBackward(1)(ranks, batches, m) == layer_dist(ranks, batches, m)


def test_one_stage_alone_is_layer_dist() -> None:
    assert ForwardBackward(8)(1, 3, 4) == layer_dist(1, 3, 4)


@settings(max_examples=200, deadline=None)
@given(
    ranks=st.integers(1, 6),
    batches=st.integers(1, 6),
    m=st.integers(1, 5),
    in_flight=st.integers(1, 9),
    buffer_size=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_whatever_the_timing_it_is_sound_ends_and_keeps_its_bounds(
    ranks: int, batches: int, m: int, in_flight: int, buffer_size: int, seed: int
) -> None:
    chance = random.Random(seed)
    policy = ForwardBackward(in_flight)
    program = lower(
        play(
            policy,
            ranks,
            batches,
            m,
            buffer_size=buffer_size,
            cost=lambda action: chance.choice([0, 1, 1, 3, 20]),
        )
    )
    check(program, batches, m)
    run = simulate(program, m, buffer_size=buffer_size)
    for stage in range(ranks):
        bounds = policy.bounds(stage, ranks, batches, m)
        assert run.activations[stage] <= bounds.activations
        assert run.versions[stage] <= bounds.versions
        assert run.staleness[stage] <= bounds.staleness


def test_the_bounds_are_reached() -> None:
    """A last stage that is slow at first lets the first one go ahead as far as it may."""
    for in_flight, m in product((2, 3, 5), (1, 2, 4)):
        policy = ForwardBackward(in_flight)

        def cost(action: Action) -> float:
            return 1000.0 if action.stage == 1 and action.mb == 0 else 1.0

        run = simulate(lower(play(policy, 2, 12, m, buffer_size=8, cost=cost)), m, buffer_size=8)
        bounds = policy.bounds(0, 2, 12, m)
        assert (run.activations[0], run.staleness[0]) == (bounds.activations, bounds.staleness)


def test_it_gains_where_times_vary() -> None:
    """On paper, with times that vary by half: the same durations for both, of 64 microbatches on 4 ranks."""
    chance = random.Random(0)
    taken = {
        (stage, op, mb): chance.uniform(0.5, 1.5) for stage in range(4) for op in "FB" for mb in range(64)
    }

    def cost(action: Action) -> float:
        return taken.get((action.stage, str(action.op), action.mb), 0.0)

    static = simulate(lower(pipedream(4, 64, 1)), 1, cost=cost).makespan
    decided = simulate(lower(play(ForwardBackward(8), 4, 64, 1, cost=cost)), 1, cost=cost).makespan
    assert decided < 0.95 * static


def test_what_it_waits_for() -> None:
    class Nothing:
        def arrived(self, receive: Action) -> bool:
            return False

        def room(self, send: Action) -> bool:
            return False

    first, middle = (ForwardBackward(2).lowered(stage, 3, lambda: 4, 1, Nothing()) for stage in (0, 1))
    assert str(next(first)) == "0SEND_F0"
    assert next(middle) == Wait((Action(1, Op.RECV_F, 0),))
    routes = [(0, 1), (0, 2), (1, 2)]
    first, last = (ForwardBackward(2).lowered(stage, 3, lambda: 4, 1, Nothing(), routes) for stage in (0, 2))
    assert str(next(first)) == "0SEND_F0 or 0SEND_F0>2"
    assert str(next(last)) == "2RECV_F0>0 or 2RECV_F0"


@pytest.mark.parametrize("in_flight", [0, -1, 1.5, "x", None, True])
def test_settings_that_cannot_work_are_refused(in_flight: object) -> None:
    with pytest.raises(ScheduleError, match=f"schedule fbp needs in_flight >= 1; got in_flight={in_flight}"):
        ForwardBackward(in_flight)(2, 1, 1)  # type: ignore[arg-type]


def test_a_message_that_comes_between_two_looks_is_no_trouble() -> None:
    """A view that sees nothing once, then everything: the last stage has nothing to send on."""

    class Changing:
        asked = 0

        def arrived(self, receive: Action) -> bool:
            self.asked += 1
            return self.asked > 1

        def room(self, send: Action) -> bool:
            return True

    decided = ForwardBackward(2).lowered(1, 2, lambda: 1, 1, Changing())
    assert [str(next(decided)) for _ in range(4)] == ["1RECV_F0", "1RECV_F0", "1F0@0", "1B0@0"]
