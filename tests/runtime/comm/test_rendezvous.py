"""How ranks find each other."""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from pipetrain.errors import ChannelError
from pipetrain.runtime.comm import rendezvous as meeting
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.rendezvous import Attempt, choose_interface
from tests.support import DEADLINE_S

# The interface

BOTH = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ONE_MACHINE, TWO = World(0, 2, 0, 2), World(0, 4, 0, 2)


@pytest.mark.parametrize(
    ("world", "master", "chosen"),
    [
        (ONE_MACHINE, "", ("lo", "=lo")),
        (TWO, "127.0.0.1", ("lo", "=lo")),
        (TWO, "10.0.0.7", ("eth0", "=eth0")),
        (TWO, "", (None, None)),
        (World(0, 4, 0, 0), "10.0.0.7", ("eth0", "=eth0")),  # the launcher does not say how many are here
    ],
)
def test_ranks_listen_where_torchrun_s_address_is_reached(monkeypatch, world, master, chosen):
    for name in BOTH:
        monkeypatch.setenv(name, "")  # put back after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(meeting, "_interface_towards", {"10.0.0.7": "eth0"}.get)
    choose_interface(world)
    assert tuple(os.environ.get(name) for name in BOTH) == chosen
    for name in BOTH:
        monkeypatch.setenv(name, "eth7")
    choose_interface(world)
    assert {os.environ[name] for name in BOTH} == {"eth7"}  # what was chosen before is respected


@pytest.mark.skipif(sys.platform != "linux", reason="looks interfaces up as Linux does")
def test_a_machine_s_own_name_says_nothing_of_the_way_to_it():
    """It stands for the loopback there: what counts is the way to everybody else."""
    try:
        mine = meeting._local_address(meeting.OUTSIDE_ADDRESS)
    except OSError:
        pytest.skip("there is no network")
    found = meeting._interface_towards(socket.inet_ntoa(mine))
    assert found in {name for _, name in socket.if_nameindex()} - {"lo"}
    assert meeting._interface_towards("127.0.1.1") == found


# An attempt


def started(store: dist.Store, size: int) -> list[Attempt]:
    """Start all ranks, as torchrun does at the beginning and after a failure."""
    return [Attempt(World(rank, size), store) for rank in range(size)]


def met(attempts: list[Attempt], limit_s: float = DEADLINE_S) -> list[dist.Store | str]:
    """Let ranks meet, each in a thread; return each one's store, or what it says."""

    def meet(attempt: Attempt) -> dist.Store | str:
        try:
            return attempt.meet(limit_s)  # type: ignore[return-value]
        except ChannelError as error:
            return str(error)

    with ThreadPoolExecutor(len(attempts)) as threads:
        return list(threads.map(meet, attempts))


def guard(stores: list[dist.Store]) -> bool:
    """Whether what rank 0 says is heard by all, and was not there before."""
    before = stores[0].check(["said"])
    stores[0].set("said", "here")
    return not before and all(store.check(["said"]) for store in stores)


@pytest.mark.parametrize("died", [set(), {0}, {1, 2}])
def test_ranks_that_started_a_different_number_of_times_meet_and_a_restart_reads_nothing_before_it(died):
    """Some were killed before the others came; so it is with a node that was replaced."""
    raw = dist.HashStore()
    for _ in range(3):
        for rank in died:
            Attempt(World(rank, 3), raw)
    assert guard(met(started(raw, 3)))
    assert guard(met(started(raw, 3)))


def test_the_count_of_an_agent_is_no_part_of_a_key(monkeypatch):
    """torch puts its agent's count before the keys, and a new agent begins with 0."""
    raw = dist.HashStore()
    stores = iter([dist.PrefixStore("/worker/attempt_3", raw), dist.PrefixStore("/worker/attempt_0", raw)])
    monkeypatch.setattr(meeting, "rendezvous", lambda *_, **__: iter([(next(stores), 0, 2)]))
    worlds = [World(rank, 2) for rank in range(2)]
    assert guard(met([Attempt(world, meeting._torchrun_store(world)) for world in worlds]))


def test_rank_0_says_before_they_meet_how_much_longer_it_takes():
    raw = dist.HashStore()
    first, second = started(raw, 2)
    with pytest.raises(ChannelError, match=r"^rank 1 waited 0\.1 s for rank 0 to start"):
        second.receive_delay(0.1)
    first.send_delay(7.5)
    assert second.receive_delay(DEADLINE_S) == 7.5
    first, second = started(dist.HashStore(), 2)
    with ThreadPoolExecutor(2) as threads:
        meeting, delay = (
            threads.submit(met, [first, second]),
            threads.submit(second.receive_delay, DEADLINE_S),
        )
        assert guard(meeting.result())
    assert delay.result() is None


def test_a_rank_that_does_not_start_is_named():
    here = [attempt for rank, attempt in enumerate(started(dist.HashStore(), 4)) if rank not in (1, 3)]
    alone = started(dist.HashStore(), 2)[1:]
    more = "to start; look at what the others say, or give them longer with timeout="
    assert [*met(here, 0.2), *met(alone, 0.1)] == [
        f"rank 0 waited 0.2 s for ranks 1, 3 {more}",
        f"rank 2 waited 0.2 s for all ranks {more}",
        f"rank 1 waited 0.1 s for rank 0 {more}",
    ]
