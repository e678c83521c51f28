"""A program is told of SIGTERM and Ctrl-C, if it asks, on all ranks alike; a second Ctrl-C ends it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from torch.nn.functional import cross_entropy

from pipetrain import Pipeline, signals
from tests.docs.test_examples import EXAMPLES
from tests.support.processes import TWO, await_line, checkpoints, ended, living, running
from tests.users.programs import batch, mlp, sgd

NOTED = (signal.SIGTERM, signal.SIGINT)


def pipeline() -> Pipeline:
    return Pipeline(mlp(), cross_entropy, sgd, partition=[2], threads=1)


@contextmanager
def handlers() -> Iterator[list[int]]:
    """Handlers of the program's own, which note what they are called with."""
    called: list[int] = []
    before = {number: signal.signal(number, lambda number, _: called.append(number)) for number in NOTED}
    try:
        yield called
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def told(number: int, rank: int, window: int) -> tuple[list[bool], int]:
    """What a program reads after each update when a rank gets a signal, SIGTERM twice, after the third."""
    seen: list[bool] = []
    with handlers() as called, pipeline() as pipe:
        assert not pipe.stopping
        for _ in pipe.train([batch()] * 12, window=window):
            seen.append(pipe.stopping)
            if seen[-1]:
                break
            if len(seen) == 3 and pipe.rank == rank:
                for _ in range(2 if number == signal.SIGTERM else 1):
                    os.kill(os.getpid(), number)
        assert not called
        assert pipe.stopping
        pipe.evaluate([batch()])
        return seen, pipe.updates


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), (signal.SIGINT, 0)])
def test_all_ranks_are_told_after_the_same_window(ranks, number, rank):
    assert ranks(told, number, rank, 1) == [([False] * 3 + [True], 4)] * 2
    assert ranks(told, number, rank, 4) == [([False] * 4 + [True], 8)] * 2


def as_usual() -> list[list[int]]:
    """What the program's own handlers get: before it asks, after a second Ctrl-C, and once it is closed."""
    got = []
    with handlers() as called:
        with pipeline() as pipe:
            pipe.step(*batch())
            os.kill(os.getpid(), signal.SIGTERM)
            got.append([*called])
            assert not pipe.stopping
            with patch.object(signals, "DEBOUNCE_S", -1.0):
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
                    os.kill(os.getpid(), number)
            got.append([*called])
        with pipeline() as pipe:
            pipe.step(*batch())
            assert not pipe.stopping
        os.kill(os.getpid(), signal.SIGINT)
        return [*got, [*called]]


def test_a_program_that_does_not_ask_and_one_that_is_interrupted_twice_end_as_usual(ranks):
    term, interrupt = int(signal.SIGTERM), int(signal.SIGINT)
    usual = [[term], [term] * 3, [term] * 3 + [interrupt]]
    assert ranks(as_usual) == [usual] * 2


@pytest.mark.processes
def test_under_torchrun_a_program_with_data_workers_saves(tmp_path):
    """The example of the page, which takes long here and says when it trains."""
    text = (EXAMPLES / "stopping.py").read_text().replace("shuffle=True)", "shuffle=True, num_workers=1)")
    text = text.replace("updates < 40", "updates < 10**9")
    text = text.replace(
        "        if pipe.stopping:", "        print('trained', flush=True)\n        if pipe.stopping:"
    )
    (tmp_path / "mine.py").write_text(text)
    with running(tmp_path, [*TWO, "mine.py"], cold=True) as process:  # data workers are forked too
        await_line(process, "trained")
        for pid in living(process):  # as a service manager does, to data workers too
            os.kill(pid, signal.SIGTERM)
        out = ended(process)
        assert not living(process)
    assert "pipetrain: rank 1 got SIGTERM: pipe.stopping is true after this window" in out
    (updates,) = re.findall(r"^saved after (\d+) updates", out, re.MULTILINE)
    manifest, *_ = checkpoints(tmp_path / "runs" / "stopping").values()
    assert manifest.position.update == int(updates)
