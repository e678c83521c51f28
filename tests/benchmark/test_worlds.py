"""Nothing is left behind: not by a rank that dies or fails, not by a parent that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmark.contestants import race
from benchmark.worlds import WorldFailed, run_world, titled
from tests.support.deadlines import DEADLINE_S

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]


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


def test_a_rank_that_dies_ends_all():
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


LINGER = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "scripts")!r}]
from benchmark.worlds import run_world
from tests.benchmark.test_worlds import linger
if __name__ == "__main__":
    run_world(linger, 2, lambda text: print(text, flush=True))
"""


def test_a_parent_that_is_killed_takes_its_ranks_with_it(tmp_path):
    script = tmp_path / "linger.py"
    script.write_text(LINGER)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(word) for word in parent.stdout.readline().split()]
            assert len(pids) == 2
            parent.kill()
            parent.wait(DEADLINE_S / 2)
            limit = time.monotonic() + DEADLINE_S / 2
            while any(map(running, pids)):
                assert time.monotonic() < limit
                time.sleep(0.05)
        finally:
            parent.kill()


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
