"""A window that ends early. Which versions an order needs: whole/test_equivalence."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from pipetrain.runtime.rank_actions import Order
from pipetrain.schedule.actions import ALL, RECEIVES, Action, Op
from pipetrain.schedule.early_stop_points import stop_points_in
from pipetrain.schedule.lower import edges, lower
from pipetrain.schedule.posting_order import Sum, make_posts
from pipetrain.schedule.programs import gpipe, zbv
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.transforms import with_norms


def here(stage: int, mb: int) -> int:
    return stage


@pytest.mark.parametrize("rank", [0, 1])
def test_a_window_ends_before_a_batch_of_which_no_receive_is_posted(rank):
    """Of 4 batches of 2 microbatches, with one receive ahead: two microbatches before that batch."""
    forgotten, said = [], []

    def ends(batches: int, begun: int) -> bool:
        said.append((batches, begun))
        return batches == 3

    mail = SimpleNamespace(truncate=forgotten.append)
    actions = lower(gpipe(3, 4, 2))[rank]
    order = Order(actions, here, 4, 2, ends, stop_points_in(actions, 2, ahead=1))
    seen = [(action, len(said)) for action in order.actions(mail, lambda: None)]
    asked = [str(one) for (_, before), (one, after) in pairwise([(None, 0), *seen]) if after > before]
    assert asked == [f"{rank}F{mb}@{mb // 2}" for mb in (0, 2, 4)]
    assert [action for action, _ in seen] == lower(gpipe(3, 3, 2))[rank]
    assert said == [(1, 1), (2, 2), (3, 3)]
    assert (order.batches, forgotten) == (3, [6])


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("ending", [1, 2, 3, 4])
def test_receives_are_posted_before_they_are_due_and_none_of_a_batch_that_is_left_out(rank, ending):
    program = lower(with_norms(zbv(4, 4, 4)))
    posts = make_posts(simulate(program, 4, buffer_size=1), dict.fromkeys(edges(program), 1))
    posted, sums, last = [], [], []

    def forget(mb: int) -> None:
        last.append(mb)
        assert all(receive.mb < mb for receive in posted)

    def post(one: Action | Sum) -> None:
        (sums if isinstance(one, Sum) else posted).append(one)

    mail = SimpleNamespace(truncate=forget, post=post)
    points = stop_points_in(program[rank], 4, posts.ahead)
    order = Order(program[rank], here, 4, 4, lambda n, _: n >= ending, points, posts.by_rank[rank])
    for action in order.actions(mail, lambda: None):
        assert action.op not in RECEIVES or action in posted
        assert action.op is not Op.STEP or len(sums) >= action.version
    assert sums == [Sum(ALL, version) for version in range(1, ending + 1)]
    kept = [action for action in program[rank] if action.op in RECEIVES and action.mb < 4 * ending]
    assert sorted(map(str, posted)) == sorted(map(str, kept))
    assert order.batches == ending
    assert last == [4 * ending][: ending < 4]
