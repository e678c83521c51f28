"""Messages in one process: their order, their bound, their deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch

from pipetrain.network.values import TensorSpec
from pipetrain.runtime.channel import ChannelError, Message
from tests.support.local import LocalChannel, Wire

SPECS = (TensorSpec((2,), torch.float32),)


def up(mb: int) -> Message:
    """An activation from stage 0 on rank 0 to stage 1 on rank 1."""
    return Message(0, 1, mb, SPECS, (0, 1))


def down(mb: int) -> Message:
    """A gradient, the other way."""
    return Message(1, 0, mb, SPECS, (1, 0))


def ends(buffer_size: int, timeout: float = 20) -> tuple[LocalChannel, LocalChannel]:
    wire = Wire()
    return LocalChannel(wire, buffer_size, timeout), LocalChannel(wire, buffer_size, timeout)


def number(mb: int) -> list[torch.Tensor]:
    return [torch.full((2,), float(mb))]


class Other:
    """Does something in another thread, and gives what came of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._result: Any = None

        def run() -> None:
            try:
                self._result = work()
            except BaseException as error:
                self._result = error

        self._thread = Thread(target=run, daemon=True)
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Any:
        assert self.ends_within(20), "the other thread hangs"
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


@pytest.mark.parametrize("buffer_size", [1, 2, 5])
def test_messages_come_in_order_and_are_not_mixed_with_those_of_the_other_edge(buffer_size):
    first, second = ends(buffer_size)
    first.expect([down(mb) for mb in range(20)])
    second.expect([up(mb) for mb in range(20)])

    def there() -> list[float]:
        seen = []
        for mb in range(20):
            (tensor,) = second.recv(up(mb))
            second.send(down(mb), [-tensor])
            seen.append(tensor[0].item())
        second.drain()
        return seen

    other = Other(there)
    backs = []
    for mb in range(20):
        first.send(up(mb), number(mb))
        if mb:
            backs.append(first.recv(down(mb - 1))[0][1].item())
    backs.append(first.recv(down(19))[0][1].item())
    first.drain()
    assert other.result() == [float(mb) for mb in range(20)]
    assert backs == [-float(mb) for mb in range(20)]


def test_posted_receives_and_unfinished_sends_are_bounded_each():
    """As `simulate` has it: buffer_size posted ahead, and as many sends not yet matched."""
    first, second = ends(2)
    second.expect([up(mb) for mb in range(9)])
    other = Other(lambda: [first.send(up(mb), number(mb)) for mb in range(9)])
    assert not other.ends_within(0.2)
    assert len(second._wire.queues[0, 1]) == 4
    second.recv(up(0))
    deadline = time.monotonic() + 10
    while len(second._wire.queues[0, 1]) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert second._wire.sent[0, 1] == 5  # one taken, one more sent
    for mb in range(1, 9):
        second.recv(up(mb))
    other.result()


def test_who_waits_for_what_is_named_at_the_deadline():
    first, second = ends(1, timeout=0.2)
    second.expect([up(7)])
    start = time.monotonic()
    with pytest.raises(ChannelError) as error:
        second.recv(up(7))
    assert 0.2 <= time.monotonic() - start < 10
    assert str(error.value) == "rank 1 waited 0.2 s for the activation of microbatch 7 from rank 0"
    for mb in range(2):  # one is matched by the posted receive
        first.send(up(mb), number(mb))
    with pytest.raises(ChannelError) as error:
        first.send(up(2), number(2))
    assert str(error.value) == "rank 0 waited 0.2 s for rank 1 to take the activation of microbatch 2"


def test_what_arrives_is_read_late_as_on_a_real_wire_and_is_the_receiver_s_own():
    first, second = ends(1)
    second.expect([up(0)])
    sent = torch.zeros(2)
    first.send(up(0), [sent])
    sent.fill_(5)  # whoever writes into what he sent is found out
    (received,) = second.recv(up(0))
    assert received.tolist() == [5, 5]
    received.fill_(9)
    assert sent.tolist() == [5, 5]


def test_what_is_not_received_or_out_of_turn_is_refused():
    first, second = ends(2)
    second.expect([up(0), up(1)])
    with pytest.raises(AssertionError, match=r"never received: .*microbatch 0.*microbatch 1"):
        second.drain()
    first.send(up(0), number(0))
    with pytest.raises(AssertionError, match="the activation of microbatch 1 is not what was expected next"):
        second.recv(up(1))


def test_what_has_arrived_and_where_there_is_room_can_be_asked():
    first, second = ends(1, timeout=0.2)
    second.expect([up(0), up(1), up(2)], watched=True)
    assert not second.arrived(up(0))
    with pytest.raises(ChannelError) as error:
        second.wait([up(0)], [down(5)] * 0)
    assert str(error.value) == "rank 1 waited 0.2 s for the activation of microbatch 0 from rank 0"
    for mb in range(2):  # one is matched by a posted receive, one is unfinished
        assert first.room(up(mb))
        first.send(up(mb), number(mb))
    assert not first.room(up(2))
    with pytest.raises(ChannelError) as error:
        first.wait([down(3)], [up(2)])
    assert str(error.value) == (
        "rank 0 waited 0.2 s for the gradient of microbatch 3 from rank 1 "
        "or for rank 1 to take the activation of microbatch 2"
    )
    second.wait([up(0)], [])
    assert second.arrived(up(0))
    second.recv(up(0))
    first.wait([], [up(2)])
