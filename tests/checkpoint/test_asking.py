"""Signals: every rank acts after the same window, whoever was asked and when."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
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


@pytest.fixture(autouse=True)
def nobody_ends_this_process(monkeypatch):
    monkeypatch.setattr(Asking, "outlast", lambda *_: None)


def of(ranks: Any, store: dist.Store | None = None) -> Asking:
    asking = Asking(ranks, store, 0, str)
    asking.updated = True
    return asking


def alone() -> Asking:
    return of(Ranks(World(), DEADLINE_S))


def several(store: dist.Store) -> list[Asking]:
    barrier, board = Barrier(3), [None] * 3
    meshes: list[Any] = [LocalMesh(World(rank, 3), Wire(), barrier, board) for rank in range(3)]
    return [of(mesh, store) for mesh in meshes]


def acted(asked: list[tuple[int, int, int]], windows: int = 6) -> list[list[str]]:
    """What each of three ranks does after each window; `asked`: (window, rank, signal), before its end."""
    ranks = several(dist.HashStore())

    def act(rank: int) -> list[str]:
        acts: list[str] = []
        for window in range(1, windows + 1):
            for when, who, number in asked:
                if (when, who) == (window, rank):
                    ranks[rank].hear(number)
            acts.append(ranks[rank].after_window())
        return acts

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(act, range(3)))


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
    assert acted(asked) == [[acts.get(window, "") for window in range(1, 7)]] * 3


def test_alone_it_acts_at_once_and_the_old_handlers_come_back():
    before = signal.getsignal(STOP)
    asking = alone()
    with asking.handled():
        os.kill(os.getpid(), STOP)
        while not asking.asked:  # a thread hears it
            time.sleep(0.01)
        assert [asking.after_window(), asking.after_window()] == ["stop", ""]
    assert signal.getsignal(STOP) is before


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
    ranks = several(dist.HashStore())
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
    with ThreadPoolExecutor(3) as threads:
        return list(zip(found, threads.map(Asking.after_window, ranks), strict=True))


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("at", [1, 60])
def test_a_long_window_ends_early_on_all_ranks_after_the_same_batch(clock, at, rank):
    first, *others = ended(clock, (at, rank), 100, 1.0)
    assert all(other == first for other in others)
    assert first[1] == "stop"
    assert at <= first[0] <= at + 3


def test_a_window_that_is_soon_over_is_run_to_its_end(clock):
    assert ended(clock, (95, 0), 100, 1.0) == [(None, "stop")] * 3
    assert ended(clock, (5, 1), 100, 0.09)[0][0] is None
    assert ended(clock, None, 100, 1.0) == [(None, "")] * 3


def test_batches_that_have_not_begun_say_nothing_of_how_long_one_takes(clock):
    """With a large buffer_size it is asked of batches far ahead."""
    one = alone()
    one.begin_window(60)
    clock.now = 8.0
    assert not one.ends_window(52, begun=2)
    one.hear(STOP)
    assert one.ends_window(52, begun=2)  # 4 s each, and 8 more
    assert (one.after_window(), one.after_window()) == ("stop", "stop")


def test_it_asks_about_twice_a_second_once_it_knows_how_long_a_batch_takes(clock):
    """So that quick batches do not pay for it."""
    first, *others = ended(clock, (7, 0), 3000, 0.05, known=True)
    assert first == others[0] == others[1] == (10, "stop")
