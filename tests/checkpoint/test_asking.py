"""Signals: every rank acts after the same window, whoever was asked and when."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import sleep
from typing import Any

import pytest
import torch.distributed as dist

from pipetrain.checkpoint import asking as module
from pipetrain.checkpoint.asking import Asking
from pipetrain.runtime.ranks import Ranks, World
from tests.support.cases import LocalMesh
from tests.support.deadlines import DEADLINE_S
from tests.support.local import Wire

STOP, SAVE = signal.SIGTERM, signal.SIGUSR1


class Time:
    """A clock that stands still unless it is told."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Time:
    """And nobody ends this process."""
    clock = Time()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(Asking, "outlast", lambda *_: None)
    return clock


def of(ranks: Any, store: dist.Store | None = None) -> Asking:
    asking = Asking(ranks, store, 0, str)
    asking.updated = True
    return asking


def alone() -> Asking:
    return of(Ranks(World(), DEADLINE_S))


def several() -> list[Asking]:
    store, barrier, board = dist.HashStore(), Barrier(3), [None] * 3
    return [of(LocalMesh(World(rank, 3), Wire(), barrier, board), store) for rank in range(3)]


@pytest.mark.parametrize(
    ("asked", "acts"),
    [
        ([(1, 1, SAVE), (2, 2, STOP)], {1: "save", 2: "stop"}),
        ([(3, 1, SAVE), (3, 2, STOP)], {3: "stop"}),
        ([(2, 1, SAVE), (2, 1, STOP), (2, 1, SAVE)], {2: "stop"}),
        ([(4, rank, STOP) for rank in range(3)], {4: "stop"}),
    ],
)
def test_all_ranks_act_after_the_window_in_which_one_was_asked(asked, acts):
    """`asked`: (window, rank, signal), before its end."""
    ranks, windows = several(), range(1, 7)

    def act(rank: int) -> list[str]:
        done = []
        for window in windows:
            for when, who, number in asked:
                if (when, who) == (window, rank):
                    ranks[rank].hear(number)
            done.append(ranks[rank].after_window())
        return done

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(act, range(3))) == [[acts.get(window, "") for window in windows]] * 3


def test_alone_it_acts_at_once_and_the_old_handlers_come_back():
    before = signal.getsignal(STOP)
    asking = alone()
    with asking.handled():
        os.kill(os.getpid(), STOP)
        while not asking.asked:  # a thread hears it
            sleep(0.01)
        assert [asking.after_window(), asking.after_window()] == ["stop", ""]
    assert signal.getsignal(STOP) is before


@pytest.mark.parametrize(
    ("asked", "batches", "batch_s", "known", "ends", "acts"),
    [
        *(((at, rank), 100, 1.0, False, range(at, at + 4), "stop") for at in (1, 60) for rank in (0, 2)),
        ((95, 0), 100, 1.0, False, [None], "stop"),  # it is soon over
        ((5, 1), 100, 0.09, False, [None], "stop"),
        (None, 100, 1.0, False, [None], ""),
        ((7, 0), 3000, 0.05, True, [10], "stop"),  # asked about twice a second, so quick batches do not pay
    ],
)
def test_a_long_window_ends_early_on_all_ranks_after_the_same_batch(
    clock, asked, batches, batch_s, known, ends, acts
):
    """`asked`: the batch before which a rank hears SIGTERM, and the rank.

    The rank of the first stage is two batches ahead; the others ask after it has decided.
    """
    ranks = several()
    for asking in ranks:
        asking.begin_window(batches, batch_s if known else None)
    found: list[int | None] = [None] * 3
    for batch in range(1, batches + 2):
        clock.now += batch_s
        if asked and asked[0] == batch:
            ranks[asked[1]].hear(STOP)
        for rank, asking in enumerate(ranks):
            asks = batch if rank == 0 else batch - 2
            if found[rank] is None and 1 <= asks < batches and asking.ends_window(asks, batch):
                found[rank] = asks
    assert found[0] == found[1] == found[2]
    assert found[0] in ends
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(Asking.after_window, ranks)) == [acts] * 3


def test_batches_that_have_not_begun_say_nothing_of_how_long_one_takes(clock):
    """With a large buffer_size it is asked of batches far ahead."""
    one = alone()
    one.begin_window(60)
    clock.now = 8.0
    assert not one.ends_window(52, begun=2)
    one.hear(STOP)
    assert one.ends_window(52, begun=2)  # 4 s each, and 8 more
    assert (one.after_window(), one.after_window()) == ("stop", "stop")
