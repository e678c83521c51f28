"""Nothing is left behind: not by a rank that dies or fails, not by a parent that is killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmark import worlds
from benchmark.contestants import race
from benchmark.worlds import WorldFailed, run_world, titled
from tests.support.deadlines import DEADLINE_S
from tests.support.processes import context

pytestmark = pytest.mark.processes


class Napper:
    """Sleeps on one rank longer than on the other."""

    def __init__(self, name, mesh, seconds):
        self.name, self.batches = name, 2
        self._seconds = seconds if mesh.world.rank == 1 else 0.0

    def run(self):
        time.sleep(self._seconds)


def naps(mesh, say):
    return race(mesh, [Napper("a", mesh, 0.2), Napper("b", mesh, 0.1)], 2, say)


def die_early(mesh, say):
    if mesh.world.rank == 1:
        os._exit(3)
    time.sleep(DEADLINE_S)


def linger(mesh, say):
    pids = mesh.gather("pids", os.getpid())
    say(" ".join(map(str, pids)))
    time.sleep(DEADLINE_S)


def test_turns_are_timed_to_the_slowest_rank_on_every_rank_alike():
    said = []
    first, second = run_world(naps, 2, titled(said.append, "naps"))
    assert first == second
    assert {name: len(values) for name, values in first.items()} == {"a": 2, "b": 2}
    assert min(first["a"]) >= 0.1
    assert min(first["b"]) >= 0.05
    order = {"warm-up": "ba", "round 1/2": "ab", "round 2/2": "ba"}
    assert said == [f"naps: {turn}: {name}" for turn, names in order.items() for name in names]


def test_a_rank_that_dies_ends_all(monkeypatch):
    monkeypatch.setattr(worlds, "LAST_WORDS_S", 0.2)
    start = time.monotonic()
    with pytest.raises(WorldFailed, match="rank 1 died without a word"):
        run_world(die_early, 2, print)
    assert time.monotonic() - start < DEADLINE_S / 2


def fail_in_turn(mesh, say):
    time.sleep(0.0 if mesh.world.rank == 1 else 0.5)
    raise ValueError("no more" if mesh.world.rank == 1 else "Connection closed by peer")


def test_the_rank_that_failed_first_is_named_first():
    with pytest.raises(WorldFailed) as failed:
        run_world(fail_in_turn, 2, print)
    whole, last = str(failed.value), str(failed.value).splitlines()[-1]
    assert whole.count("Traceback") == 2
    assert last == "first rank 1: ValueError: no more; then rank 0: ValueError: Connection closed by peer"


def parent_of(pipe):
    run_world(linger, 2, pipe.send)


def test_a_parent_that_is_killed_takes_its_ranks_with_it():
    here, there = context().Pipe(duplex=False)
    parent = context().Process(target=parent_of, args=(there,))
    parent.start()
    assert here.poll(DEADLINE_S / 2)
    pids = [int(word) for word in here.recv().split()]
    assert all(map(running, pids))
    parent.kill()
    parent.join()
    limit = time.monotonic() + DEADLINE_S / 2
    while any(map(running, pids)):
        assert time.monotonic() < limit
        time.sleep(0.05)


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
