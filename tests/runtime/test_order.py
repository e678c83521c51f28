from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from pipetrain.runtime.order import Order
from pipetrain.schedule.actions import Action, Op
from pipetrain.schedule.lower import lower
from pipetrain.schedule.policy import ForwardBackward, Wait
from pipetrain.schedule.programs import gpipe, pipedream_2bw


class Late:
    """A mailbox where the first gradient comes after three forwards, and no other does."""

    def __init__(self) -> None:
        self.asked = 0
        self.forgotten: list[int] = []
        self.channel = SimpleNamespace(forget=self.forgotten.append)

    def arrived(self, receive: Action) -> bool:
        self.asked += 1
        return receive.mb == 0 and self.asked > 2

    def room(self, send: Action) -> bool:
        return True


def test_a_list_knows_which_versions_its_actions_still_read():
    order = Order(lower(pipedream_2bw(2, 4, 2))[0])
    needed = {
        str(action): [version for version in range(action.version) if order.needed(0, version)]
        for action in order.actions(Late())
        if action.op is Op.STEP
    }
    assert needed == {"0STEP@1": [0], "0STEP@2": [1], "0STEP@3": [2], "0STEP@4": []}
    assert [str(action) for action in order.receives()] == [f"0RECV_B{mb}" for mb in range(8)]


def test_a_policy_needs_the_versions_of_its_open_microbatches():
    policy = ForwardBackward(3)

    def decide(order: Order, mail: Any) -> Any:
        return policy.lowered(0, 2, lambda: order.batches, 1, mail)

    order, seen = Order(lower(policy(2, 4, 1))[0], 4, decide=decide), []
    for action in order.actions(Late()):
        if isinstance(action, Wait):
            break
        seen.append((str(action), order.needed(0, 0)))
    assert [action for action, _ in seen if "SEND" not in action] == [
        *("0F0@0", "0F1@0", "0F2@0", "0RECV_B0", "0B0@0", "0REDUCE@1", "0STEP@1", "0F3@1")
    ]
    assert all(needed for _, needed in seen)  # microbatches 1 and 2 are still to go back through version 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_window_ends_before_a_batch_of_which_no_receive_is_posted(rank):
    """Of 4 batches of 2 microbatches, with one receive ahead: two microbatches before that batch."""
    mail, said = Late(), []

    def ends(batches: int, begun: int) -> bool:
        said.append((batches, begun))
        return batches == 3

    order = Order(lower(gpipe(3, 4, 2))[rank], 4, 2, ends, ahead=1)
    seen = [(action, len(said)) for action in order.actions(mail)]
    asked = [str(one) for (_, before), (one, after) in pairwise([(None, 0), *seen]) if after > before]
    assert asked == [f"{rank}F{mb}@{mb // 2}" for mb in (0, 2, 4)]
    assert [action for action, _ in seen] == lower(gpipe(3, 3, 2))[rank]
    assert said == [(1, 1), (2, 2), (3, 3)]
    assert (order.batches, mail.forgotten) == (3, [6])
