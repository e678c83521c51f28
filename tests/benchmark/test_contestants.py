"""The contestants train the same job: their losses are those of a plain loop."""

from __future__ import annotations

from itertools import chain

import pytest

from benchmark import api, gpt
from benchmark.contestants import Plain
from benchmark.overhead import TASK
from benchmark.tasks import prepare
from benchmark.worlds import run_world
from tests.support.deadlines import DEADLINE_S

pytestmark = pytest.mark.processes

BATCHES, WINDOW = 3, 6


def turns(contestants):
    """Return the losses of two turns of each, where this rank knows them."""
    losses = {}
    for one in contestants:
        one.run()
        losses[one.name] = one.losses
        one.run()
        losses[one.name] = losses[one.name] + one.losses
    return losses


def gpt_turns(mesh, say):
    return turns(gpt.contestants(mesh, gpt.SMALL.extended("dtype=float64"), BATCHES, WINDOW))


def test_the_gpt_is_trained_alike():
    first, last = run_world(gpt_turns, gpt.RANKS, print, deadline=DEADLINE_S)
    plain = first[gpt.ONE_THREAD]
    assert len(plain) == 2 * BATCHES
    assert plain[-1] < plain[0] - 0.1
    for name in ("gpipe", "1f1b", "torch GPipe", "torch 1F1B"):
        assert last[name] == pytest.approx(plain, abs=1e-12), name
    shared = [(a + b) / 2 for a, b in zip(first["torch DDP"], last["torch DDP"], strict=True)]
    assert shared == pytest.approx(plain, abs=1e-12)
    assert last["pipedream"][0] == pytest.approx(plain[0], abs=1e-12)
    assert len(last["pipedream"]) == 2 * WINDOW
    assert last["pipedream"][-1] < plain[-1]


def api_turns(mesh, say):
    ways = api.ways(mesh, "1f1b", BATCHES)
    plain = Plain("plain", prepare(TASK, "1f1b", api.RANKS), mesh, BATCHES * (len(ways) - 1))
    return turns(ways), turns([plain])["plain"]


def test_each_way_through_a_pipeline_goes_on_with_the_training():
    (_, plain), (ways, _) = run_world(api_turns, api.RANKS, print, deadline=DEADLINE_S)
    engine = ways.pop(api.ENGINE)
    assert engine == pytest.approx(plain[: len(engine)], rel=1e-5)
    assert list(ways) == [api.TRAIN, api.LOADER, api.STEP]
    assert list(chain(*ways.values())) == pytest.approx(plain, rel=1e-5)
