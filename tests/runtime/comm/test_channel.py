"""The distributed channel without a wire (over one: test_worlds.py)."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipetrain.runtime.comm import channel as module
from pipetrain.runtime.comm.channel import Channel
from pipetrain.runtime.rehearsal import LoopbackChannel, _Finished
from pipetrain.schedule.actions import ALL
from tests.runtime.comm.test_message import message

CPU = torch.device("cpu")


class Never:
    """A clock, and a message that nobody takes: it is waited for as gloo waits, for whole milliseconds."""

    now = 5.0

    def monotonic(self) -> float:
        self.now += 1e-5
        return self.now

    def wait(self, limit: timedelta) -> None:
        self.now += limit // timedelta(milliseconds=1) / 1000
        raise RuntimeError("Timed out waiting for send operation to complete")


def test_a_deadline_that_passes_is_named_though_gloo_counts_in_milliseconds(monkeypatch):
    never, nobody = Never(), Any
    monkeypatch.setattr(module, "time", never)
    monkeypatch.setattr(module.dist, "isend", lambda *message, **group: never)
    channel = Channel({((0, 1), (0, 1)): nobody}, 2, 1.0, CPU)
    channel.send(message(0, 1), [torch.zeros(2)])
    with pytest.raises(module.ChannelError, match=r"^rank 0 waited 1 s for rank 1 to take the activation"):
        channel.drain()
    assert never.now - 5.0 < 1.002


def test_an_edge_of_another_plan_has_no_bound_and_is_left_alone():
    """The contestants of a benchmark share the links, and so their edges."""
    groups: Any = dict.fromkeys([((0, 1), (0, 1)), ((0, 3), (0, 3))])
    channel = LoopbackChannel(groups, {(0, 1): 1}, 1.0, CPU)
    messages = [message(0, 1, mb) for mb in range(2)]
    channel.expect(messages)
    assert [[t.shape for t in channel.recv(one)] for one in messages] == [[(2, 3), (2,)]] * 2
    channel.drain()


@pytest.mark.parametrize(("ordered", "open_"), [(True, 0), (False, 2)])
def test_where_the_stream_waits_receives_are_posted_where_the_program_says(ordered, open_):
    channel = LoopbackChannel({((0, 1), (0, 1)): None}, 2, 60, CPU)
    channel.ordered = ordered
    messages = [message(0, 1, mb) for mb in range(3)]
    channel.expect(messages)
    buffers = [len(list(channel.buffers()))]
    for one in messages[:2]:
        channel.post(one)
        buffers.append(len(list(channel.buffers())))
    assert buffers == [open_ * 2, *([2, 4] if not open_ else [4, 4])]


@pytest.mark.parametrize("ordered", [True, False])
def test_where_the_stream_waits_a_sum_begins_where_the_program_says_or_else_when_it_is_waited_for(ordered):
    channel, begun = LoopbackChannel({}, 2, 60, CPU, sums={ALL: None, (0, 1): None}), []
    channel._start_sum = lambda numbers, group: begun.append(int(numbers)) or _Finished()
    channel.ordered = ordered
    for tie, number in [(ALL, 1), ((0, 1), 2), ((0, 1), 3), ((0, 1), 4)]:
        channel.all_reduce(tie, torch.tensor(number))
    assert begun == ([] if ordered else [1, 2, 3, 4])
    channel.begin((0, 1))
    channel.begin((0, 1))
    assert [int(channel.reduced(tie)) for tie in [(0, 1)] * 3 + [ALL]] == [2, 3, 4, 1]
    assert begun == ([2, 3, 4, 1] if ordered else [1, 2, 3, 4])


def test_early_sums_begin_as_they_are_told_where_the_program_says_so_and_the_one_behind_them_at_its_place():
    channel, begun = LoopbackChannel({}, 2, 60, CPU, sums={(0,): None}), []
    channel._start_sum = lambda numbers, group: begun.append(int(numbers)) or _Finished()
    channel.ordered = True
    for begins_at, first in [(0, 1), (2, 4), (9, 7)]:  # before, after, and not before the last one's place
        for number in (first, first + 1):
            if number - first == begins_at:
                channel.begin((0,), early=True)
            channel.all_reduce((0,), torch.tensor(number), early=True)
        if begins_at == 2:
            assert begun == [1, 2, 3]
            channel.begin((0,), early=True)
        channel.all_reduce((0,), torch.tensor(first + 2))
        assert begun == [*range(1, first + (2 if begins_at < 9 else 0))]
        channel.begin((0,))
        assert begun == [*range(1, first + 3)]
    assert [int(channel.reduced((0,))) for _ in range(9)] == begun


def test_the_deadline_of_what_a_stream_waits_for_is_kept_with_what_names_it():
    channel, kept = LoopbackChannel({}, 2, 60, torch.device("cuda")), list[object]()
    channel.deadline = SimpleNamespace(check=lambda: None, add=kept.append)
    Channel._complete(channel, [SimpleNamespace(wait=lambda: None)], failed := object())
    assert kept == [failed]
