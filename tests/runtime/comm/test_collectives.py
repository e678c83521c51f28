"""What ranks agree on, and what they send beside the stages' messages."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pipetrain.errors import ChannelError, Refused
from pipetrain.runtime.comm.collectives import Ranks, World
from pipetrain.runtime.comm.rendezvous import make_group
from tests.support import DEADLINE_S
from tests.support.process_ranks import run_world


def agreements(world: World, store: Store) -> list[str]:
    """Three ranks agree, or do not; returns what each call ended with. In the last one rank 2 is missing."""
    make_group(world, store, timedelta(seconds=DEADLINE_S))
    ranks, rank = Ranks(world, DEADLINE_S, dist.group.WORLD), world.rank
    refusals = {}, {2: "it has no GPU"}, {0: "the first of two", 1: "another"}
    said = [_agreed(ranks, refusal=refusal.get(rank, "")) for refusal in refusals]
    said.append("" if rank == 2 else _agreed(ranks, limit_s=1.0))
    if rank == 0:
        store.set("over", "")
    store.wait(["over"])
    return said


def _agreed(ranks: Ranks, **words: Any) -> str:
    try:
        ranks.barrier_or_raise("get ready", **words)
        return "agreed"
    except (Refused, ChannelError) as error:
        return str(error)


@pytest.mark.processes
def test_ranks_agree_or_all_refuse_with_one_sentence():
    first, *others = run_world(agreements, 3)
    assert all(other[:-1] == first[:-1] for other in others)
    assert first == [
        "agreed",
        "rank 2: it has no GPU",
        "the first of two",
        "rank 0 waited 1 s for rank 2 to get ready; look at what the others say, or give them longer with "
        "timeout=",
    ]


@pytest.mark.parametrize("at_once", [True, False])
def test_targets_that_reach_no_rank_are_a_lost_rank_s(monkeypatch, at_once):
    def fail(*given: object, **named: object) -> None:
        raise RuntimeError("Connection reset by peer")

    work = SimpleNamespace(wait=fail)
    monkeypatch.setattr(dist, "isend", fail if at_once else lambda *given, **named: work)
    with pytest.raises(ChannelError, match=r"rank 0 could not send targets to rank 1: .*reset by peer"):
        Ranks(World(0, 2), 1).post_tensor("targets", torch.zeros(1), 1)()


def test_rank_0_announces_without_a_wait_and_the_receive_of_what_comes_next_is_posted(monkeypatch):
    sent, posted, waited = list[torch.Tensor](), list[torch.Tensor](), list[int]()

    def isend(tensor: torch.Tensor, *rest: object, **named: object) -> SimpleNamespace:
        sent.append(tensor)
        return SimpleNamespace(wait=partial(waited.append, len(sent)))

    def irecv(tensor: torch.Tensor, *rest: object, **named: object) -> SimpleNamespace:
        number = len(posted)
        posted.append(tensor)
        return SimpleNamespace(wait=lambda: tensor.copy_(sent[number]))

    def gone(*tensor: object, **named: object) -> SimpleNamespace:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "irecv", irecv)
    first, other = Ranks(World(0, 2), 1), Ranks(World(1, 2), 1)
    assert first.broadcast_nowait("the next window", [1]) == [1]
    assert not waited
    first.broadcast_nowait("the next window", [2])
    assert waited == [1]  # what was announced before
    assert [other.broadcast_nowait("the next window") for _ in range(2)] == [[1], [2]]
    assert len(posted) == 3
    monkeypatch.setattr(dist, "irecv", gone)
    first.broadcast_nowait("the next window", [5])
    assert other.broadcast_nowait("the next window") == [5]  # the last word of a rank that has left
    monkeypatch.setattr(dist, "irecv", irecv)
    waited.clear()
    first.broadcast_nowait("another", [3], ends=True)
    assert waited == [3, 4]  # nobody misses the last one where rank 0 leaves
    first.broadcast_nowait("another", [4])
    assert waited == [3, 4]  # each once: gloo waits for a second message
    with pytest.raises(ChannelError, match="is at another"):
        other.broadcast_nowait("the next window")
