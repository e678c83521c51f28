"""The time of a message: on the real channel, the same for all ranks, and no more than arithmetic says."""

from __future__ import annotations

import math

import pytest
import torch

from pipetrain.runtime import roundtrip
from pipetrain.runtime.mesh import Mesh, World
from pipetrain.runtime.roundtrip import LARGE, SMALL, Link, slowest_link
from pipetrain.schedule.lower import edges
from pipetrain.schedule.programs import forward_only
from pipetrain.seal import SealedStore
from tests.support.worlds import run_world

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")


def both_ways(placement: list[int]) -> list[tuple[int, int]]:
    up = edges(forward_only(placement, 1))
    return [edge for a, b in up for edge in ((a, b), (b, a))]


def links(world: World, store: SealedStore, placements: list[list[int]]) -> list[Link]:
    found = []
    for number, placement in enumerate(placements):
        prefix = store.under(str(number))
        mesh = Mesh(world, placement, both_ways(placement), CPU, prefix, 30)
        found.append(slowest_link(mesh, buffer_size=2))
        mesh.close()
    return found


def test_all_ranks_learn_of_the_slowest_link():
    first, second, third = run_world(links, 3, [[0, 1, 2], [0, 1, 2, 0, 1, 2]])
    assert first == second == third
    for link in first:
        assert 0 <= link.latency_s < 30
        assert 0 <= link.s_per_byte < 30 / LARGE
        assert link.seconds(LARGE) > 0


def test_alone_messages_take_no_time():
    assert slowest_link(Mesh(World(), [0, 1], [(0, 1), (1, 0)], CPU, None, 30), 2) == Link(0, 0)


def test_the_line_goes_through_both_times(monkeypatch):
    times = {SMALL: 2.0, LARGE: 5.0}
    monkeypatch.setattr(roundtrip, "_one_way", lambda channel, mesh, stage, nbytes: times[nbytes])
    link = roundtrip._measure(None, None, 0)  # type: ignore[arg-type]
    assert math.isclose(link.seconds(SMALL), 2.0)
    assert math.isclose(link.seconds(LARGE), 5.0)
    times[LARGE] = 1.0  # noise: no message is faster for being larger
    assert roundtrip._measure(None, None, 0) == Link(2.0, 0.0)  # type: ignore[arg-type]
