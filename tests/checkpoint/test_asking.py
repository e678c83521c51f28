"""Signals: every rank acts after the same window, whoever was asked and when."""

from __future__ import annotations

import os
import signal
from itertools import product

import pytest
import torch.distributed as dist

from pipetrain.checkpoint.asking import Asking
from pipetrain.seal import Seal, SealedStore

STOP, SAVE = signal.SIGTERM, signal.SIGUSR1


def acted(asked: list[tuple[int, int, int]], ranks: int = 3, windows: int = 8) -> list[list[str]]:
    """What each rank does after each window; `asked`: (window, rank, signal), before the window's end.

    Ranks end a window in the order that is worst: the first stage at once, the others when they have to.
    """
    store = SealedStore(dist.HashStore(), Seal("of a test", ""))
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
def test_all_ranks_act_after_the_same_window_and_soon(window, rank, number, capfd):
    first, *others = acted([(window, rank, number)])
    assert all(other == first for other in others)
    word = {STOP: "stop", SAVE: "save"}[number]
    assert [act for act in first if act] == [word]
    assert window <= first.index(word) + 1 <= window + 2
    when = {STOP: "when the pipeline is drained, then stop", SAVE: "at the end of this window, then going"}
    assert f"rank {rank} got {number.name}: saving {when[number]}" in capfd.readouterr().err


def test_a_stop_after_a_save_is_not_forgotten(capfd):
    first, *others = acted([(1, 1, SAVE), (2, 2, STOP)])
    assert all(other == first for other in others)
    assert [act for act in first if act] == ["save", "stop"]


def test_asked_at_once_they_stop_once(capfd):
    first, *others = acted([(2, 0, STOP), (2, 1, STOP), (2, 2, STOP)])
    assert all(other == first for other in others)
    assert "stop" in first


def test_alone_it_acts_at_once_and_the_old_handlers_come_back():
    before = signal.getsignal(STOP)
    asking = Asking(None, 0, 0)
    with asking.listening():
        os.kill(os.getpid(), STOP)
        assert asking.after_window() == "stop"
        assert asking.after_window() == ""
    assert signal.getsignal(STOP) is before
