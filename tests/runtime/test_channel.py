"""What a message is called, and the distributed channel without a wire."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest
import torch

from pipetrain.network.values import TensorSpec
from pipetrain.runtime import channel as module
from pipetrain.runtime.channel import Awaited, Channel, Message, cause_of
from pipetrain.runtime.loopback import LoopbackChannel

SPECS = (TensorSpec((2,), torch.float32),)


def up(mb: int) -> Message:
    """An activation from stage 0 on rank 0 to stage 1 on rank 1."""
    return Message(0, 1, mb, SPECS, (0, 1))


def down(mb: int) -> Message:
    """A gradient, the other way."""
    return Message(1, 0, mb, SPECS, (1, 0))


def test_the_cause_of_a_failure_is_one_sentence_without_gloo_s_source_line():
    said = (
        "[/a/gloo/pair.cc:553] Connection closed by peer [::1]:14. This is typically caused by a crash. GLHF!"
    )
    assert cause_of(RuntimeError(said)) == "Connection closed by peer [::1]:14"
    assert cause_of(RuntimeError("Timed out. Bye.\nmore")) == "Timed out. Bye."


# What a message is


def test_a_message_has_a_name_and_a_size():
    specs = (TensorSpec((2, 3), torch.float64), TensorSpec((2,), torch.int64))
    message = Message(3, 4, 7, specs, (1, 2))
    assert message.name == "the activation of microbatch 7"
    assert Message(4, 3, 7, specs, (2, 1)).name == "the gradient of microbatch 7"
    assert message.edge == (3, 4)
    assert message.nbytes == 2 * 3 * 8 + 2 * 8


def test_a_skip_s_message_names_its_stages():
    """Two routes may lead from one rank to another."""
    skip, back = Message(0, 2, 7, SPECS, (0, 2)), Message(2, 0, 7, SPECS, (2, 0))
    assert skip.name == "the activation of microbatch 7 (stage 0 to 2)"
    assert str(Awaited.any_of([back], [], 60).error()) == (
        "rank 0 waited 60 s for the gradient of microbatch 7 (stage 2 to 0) from rank 2"
    )


def test_virtual_stages_are_told_from_ranks():
    """Stage 2 is on rank 0 again: an activation goes up the stages and down the ranks."""
    message = Message(1, 2, 0, SPECS, (1, 0))
    assert message.name == "the activation of microbatch 0"
    assert str(Awaited.any_of([message], [], 60).error()) == (
        "rank 0 waited 60 s for the activation of microbatch 0 from rank 1"
    )


def test_a_deadline_says_who_waits_for_what():
    assert str(Awaited.any_of([up(7)], [], 60).error()) == (
        "rank 1 waited 60 s for the activation of microbatch 7 from rank 0"
    )
    assert str(Awaited.any_of([down(7)], [], 0.5).error()) == (
        "rank 0 waited 0.5 s for the gradient of microbatch 7 from rank 1"
    )
    assert str(Awaited.any_of([], [up(7)], 60).error()) == (
        "rank 0 waited 60 s for rank 1 to take the activation of microbatch 7"
    )


# The distributed channel, without a wire (over one: test_worlds.py)


class Never:
    """A clock, and a message that nobody takes: it is waited for as gloo waits, for whole milliseconds."""

    def __init__(self) -> None:
        self.now = 5.0

    def monotonic(self) -> float:
        self.now += 1e-5
        return self.now

    def wait(self, limit: timedelta) -> None:
        self.now += limit // timedelta(milliseconds=1) / 1000
        raise RuntimeError("Timed out waiting for send operation to complete")


def test_a_deadline_that_passes_is_named_though_gloo_counts_in_milliseconds(monkeypatch):
    never, nobody = Never(), cast(Any, None)
    monkeypatch.setattr(module, "time", never)
    monkeypatch.setattr(module.dist, "isend", lambda *message, **group: never)
    channel = Channel({(0, 1): nobody}, 2, 1.0, torch.device("cpu"))
    channel.send(up(0), [torch.zeros(2)])
    with pytest.raises(module.ChannelError, match=r"^rank 0 waited 1 s for rank 1 to take the activation"):
        channel.drain()
    assert never.now - 5.0 < 1.002


def test_a_rank_without_edges_drains_at_once():
    channel = Channel({}, 2, 30, torch.device("cpu"))
    channel.expect([])
    channel.drain()


def test_an_edge_of_another_plan_has_no_bound_and_is_left_alone():
    """The contestants of a benchmark share a mesh, and so its edges."""
    groups: Any = dict.fromkeys([(0, 1), (0, 3)])
    channel = LoopbackChannel(groups, {(0, 1): 1}, 1.0, torch.device("cpu"))
    channel.expect([up(0), up(1)])
    assert [channel.recv(up(mb))[0].shape for mb in range(2)] == [(2,), (2,)]
    channel.drain()
