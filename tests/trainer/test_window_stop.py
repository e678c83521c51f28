"""A long window ends early on all ranks after the same batch, whoever was asked to stop and when."""

from __future__ import annotations

import os
import signal
from time import sleep

import pytest
import torch.distributed as dist

from pipetrain.signals import Signals
from pipetrain.trainer import window_stop as module
from pipetrain.trainer.window_stop import WindowStop

STOP = signal.SIGTERM


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
    monkeypatch.setattr(Signals, "outlast", lambda *_: None)
    return clock


def ranks_of(store: dist.Store, ranks: int) -> list[tuple[Signals, WindowStop]]:
    heard = [Signals(rank, str) for rank in range(ranks)]
    for signals in heard:
        signals.updated = True
    return [(signals, WindowStop(signals, store, leads=not rank)) for rank, signals in enumerate(heard)]


def test_alone_it_acts_at_once_and_the_old_handlers_come_back():
    before = signal.getsignal(STOP)
    ((signals, _),) = ranks_of(dist.HashStore(), 1)
    with signals.handled():
        os.kill(os.getpid(), STOP)
        while not signals.request:  # a thread hears it
            sleep(0.01)
        assert [signals.take(), signals.take()] == ["stop", ""]
    assert signal.getsignal(STOP) is before


@pytest.mark.parametrize(
    ("stop_at", "batches", "batch_s", "known", "ends"),
    [
        *(((at, rank), 100, 1.0, False, range(at, at + 4)) for at in (1, 60) for rank in (0, 2)),
        ((95, 0), 100, 1.0, False, [None]),  # it is soon over
        ((5, 1), 100, 0.09, False, [None]),
        (None, 100, 1.0, False, [None]),
        ((7, 0), 3000, 0.05, True, [10]),  # asked about twice a second, so quick batches do not pay
    ],
)
def test_a_long_window_ends_early_on_all_ranks_after_the_same_batch(
    clock, stop_at, batches, batch_s, known, ends
):
    """`stop_at`: the batch before which a rank hears SIGTERM, and the rank.

    The rank of the first stage is two batches ahead; the others ask after it has decided.
    """
    ranks = ranks_of(dist.HashStore(), 3)
    for _, early in ranks:
        early.begin_window(batches, batch_s if known else None)
    found: list[int | None] = [None] * 3
    for batch in range(1, batches + 2):
        clock.now += batch_s
        if stop_at and stop_at[0] == batch:
            ranks[stop_at[1]][0].on_signal(STOP)
        for rank, (_, early) in enumerate(ranks):
            asks = batch if rank == 0 else batch - 2
            if found[rank] is None and 1 <= asks < batches and early.ends_window(asks, batch):
                found[rank] = asks
    assert found[0] == found[1] == found[2]
    assert found[0] in ends


def test_batches_that_have_not_begun_say_nothing_of_how_long_one_takes(clock):
    """With a large buffer_size it is asked of batches far ahead."""
    ((signals, early),) = ranks_of(dist.HashStore(), 1)
    early.begin_window(60)
    clock.now = 8.0
    assert not early.ends_window(52, begun=2)
    signals.on_signal(STOP)
    assert early.ends_window(52, begun=2)  # 4 s each, and 8 more


def test_where_the_store_is_lost_the_run_is_asked_to_stop_and_windows_run_to_their_ends(clock):
    """Whoever keeps it may be killed, and the ranks would train on for ever."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", kept.port, is_master=False, wait_for_workers=False)
    ((signals, early),) = ranks_of(dist.PrefixStore("a run", store), 1)
    with early.watching():
        early.begin_window(100)
        clock.now += 1.0
        assert (early.ends_window(1, 1), early.lost, signals.request) == (False, False, "")
    assert not early.lost
    ((signals, early),) = ranks_of(store, 1)
    with early.watching():
        early.begin_window(100)
        clock.now += 1.0
        del kept
        while not early.lost:
            sleep(0.01)
        assert (early.ends_window(1, 1), signals.take()) == (False, "stop")
