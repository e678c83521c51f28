"""What ranks compare and take from rank 0. That what differs is named: users/test_ranks_that_differ."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from pipetrain.config.rate import LearningRate
from pipetrain.config.settings import Settings
from pipetrain.errors import ChannelError, TrainingStopped
from pipetrain.runtime.comm.collective_guard import CollectiveGuard, broadcast_from_rank0, values_to_compare
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.programs import gpipe, one_f_one_b


def test_threads_and_patience_are_a_process_s_own_and_all_else_is_compared():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)

    def said(program: Any = None, rate: float = 1.0, **values: Any) -> dict[str, Any]:
        return values_to_compare(
            Settings.read(values), optimizer, program or gpipe(2, 1, 4), LearningRate(lambda update: rate)
        )

    assert said(threads=2, timeout=9) == said()
    for other in (
        said(codec_forward="half"),
        said(dtype="float64"),
        said(one_f_one_b(2, 1, 4)),
        said(rate=2),
    ):
        assert other != said()
    assert said()["optimizer.lr"] == 0.5


def test_only_tensors_that_differ_travel():
    tensors = {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.zeros(3, device="meta")}
    copied: list[torch.Tensor] = []

    def gather(what: str, item: Any) -> list[Any]:
        """Rank 1 has the same forms, and other numbers in b."""
        return [item, item if isinstance(item, dict) else [item[0], 1]]

    groups: Any = SimpleNamespace(gather=gather, broadcast_tensor=lambda what, tensor: copied.append(tensor))
    broadcast_from_rank0(groups, "the model", tensors)
    assert [len(tensor) for tensor in copied] == [3]


def test_ctrl_c_is_not_told_as_a_connection_that_another_rank_has_closed_at_the_same_one():
    def lost_and_interrupted() -> None:
        try:
            raise RuntimeError("Connection closed by peer")
        finally:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stop, CollectiveGuard(SimpleNamespace(), lambda: None)():
        lost_and_interrupted()
    assert stop.value.__suppress_context__


def test_what_has_ended_the_transfers_is_the_cause_of_what_follows_from_it_and_what_others_are_told():
    def check() -> None:
        raise ChannelError("rank 0 lost rank 1: it has run out of memory")

    told = list[str]()
    groups: Any = SimpleNamespace(check=check, abandon=told.append, first_error=lambda why: (0, why))
    groups.world = World(0, 2)
    guard = CollectiveGuard(groups, lambda: told.append("ended"))
    with pytest.raises(ChannelError, match="lost rank 1"), guard():
        raise TrainingStopped("the loss is nan")  # of what an aborted receive left
    assert told == ["ended", guard.stopped]
    assert guard.stopped == "rank 0 lost rank 1: it has run out of memory"
    groups.check = lambda: None
    with pytest.raises(TrainingStopped, match="is nan"), guard():
        raise TrainingStopped("the loss is nan")
    assert told[2:] == ["ended", "the loss is nan"]


def test_of_ranks_that_an_error_has_ended_the_first_says_it_and_one_that_lost_it_ends_without_a_word():
    def ended(rank: int, error: Exception) -> Exception:
        groups: Any = SimpleNamespace(check=lambda: None, abandon=lambda why: None, store=store)
        groups.world, groups.first_error = World(rank, 3), partial(ProcessGroups.first_error, groups)
        with pytest.raises(type(error)) as caught, CollectiveGuard(groups, lambda: None)():
            raise error
        return caught.value

    store, first, other = HashStore(), TrainingStopped("the loss is nan"), TrainingStopped("a mistake")
    assert ended(2, first) is first
    quiet = ended(0, ChannelError("rank 0 lost rank 2"))
    assert isinstance(quiet, SystemExit)
    assert str(quiet) == "rank 0 lost rank 2; rank 2 stopped: the loss is nan"
    assert ended(1, other) is other  # of its own
    store = HashStore()
    assert ended(0, lost := ChannelError("rank 0 lost rank 2")) is lost  # which was killed
