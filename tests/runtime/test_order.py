from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from pipetrain.runtime.order import Decided, Order
from pipetrain.schedule.actions import Action, Op
from pipetrain.schedule.lower import lower
from pipetrain.schedule.policy import ForwardBackward, Wait
from pipetrain.schedule.programs import gpipe, pipedream_2bw


class Late:
    """A view where the first gradient comes after three forwards, and no other does."""

    def __init__(self) -> None:
        self.asked = 0
        self.forgotten: list[int] = []

    def forget(self, mb: int) -> None:
        self.forgotten.append(mb)

    def arrived(self, receive: Action) -> bool:
        self.asked += 1
        return receive.mb == 0 and self.asked > 2

    def room(self, send: Action) -> bool:
        return True


def needed_old_versions(order: Order, stage: int) -> Iterator[tuple[str, list[int]]]:
    """After each STEP, the older versions that are still needed."""
    for action in order.actions(Late()):
        assert isinstance(action, Action)
        if action.op is Op.STEP:
            yield str(action), [v for v in range(action.version) if order.needed(stage, v)]


def test_a_list_knows_which_versions_its_actions_still_read():
    program = lower(pipedream_2bw(2, 4, 2))
    order = Order(program[0])
    assert dict(needed_old_versions(order, 0)) == {
        "0STEP@1": [0],
        "0STEP@2": [1],
        "0STEP@3": [2],
        "0STEP@4": [],
    }
    assert [str(action) for action in order.receives()] == [f"0RECV_B{mb}" for mb in range(8)]
    assert not order.decided


def test_a_policy_needs_the_versions_of_its_open_microbatches():
    policy = ForwardBackward(3)
    order = Decided(policy, 2, None, lower(policy(2, 4, 1))[0], 4, 1)
    seen = []
    for action in order.actions(Late()):
        if isinstance(action, Wait):
            break
        seen.append((str(action), order.needed(0, 0)))
    assert [action for action, _ in seen if "SEND" not in action] == [
        *("0F0@0", "0F1@0", "0F2@0", "0RECV_B0", "0B0@0", "0REDUCE@1", "0STEP@1", "0F3@1")
    ]
    assert all(needed for _, needed in seen)  # microbatches 1 and 2 are still to go back through version 0


def test_a_policy_s_stage_receives_all_of_its_window():
    policy = ForwardBackward(3)
    middle = Decided(policy, 3, None, lower(policy(3, 2, 1))[1], 2, 1)
    assert {str(action) for action in middle.receives()} == {"1RECV_F0", "1RECV_F1", "1RECV_B0", "1RECV_B1"}
    assert middle.decided


@pytest.mark.parametrize("rank", [0, 1])
def test_a_window_ends_before_a_batch_of_which_no_receive_is_posted(rank):
    """Of 4 batches of 2 microbatches, with one receive ahead: two microbatches before that batch."""
    view, said = Late(), []

    def ends(batches: int, begun: int) -> bool:
        said.append((batches, begun))
        return batches == 3

    order = Order(lower(gpipe(3, 4, 2))[rank], 4, 2, ends, ahead=1)
    seen = [(action, len(said)) for action in order.actions(view)]
    asked = [str(one) for (_, before), (one, after) in pairwise([(None, 0), *seen]) if after > before]
    assert asked == [f"{rank}F{mb}@{mb // 2}" for mb in (0, 2, 4)]
    assert [action for action, _ in seen] == lower(gpipe(3, 3, 2))[rank]
    assert said == [(1, 1), (2, 2), (3, 3)]
    assert (order.batches, view.forgotten) == (3, [6])
