"""What ranks agree on, and what they send beside the stages' messages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipetrain.errors import ChannelError
from pipetrain.runtime.ranks import Ranks, World
from tests.support.jobs import agreements
from tests.support.ranks import run_world


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
