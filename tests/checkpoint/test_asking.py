"""Signals: every rank acts after the same window, whoever was asked and when."""

from __future__ import annotations

import os
import signal
from itertools import product

import pytest
import torch.distributed as dist

from pipetrain.checkpoint import asking as module
from pipetrain.checkpoint.asking import Asking

STOP, SAVE = signal.SIGTERM, signal.SIGUSR1


def acted(asked: list[tuple[int, int, int]], ranks: int = 3, windows: int = 8) -> list[list[str]]:
    """What each rank does after each window; `asked`: (window, rank, signal), before the window's end.

    Ranks end a window in the order that is worst: the first stage at once, the others when they have to.
    """
    store = dist.HashStore()
    ranks_asking = [Asking(store, rank, first=0) for rank in range(ranks)]
    acts: list[list[str]] = [[] for _ in range(ranks)]
    for window in range(1, windows + 1):
        for rank, asking in enumerate(ranks_asking):
            for when, who, number in asked:
                if (when, who) == (window, rank):
                    asking._take(number, None)
            acts[rank].append(asking.after_window())
    return acts


@pytest.mark.parametrize(("window", "rank", "number"), list(product((1, 2, 5), range(3), (STOP, SAVE))))
def test_all_ranks_act_after_the_same_window_and_soon(window, rank, number):
    first, *others = acted([(window, rank, number)])
    assert all(other == first for other in others)
    word = {STOP: "stop", SAVE: "save"}[number]
    assert [act for act in first if act] == [word]
    assert window <= first.index(word) + 1 <= window + 2


def test_a_stop_after_a_save_is_not_forgotten():
    first, *others = acted([(1, 1, SAVE), (2, 2, STOP)])
    assert all(other == first for other in others)
    assert [act for act in first if act] == ["save", "stop"]


def test_asked_at_once_they_stop_once():
    first, *others = acted([(2, 0, STOP), (2, 1, STOP), (2, 2, STOP)])
    assert all(other == first for other in others)
    assert "stop" in first


def test_alone_it_acts_at_once_and_the_old_handlers_come_back():
    before = signal.getsignal(STOP)
    asking = Asking(None, 0, 0)
    with asking.listening(str):
        asking.updated()
        os.kill(os.getpid(), STOP)
        assert asking.after_window() == "stop"
        assert asking.after_window() == ""
    assert signal.getsignal(STOP) is before
    asking._outlast(STOP, 0.0, str)  # which ends the process only while it listens


# Within a window


class Time:
    """A clock that stands still unless it is told."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Time:
    clock = Time()
    monkeypatch.setattr(module, "time", clock)
    return clock


def ended(
    clock: Time, asked: tuple[int, int] | None, batches: int, batch_s: float, known: bool = False
) -> list[tuple[int | None, str]]:
    """After how many batches the ranks end a window, and what they do then.

    `asked`: the batch before which a rank hears SIGTERM, and the rank. The rank of the first stage is two
    batches ahead; the others ask after it has decided.
    """
    store = dist.HashStore()
    ranks = [Asking(store, rank, first=0) for rank in range(3)]
    for asking in ranks:
        asking.begin_window(batches, batch_s if known else None)
    found: list[int | None] = [None] * 3
    for batch in range(1, batches + 2):
        clock.now += batch_s
        if asked and asked[0] == batch:
            ranks[asked[1]]._take(STOP, None)
        for rank, asking in enumerate(ranks):
            asks = batch if rank == 0 else batch - 2
            if found[rank] is None and 1 <= asks < batches and asking.ends_window(asks, batch):
                found[rank] = asks
    return [(end, asking.after_window()) for end, asking in zip(found, ranks, strict=True)]


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("at", [1, 5, 60])
def test_a_long_window_ends_early_on_all_ranks_after_the_same_batch(clock, at, rank):
    first, *others = ended(clock, (at, rank), 100, 1.0)
    assert all(other == first for other in others)
    assert first[1] == "stop"
    assert at <= first[0] <= at + 3


def test_a_window_that_is_soon_over_is_run_to_its_end(clock):
    assert ended(clock, (95, 0), 100, 1.0)[0] == (None, "")  # decided for the end of the next one
    assert ended(clock, (5, 1), 100, 0.09)[0][0] is None
    assert ended(clock, None, 100, 1.0) == [(None, "")] * 3


def test_batches_that_have_not_begun_say_nothing_of_how_long_one_takes(clock):
    """With a large buffer_size it is asked of batches far ahead."""
    alone = Asking(None, 0, 0)
    alone.begin_window(60)
    alone._take(STOP, None)
    clock.now = 8.0
    assert alone.ends_window(52, begun=2)  # 4 s each, and 8 more


def test_it_asks_about_twice_a_second_once_it_knows_how_long_a_batch_takes(clock):
    """So that quick batches do not pay for it."""
    first, *others = ended(clock, (7, 0), 3000, 0.05, known=True)
    assert first == others[0] == others[1] == (10, "stop")


def test_alone_a_long_window_ends_with_the_next_batch(clock):
    alone = Asking(None, 0, 0)
    alone.begin_window(100)
    clock.now = 3.0
    assert not alone.ends_window(3, 3)
    alone._take(STOP, None)
    assert alone.ends_window(4, 4)
    assert (alone.after_window(), alone.after_window()) == ("stop", "stop")
