"""What a slice of layers is priced at, by hand."""

from __future__ import annotations

import pytest

from pipetrain.network.network import INPUT
from pipetrain.plan.costs import Predictor
from pipetrain.schedule.actions import NO_PEER, Action, Op
from tests.support.profiles import Skip, estimates_of, held_by, layer, predictor_of

# Messages take 1 s and 0.01 s a byte; 4 microbatches.
LAYERS = [
    layer("a", 1, 2, step_s=10, output_bytes=100, gradient_bytes=50, peak_bytes=1),
    layer("b", 2, 3, step_s=20, output_bytes=200, gradient_bytes=200, peak_bytes=30),
    layer("c", 4, 5, state_bytes=300, peak_bytes=2),
]
MODEL = estimates_of(LAYERS, saved=[7, 8, 20], trained=[0, 0, 1000], inputs=9)
TIMED = {"latency_s": 1, "s_per_byte": 0.01}


def predictor(placement: list[int], activations: list[int], versions: list[int]) -> Predictor:
    return predictor_of(LAYERS, placement, held_by(activations, versions), MODEL, **TIMED)


THREE = predictor([0, 1, 2], [3, 2, 1], [3, 2, 1])


def test_a_batch_is_compute_and_messages_of_every_microbatch_and_a_step():
    a_b = (1 + 1.0) + (1 + 0.5)  # forward and back over the cut behind a
    b_c = (1 + 2.0) + (1 + 2.0)
    assert THREE.stage_time(0, 0, 1).batch_s == pytest.approx(4 * (3 + a_b) + 10)
    assert THREE.stage_time(1, 1, 2).batch_s == pytest.approx(4 * (5 + a_b + b_c) + 20)
    assert THREE.stage_time(2, 2, 3).batch_s == pytest.approx(4 * (9 + b_c))
    assert THREE.choice([1, 2]).slowest_s == pytest.approx(THREE.stage_time(1, 1, 2).batch_s)


def test_stages_on_one_rank_send_each_other_nothing():
    alone = predictor([0, 0], [4, 4], [1, 1])
    assert alone.stage_time(0, 0, 1).batch_s == pytest.approx(4 * 3 + 10)
    assert alone.stage_time(1, 1, 3).batch_s == pytest.approx(4 * 14 + 20)


WEIGHTS = 2 * 1000 + 300  # of c: a gradient, and the optimizer's state


def test_what_a_stage_holds():
    # c as the last stage: one microbatch, with what enters and is saved; two messages posted and one that
    # came, two that were sent and one to be sent; the work of c.
    assert THREE.held_bytes(2, 2, 3) == WEIGHTS + 1 * (200 + 20) + 3 * 200 + 3 * 200 + 2
    # a and b as the first of two: three microbatches, with what enters and leaves; what comes back.
    assert THREE.held_bytes(0, 0, 2) == 3 * (9 + 7 + 8 + 200) + 3 * 200 + 30
    whole = 9 + 7 + 8 + 20
    assert predictor([0], [1], [1]).held_bytes(0, 0, 3) == WEIGHTS + whole + 30
    assert predictor([0], [1], [4]).held_bytes(0, 0, 3) == WEIGHTS + 3 * 1000 + whole + 30


def test_a_moving_average_is_held_as_the_weights_are():
    made = predictor_of(LAYERS, [0], held_by([1], [1]), MODEL, averaged=True)
    assert made.held_bytes(0, 0, 3) == WEIGHTS + 1000 + 9 + 7 + 8 + 20 + 30


def test_messages_are_priced_by_their_bytes_on_the_wire():
    held, wire = held_by([3, 2, 1], [3, 2, 1]), {100: (10, 5), 200: (20, 7)}
    coded = predictor_of(LAYERS, [0, 1, 2], held, MODEL, wire, **TIMED)
    a_b, b_c = (1 + 0.10) + (1 + 0.05), (1 + 0.20) + (1 + 0.07)
    assert coded.stage_time(1, 1, 2).batch_s == pytest.approx(4 * (5 + a_b + b_c) + 20)
    assert coded.costs([1, 2])(Action(1, Op.SEND_B, peer=0)) == pytest.approx(1.05)
    # What comes back to a is encoded until it is received.
    assert coded.held_bytes(0, 0, 1) == 3 * (9 + 7 + 100) + 2 * 5 + 100 + 1
    coming, back = 2 * 10 + 100 + 2 * 7 + 200, 2 * 5 + 100
    assert coded.held_bytes(1, 1, 2) == 2 * (100 + 8 + 200) + coming + back + 30


def test_costs_are_what_simulate_asks_for():
    costs = THREE.costs([1, 2])

    def of(stage: int, op: Op) -> float:
        peer = {Op.SEND_F: stage + 1, Op.SEND_B: stage - 1}.get(op, NO_PEER)
        return costs(Action(stage, op, peer=peer))

    assert [of(1, op) for op in (Op.F, Op.R, Op.B, Op.I, Op.W, Op.STEP)] == [2, 2, 3, 1.5, 1.5, 20]
    assert [of(stage, Op.SEND_F) for stage in range(3)] == [2.0, 3.0, 0.0]
    assert [of(stage, Op.SEND_B) for stage in range(3)] == [0.0, 1.5, 3.0]
    assert [of(1, op) for op in (Op.RECV_F, Op.RECV_B, Op.REDUCE)] == [0, 0, 0]
    tied = THREE.costs([1, 2], {0: 30, 2: 30})
    assert [tied(Action(stage, Op.TIE)) for stage in range(3)] == pytest.approx([1 + 0.3, 0, 1 + 0.3])


HALVES = [
    layer("a", 1, 2, recorded_s=1.1, input_s=0, weight_s=2, output_bytes=100, gradient_bytes=50),
    layer("b", 2, 3, recorded_s=2.5, input_s=3, weight_s=0.25, output_bytes=200, gradient_bytes=200),
    layer("c", 4, 5, recorded_s=4.25, input_s=1, weight_s=4.5),
]


def halved(split: bool, frozen: tuple[int, ...] = ()) -> Predictor:
    model, ranks = estimates_of(HALVES, without_gradient=frozen), [0, 0, 0]  # without messages
    return predictor_of(HALVES, ranks, held_by([1] * 3, [1] * 3), model, split=split)


def test_each_half_of_a_backward_costs_what_was_measured_of_it():
    costs, ops = halved(split=True).costs([1, 2]), (Op.F, Op.R, Op.B, Op.I, Op.W)
    # The first stage has no I, so that its W is a whole backward, and nothing is recorded for it.
    assert [costs(Action(0, op)) for op in ops] == [1, 1, 2, 0, 2]
    assert [costs(Action(1, op)) for op in ops] == [2.5, 2.5, 3, 3, 0.25]
    assert [costs(Action(2, op)) for op in ops] == [4.25, 4.25, 5, 1, 4.5]
    assert [halved(split=False).costs([1, 2])(Action(2, op)) for op in ops] == [4, 4, 5, 1, 4.5]


def test_cuts_are_weighed_by_the_halves_where_a_schedule_splits():
    for split, seconds in ((True, [3, 5.75, 9.75]), (False, [3, 5, 9])):
        stages = halved(split).stage_times([1, 2])
        assert [stage.batch_s for stage in stages] == pytest.approx([4 * s for s in seconds])


def test_a_stage_before_which_nothing_is_trained_has_no_i():
    costs = halved(split=True, frozen=(0,)).costs([1, 2])
    assert [costs(Action(1, op)) for op in (Op.F, Op.B, Op.I, Op.W)] == [2, 3, 0, 3]


# Skips: from layer a to c (with a gradient), and from the data to c


SKIPS = [Skip(0, (2,), 60), Skip(INPUT, (2,), 80, needs_grad=False)]
SKIPPING = estimates_of(LAYERS, saved=[7, 8, 20], trained=[0, 0, 1000], inputs=9, skips=SKIPS)
WIRE = {60: (30, 20), 80: (40, 40)}


def skipping(placement: list[int]) -> Predictor:
    ones = [1] * len(placement)
    return predictor_of(LAYERS, placement, held_by(ones, ones), SKIPPING, WIRE, **TIMED)


def test_skips_are_priced_at_both_ends_and_held_where_they_are_used():
    made = skipping([0, 1, 2])
    a_b, b_c, far = (1 + 1.0) + (1 + 0.5), (1 + 2.0) + (1 + 2.0), (1 + 0.70) + (1 + 0.20)
    assert made.stage_time(0, 0, 1).messages_s == pytest.approx(a_b + far)
    assert made.stage_time(1, 1, 2).messages_s == pytest.approx(a_b + b_c)  # they pass it by
    assert made.stage_time(2, 2, 3).messages_s == pytest.approx(b_c + far)
    near, skips = 3 * (200 + 200), 2 * (30 + 20 + 40)
    assert made.held_bytes(2, 2, 3) == WEIGHTS + (200 + 60 + 80) + 20 + near + skips + 2
    assert made.held_bytes(0, 0, 1) == (9 + 80) + 7 + (100 + 60) + 2 * 50 + 100 + 2 * 20 + 1
    assert made.held_bytes(1, 1, 2) == 100 + 8 + 200 + 3 * (100 + 200) + 2 * 50 + 100 + 30


def test_a_skip_s_messages_cost_what_its_route_carries():
    costs = skipping([0, 1, 2]).costs([1, 2])
    assert costs(Action(0, Op.SEND_F, peer=2)) == pytest.approx(1 + 0.70)
    assert costs(Action(2, Op.SEND_B, peer=0)) == pytest.approx(1 + 0.20)
    assert costs(Action(0, Op.SEND_F, peer=1)) == pytest.approx(2.0)
    two = skipping([0, 1]).costs([2])  # a and b together
    assert two(Action(0, Op.SEND_F, peer=1)) == pytest.approx(1 + 2.0 + 0.70)


def test_between_two_stages_all_is_one_message():
    made = skipping([0, 1])
    together = (1 + 2.0 + 0.70) + (1 + 2.0 + 0.20)
    assert made.stage_time(0, 0, 2).messages_s == pytest.approx(together)
    assert made.stage_time(1, 2, 3).messages_s == pytest.approx(together)
    assert made.stage_time(1, 1, 3).messages_s == pytest.approx((1 + 1.0 + 0.70) + (1 + 0.5 + 0.20))
    there, back = 2 * (100 + 30 + 40) + 100 + 60 + 80, 2 * (50 + 20) + 100 + 60
    assert made.stage_time(1, 1, 3).held_bytes == WEIGHTS + (100 + 60 + 80) + 8 + 20 + there + back + 30


def test_on_one_rank_a_skip_is_no_message():
    alone = skipping([0, 0, 0])
    assert [alone.stage_time(n, n, n + 1).messages_s for n in range(3)] == [0, 0, 0]
