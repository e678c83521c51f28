from __future__ import annotations

from itertools import pairwise

import pytest

from pipetrain.schedule.actions import Edge, Schedule
from pipetrain.schedule.buffer_bounds import edge_bounds, free_skips, widest
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import (
    forward_only,
    gpipe,
    interleaved_1f1b,
    layer_dist,
    one_f_one_b,
    pipedream,
)
from pipetrain.schedule.simulate import Deadlock, simulate

UNET = sorted([*pairwise(range(8)), (0, 7), (1, 6), (2, 5)])


def skips(bounds: dict[Edge, int]) -> dict[Edge, int]:
    """Of the activations: those of the gradients are as large, or smaller."""
    return {(source, to): bound for (source, to), bound in bounds.items() if to > source + 1}


@pytest.mark.parametrize(
    ("schedule", "size", "wanted"),
    [
        # Room for those that are on their way to stage 7, and for as many more as neighbours have.
        (gpipe, (8, 1, 32), {(0, 7): 5, (1, 6): 4, (2, 5): 3}),
        # The first stage holds 8 open: no more can be on their way, half of them at each end.
        (one_f_one_b, (8, 1, 32), {(0, 7): 4, (1, 6): 4, (2, 5): 3}),
        (interleaved_1f1b, (4, 1, 16), {(0, 7): 4, (1, 6): 4, (2, 5): 3}),
        (layer_dist, (8, 1, 4), {(0, 7): 2, (1, 6): 2, (2, 5): 2}),
    ],
)
def test_a_skip_has_room_for_what_is_on_its_way(
    schedule: Schedule, size: tuple[int, int, int], wanted: dict[Edge, int]
) -> None:
    program = lower(schedule(*size), UNET)
    bounds = edge_bounds(program, UNET, (2, 2))
    assert skips(bounds) == wanted
    plain = simulate(lower(schedule(*size)), size[2], buffer_size=2)
    run = simulate(program, size[2], buffer_size=bounds, routes=UNET)
    assert (run.makespan, run.activations) == (plain.makespan, plain.activations)


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)])
def test_each_direction_may_have_its_own_and_gradients_wait_for_less(sizes: tuple[int, int]) -> None:
    program = lower(interleaved_1f1b(4, 1, 16), UNET)
    bounds = edge_bounds(program, UNET, sizes)
    near = {edge: bound for edge, bound in bounds.items() if abs(edge[0] - edge[1]) == 1}
    assert all(bound == sizes[source > target] for (source, target), bound in near.items())
    assert all(bound >= sizes[source > target] for (source, target), bound in bounds.items())
    simulate(program, 16, buffer_size=bounds, routes=UNET)
    assert free_skips([(0, 1), (1, 0), (0, 2)], (2, 3), 8) == {(0, 1): 2, (1, 0): 3, (0, 2): 8}


def test_an_evaluation_needs_its_own_and_a_channel_for_both_has_the_widest() -> None:
    training = edge_bounds(lower(interleaved_1f1b(4, 1, 16), UNET), UNET, (2, 2))
    evaluation = edge_bounds(lower(forward_only([(0,), (1,), (2,), (3,)] * 2, 32), UNET), UNET, (2, 2))
    assert skips(evaluation) == {(0, 7): 5, (1, 6): 4, (2, 5): 3}
    both = widest([training, evaluation])
    assert both.keys() == training.keys()
    assert {edge: both[edge] for edge in evaluation} == evaluation


@pytest.mark.parametrize(
    ("schedule", "size", "uniform"),
    [(pipedream, (8, 32, 1), 1), (interleaved_1f1b, (6, 1, 6), 2)],
)
def test_with_the_bound_of_the_neighbours_a_skip_would_block(
    schedule: Schedule, size: tuple[int, int, int], uniform: int
) -> None:
    """Both ends are full and wait for each other, or for a stage to which the sender would turn next."""
    last = size[0] * (2 if schedule is interleaved_1f1b else 1) - 1
    routes = sorted([*pairwise(range(last + 1)), (0, last)])
    program = lower(schedule(*size), routes)
    with pytest.raises(Deadlock):
        simulate(program, size[2], buffer_size=uniform, routes=routes)
    simulate(program, size[2], buffer_size=edge_bounds(program, routes, (uniform, uniform)), routes=routes)
