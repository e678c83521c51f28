"""Messages in one process: their order, their bound, their deadline."""

from __future__ import annotations

import pytest
import torch

from pipetrain.network.values import TensorSpec
from pipetrain.runtime.channel import ChannelError, Message
from tests.support.local import LocalChannel, Wire

SPECS = (TensorSpec((2,), torch.float32),)


def up(mb: int) -> Message:
    """An activation from stage 0 on rank 0 to stage 1 on rank 1."""
    return Message(0, 1, mb, SPECS, (0, 1))


def ends(buffer_size: int, timeout: float = 20) -> tuple[LocalChannel, LocalChannel]:
    wire = Wire()
    return LocalChannel(wire, buffer_size, timeout), LocalChannel(wire, buffer_size, timeout)


def number(mb: int) -> list[torch.Tensor]:
    return [torch.full((2,), float(mb))]


def test_posted_receives_and_unfinished_sends_are_bounded_each():
    """As `simulate` has it: buffer_size posted ahead, and as many sends not yet matched."""
    first, second = ends(2, timeout=0.2)
    second.expect([up(mb) for mb in range(9)])
    assert not second.arrived(up(0))
    for mb in range(4):
        assert first.room(up(mb))
        first.send(up(mb), number(mb))
    assert not first.room(up(4))
    with pytest.raises(ChannelError) as error:
        first.send(up(4), number(4))
    assert str(error.value) == "rank 0 waited 0.2 s for rank 1 to take the activation of microbatch 4"
    second.recv(up(0))
    first.send(up(4), number(4))
    with pytest.raises(AssertionError, match="the activation of microbatch 2 is not what was expected next"):
        second.recv(up(2))


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
