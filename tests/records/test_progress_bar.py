"""The progress of a pass."""

import logging
import sys
import time

import pytest

from pipetrain.records import progress_bar as module
from pipetrain.records.progress_bar import Bar


@pytest.fixture
def bar() -> Bar:
    return Bar()


def test_off_a_terminal_nothing_is_drawn_and_a_long_pass_says_how_far_it_is(bar, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="pipetrain")
    start = time.perf_counter()
    for passed in (1, 5, 11, 12, 30):
        monkeypatch.setattr(module.time, "perf_counter", lambda now=start + passed: now)
        bar.tick("epoch 1", 6)
    assert [record.getMessage() for record in caplog.records] == ["epoch 1: 3 of 6", "epoch 1: 5 of 6"]
    assert bar._bar is None


@pytest.mark.parametrize("notebook", [False, True])
def test_on_a_terminal_or_in_a_notebook_a_bar_counts_and_is_gone_at_the_end(bar, monkeypatch, notebook):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: not notebook, raising=False)
    if notebook:
        monkeypatch.setitem(sys.modules, module.NOTEBOOK, module)
    for _ in range(2):
        bar.tick("epoch 1", 3)
    assert (bar._bar.n, bar._bar.total, bar._bar.desc) == (2, 3, "epoch 1")
    bar.tick("epoch 1", 3)
    assert bar._bar is None
    bar.tick("epoch 2", 3)  # fewer than it said
    bar.tick("evaluation 1", 2)
    assert (bar._bar.n, bar._bar.total) == (1, 2)
    bar.close()  # as a pass that failed
    bar.tick("evaluation 2", 4)
    assert (bar._bar.n, bar._bar.total) == (1, 4)
    bar.close()
    monkeypatch.setattr(module.log, "level", logging.WARNING)
    bar.tick("evaluation 3", 4)
    assert bar._bar is None
