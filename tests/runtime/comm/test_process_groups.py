"""How messages travel between ranks, how they connect and leave, and which keys of the store are whose."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from pipetrain.errors import Refused
from pipetrain.runtime.comm import collectives as ranks
from pipetrain.runtime.comm import process_groups as links
from pipetrain.runtime.comm.collectives import StopListeners, World
from pipetrain.runtime.comm.process_groups import ProcessGroups, in_disjoint_rounds
from pipetrain.runtime.layer_profile import slowest_link
from pipetrain.schedule.actions import ALL
from pipetrain.schedule.actions import ranks_of as placed
from pipetrain.schedule.lower import edges
from pipetrain.schedule.lower import links as links_of
from pipetrain.schedule.programs import interleaved_1f1b, one_f_one_b, zbv
from tests.support import DEADLINE_S
from tests.support.cases import Case
from tests.support.models import flat
from tests.support.pretended_gpu.streams import here
from tests.support.pretended_gpu.world import ends_of, ranks_of


def met(monkeypatch: Any, gpus: Sequence[list[str]], rank: int, staged: bool = False) -> ProcessGroups:
    """Return the links of a rank that has heard which GPU each one has."""
    for name in ("_meet", "_connect"):
        monkeypatch.setattr(ProcessGroups, name, lambda self: None)
    monkeypatch.setattr(links, "atexit", Mock())
    monkeypatch.setattr(links, "choose_interface", lambda world: None)
    monkeypatch.setattr(links, "gpu_of", lambda device: None)
    monkeypatch.setattr(ProcessGroups, "gather", lambda self, what, item: [*gpus])
    device, world = torch.device("cuda" if gpus[rank] else "cpu", 0), World(rank, len(gpus))
    return ProcessGroups(world, [(0,)] * len(gpus), [], device, torch.distributed.HashStore(), 30, staged)


ONE_OF_EACH = ["GPU-a", ""], ["GPU-b", ""], ["GPU-c", ""]
SHARED = ["GPU-a", ""], ["GPU-b", ""], ["GPU-a", ""]
HOSTS = ["GPU-a", "rank0"], ["GPU-a", "rank1"], ["GPU-a", "rank2"]


@pytest.mark.parametrize(
    ("gpus", "staged", "backend", "why", "sharing"),
    [
        (([], [], []), False, "gloo", "", 3),
        (([], [], []), True, "gloo", "", 3),
        (ONE_OF_EACH, False, "nccl", "", 1),  # also if each sees one alone, as the first
        (ONE_OF_EACH, True, "gloo", "", 1),  # a policy's
        (ONE_OF_EACH[:1], False, "nccl", "", 1),
        (SHARED, False, "gloo", "ranks 0 and 2 share a GPU", 2),  # on all ranks, whatever their machine has
        (HOSTS, False, "nccl", "", 3),
    ],
)
def test_all_ranks_decide_alike_by_the_gpu_that_each_one_has(
    monkeypatch, with_gpus, gpus, staged, backend, why, sharing
):
    with_gpus(1)
    for rank, gpu in enumerate(gpus):
        made = met(monkeypatch, gpus, rank, staged)
        assert (made.backend, made.staged) == (backend, bool(gpu) and backend == "gloo")
        assert made.nccl_obstacle == why
        assert rank or made.ranks_on_gpu == sharing


@pytest.mark.parametrize("gpus", [(*ONE_OF_EACH[:2], []), ([], *ONE_OF_EACH[:2])])
def test_a_rank_without_a_gpu_among_others_that_have_one_is_refused(monkeypatch, with_gpus, gpus):
    with_gpus(1)
    without = gpus.index([])
    with pytest.raises(Refused, match=f"^rank {without} has no GPU, and others have: give it one, or"):
        met(monkeypatch, gpus, 0)


def test_links_have_keys_of_their_own(monkeypatch):
    """A stop that one training has decided is none of the next."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(links, "this_attempt", lambda world: SimpleNamespace(meet=lambda limit_s: store))
    first, second = (links._fresh_store(World(0, 2), 1.0) for _ in range(2))
    first.set("decided", "stop")
    assert (first.check(["decided"]), second.check(["decided"])) == (True, False)


# Connecting


@pytest.mark.parametrize(
    ("program", "rounds"),
    [
        (one_f_one_b(2, 1, 2), 2),
        (one_f_one_b(64, 1, 64), 4),
        (zbv(64, 1, 128), 8),
        (interleaved_1f1b(64, 1, 64, 4), 16),
    ],
)
def test_groups_that_share_no_rank_connect_at_the_same_time(program, rounds):
    """As many rounds as the most groups of a rank, or few more; one after the other it would be hundreds."""
    groups = [ranks for _, ranks in links_of(edges(program), placed(program))]
    order = in_disjoint_rounds(groups)
    assert sorted(order) == [*range(len(groups))]
    ends, last = dict.fromkeys(range(64), 0), 0
    for number in order:
        begins = max(ends[rank] for rank in groups[number])
        assert begins >= last - 1  # by rounds
        last = max(last, begins + 1)
        ends.update(dict.fromkeys(groups[number], begins + 1))
    assert last == rounds


# Errors of a rank over NCCL


class StopCheck(nn.Module):
    """Ends rank 1 in a window of training, and copies its input elsewhere."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, x: Tensor) -> Tensor:
        if here("rank") == 1 and here("watched"):
            self.calls += 1
            if self.calls == 3:
                here("waits").until_all_others_do()
                raise {"killed": SystemExit, "interrupted": KeyboardInterrupt}.get(
                    self.how, RuntimeError("its own error")
                )
        return x * 1


def ending(how: str) -> nn.Sequential:
    return nn.Sequential(*flat(), nn.Linear(12, 12), StopCheck(how), nn.Linear(12, 10))


def ends(how: str, ranks: int = 3) -> list[str]:
    model = "model._target_=tests.runtime.comm.test_process_groups.ending", f"+model.how={how}"
    words = (*model, "epochs=1", "microbatches=4", "cuda_graphs=false", "clip_grad_norm=0.1")
    return ends_of(Case("1f1b", ranks, (*words, f"partition={[1, 3][: ranks - 1]}"), 24))


def test_what_ends_a_rank_is_said_to_all_at_once_though_nccl_would_not_notice():
    first, second, third = ends("raises")
    assert second.startswith("ActionFailed: rank 1, stage 1, action 1F")
    said = second.removeprefix("ActionFailed: ")
    assert first.startswith(f"ChannelError: rank 0 lost rank 1: {said}")
    assert third.startswith(f"ChannelError: rank 2 lost rank 1: {said}")


@pytest.mark.parametrize(
    ("how", "why"), [("killed", "Connection closed by peer"), ("interrupted", "its program has ended")]
)
def test_a_rank_that_is_killed_or_leaves_is_lost_at_once(how, why):
    first, _, third = ends(how)
    assert first.startswith(f"ChannelError: rank 0 lost rank 1: {why}; stage 0 was at")
    assert third.startswith(f"ChannelError: rank 2 lost rank 1: {why}; stage 2 was at")


def abort_in_turn(self: ProcessGroups) -> bool:
    for group in self._in_use():
        group._get_backend(self.device).abort()
    return True


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (ProcessGroups, "abandon", lambda self, why: self._leave_groups()),  # as ncclCommDestroy
        (ProcessGroups, "_end_transfers", lambda self: True),
        (ProcessGroups, "_end_transfers", abort_in_turn),
        (StopListeners, "send_stop", lambda self, rank, why: None),
        (StopListeners, "_listen", lambda self, *word: None),
    ],
)
def test_what_would_not_end_the_others_at_once_is_seen(owner: Any, name: str, instead: Any):
    with (
        pytest.raises(AssertionError),
        patch.object(owner, name, instead),
        patch.object(ranks, "ERROR_SEND_S", 0.1),
    ):
        test_what_ends_a_rank_is_said_to_all_at_once_though_nccl_would_not_notice()


# Waits between windows


def test_what_is_waited_for_between_windows_is_named_at_its_deadline():
    """For a sum, a connection and messages that partition=profile measures the stream waits too."""
    with ranks_of(Case("1f1b", 2, (), 24)) as ranks:
        late = ranks.distributed.awaited
        connected, late[:] = {*late}, []
        ranks.each(lambda rank: ranks.groups[rank].sum_over_ranks(ALL, torch.ones(1, device="cuda")))
        added, late[:] = {*late}, []
        ranks.each(lambda rank: slowest_link(ranks.groups[rank], 1))
        ranks.each(lambda rank: ranks.groups[rank].close())
    measured = {text.partition(" s for ")[2].partition(";")[0] for text in late}
    wait = f"rank 0 waited {DEADLINE_S:g} s for rank 1 to"
    advice = "look at what the others say, or give them longer with timeout="
    assert f"{wait} connect; {advice}" in connected
    assert f"{wait} add up with it; {advice}" in added
    taken = "rank 1 to take the activation of microbatch 0"
    assert {"the gradient of microbatch 0 from rank 1", taken} <= measured
