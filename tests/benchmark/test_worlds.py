"""Nothing is left behind: not by a rank that dies or fails, not by a parent that is killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmark.contestants import race, rows_of_race
from benchmark.tasks import Scale
from benchmark.worlds import WorldFailed, run_world, titled
from tests.support import DEADLINE_S
from tests.support.fork_server import context

pytestmark = pytest.mark.processes


class Napper:
    """Sleeps on one rank longer than on the other."""

    def __init__(self, name, links, seconds):
        self.name, self.batches, self.bound = name, 2, 0.0
        self._seconds = seconds if links.world.rank == 1 else 0.0

    def run(self):
        time.sleep(self._seconds)


def naps(links, say):
    return race(links, [Napper("a", links, 0.2), Napper("b", links, 0.1)], 2, say)


def test_turns_are_timed_to_the_slowest_rank_on_every_rank_alike():
    said = []
    first, second = run_world(naps, 2, titled(said.append, "naps"))
    assert first == second
    assert {name: len(values) for name, values in first.items()} == {"a": 2, "b": 2}
    assert min(first["a"]) >= 0.1
    assert min(first["b"]) >= 0.05
    order = {"warm-up": "ba", "round 1/2": "ab", "round 2/2": "ba"}
    assert said == [f"naps: {turn}: {name}" for turn, names in order.items() for name in names]


class Failing(Napper):
    """Fails on one rank in its second turn, while the other waits for it."""

    turns = 0

    def run(self):
        self.turns += 1
        if self.turns == 2 and self._seconds:
            raise ValueError("no more\nand so on")
        if self.turns == 2:
            time.sleep(DEADLINE_S)


def dies(links):
    if links.world.rank == links.world.size - 1:
        os._exit(3)
    return Napper("dies", links, 0.0)


def entrants(links):
    return {
        "a": lambda: Napper("a", links, 0.1),
        "fails": lambda: Failing("fails", links, 0.1),
        "dies": lambda: dies(links),
        "b": lambda: Napper("b", links, 0.1),
    }


def test_one_that_fails_costs_its_own_row_alone(capsys):
    start = time.monotonic()
    against = {"x fails": "fails", "x b": "b"}
    least = {"a": {"x fails": 1.0, "x b": 0.01}}
    rows = list(rows_of_race("naps", 2, entrants, Scale(2), print, against, least))
    assert time.monotonic() - start < DEADLINE_S / 2
    assert {row.contestant: row.failure for row in rows} == {
        "dies": "rank 1: process 1 terminated with exit code 3",
        "fails": "ValueError: no more",
        "a": "",
        "b": "",
    }
    assert [len(row.values) for row in rows] == [0, 0, 2, 2]
    assert rows[2].targets == {"x b >= 0.01": True}
    assert "in run\n    raise ValueError" in capsys.readouterr().err


def dying_alone(links):
    return {"dies": lambda: dies(links)}


def test_where_all_fail_each_has_its_row():
    (row,) = rows_of_race("naps", 1, dying_alone, Scale(1), print, {}, {})
    assert row.failure


def nobodys(links):
    raise ValueError("no more")


def test_what_is_nobody_s_fault_fails_the_suite():
    with pytest.raises(WorldFailed) as failed:
        list(rows_of_race("naps", 1, nobodys, Scale(1), print, {}, {}))
    assert failed.value.reason == "ValueError: no more"


def fail(links, say, how):
    if links.world.rank == 1:
        if how == "die":
            os._exit(3)
        if how == "raise":
            raise ValueError("no more")
    time.sleep(DEADLINE_S)


@pytest.mark.parametrize(
    ("how", "deadline", "says"),
    [
        ("die", DEADLINE_S, "rank 1: process 1 terminated with exit code 3"),
        ("raise", DEADLINE_S, "ValueError: no more"),
        ("hang", 3.0, "ranks [0, 1] were still running after 3 s"),
    ],
)
def test_a_rank_that_fails_or_hangs_ends_all(how, deadline, says):
    start = time.monotonic()
    with pytest.raises(WorldFailed) as failed:
        run_world(fail, 2, print, how, deadline=deadline)
    assert time.monotonic() - start < DEADLINE_S / 2
    assert str(failed.value).strip().splitlines()[-1] == says


def linger(links, say):
    say(" ".join(map(str, links.gather("pids", os.getpid()))))
    time.sleep(DEADLINE_S)


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
