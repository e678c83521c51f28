"""The contestants of each suite train the same job: their losses are those of a plain loop."""

from __future__ import annotations

import pytest
from torch import nn

from benchmark import lengths, models, replicas, schedules
from benchmark.contestants import plain, torch_pipeline
from benchmark.paced import task_of
from benchmark.tasks import Task, prepare
from benchmark.worlds import run_world
from tests.support import DEADLINE_S

GPT = models.SMALL["gpt"].extended("model.depth=2", "dtype=float64", "microbatches=4")
CNN = Task(
    ("model._target_=tests.benchmark.test_contestants.small_cnn", "memory_format=channels_last")
).extended("dtype=float64", "microbatches=4", "batch_size=8")
BATCHES, WINDOW = 2, 4


def small_cnn():
    blocks = [nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.ReLU()) for i in range(4)]
    return nn.Sequential(*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)))


def built(builders):
    """Return contestants, each with its name."""
    made = {name: build() for name, build in builders.items()}
    assert [one.name for one in made.values()] == list(made)
    return made.values()


def losses_of_turns(contestants, turns=1):
    """Return the losses of each, where this rank knows them."""
    losses = {one.name: [] for one in contestants}
    for one in contestants:
        for _ in range(turns):
            one.run()
            losses[one.name] += one.losses
    return losses


def a_gpt(links, say):
    return losses_of_turns(built(models.on_two(GPT, BATCHES, WINDOW, links)), turns=2)


@pytest.mark.processes
def test_on_two_processes():
    first, last = run_world(a_gpt, 2, print, deadline=DEADLINE_S)
    loop = first[models.ONE_THREAD]
    assert len(loop) == 2 * BATCHES
    assert loop[-1] < loop[0] - 0.1
    for name in (*models.TORCHS, "interleaved_1f1b"):
        ours = first[name] or last[name]  # of a V placement the first rank knows them
        assert ours[: len(loop)] == pytest.approx(loop, abs=1e-12), name  # zbv has a longer window
        theirs = f"torch {name}"
        if theirs in first:
            assert (first[theirs] or last[theirs]) == pytest.approx(loop, abs=1e-12), theirs
    shared = [(a + b) / 2 for a, b in zip(first["torch DDP"], last["torch DDP"], strict=True)]
    assert shared == pytest.approx(loop, abs=1e-12)
    assert last["pipedream"][0] == pytest.approx(loop[0], abs=1e-12)
    assert len(last["pipedream"]) == 2 * WINDOW


def images(links, say):
    if links.world.size == 1:
        return losses_of_turns(built(models.in_one(CNN, 2, links)))
    splitting = torch_pipeline("zbv", prepare(CNN, "zbv", 2), links, 2)
    return losses_of_turns([*built(models.on_gpu(CNN, 2, WINDOW, links)), splitting])


@pytest.mark.processes
def test_as_on_a_gpu_and_images_travel_with_their_channels_innermost():
    (alone,) = run_world(images, 1, print, deadline=DEADLINE_S)
    first, last = run_world(images, 2, print, deadline=DEADLINE_S)
    loop = alone[models.PLAIN]
    assert loop[1] != loop[0]
    assert alone["1f1b"] == pytest.approx(loop, abs=1e-12)
    assert last.keys() == {"1f1b", "gpipe", "pipedream", "torch gpipe", "torch 1f1b", "torch zbv"}
    for name in last.keys() - {"pipedream"}:
        assert (last[name] or first[name]) == pytest.approx(loop, abs=1e-12), name


def paced(links, say):
    made = built(schedules.contestants((4,), 0.0, True, links))
    task = task_of(2, 4)
    losses = losses_of_turns([*made, plain("plain", prepare(task, "1f1b", 2), links, 1)])
    return losses, {one.name: one.bound for one in made}


@pytest.mark.processes
def test_on_a_paced_machine():
    ranks = run_world(paced, 2, print, deadline=DEADLINE_S)
    (first, bounds), (last, _) = ranks
    assert {name: first[name] or last[name] for name in bounds} == {
        name: pytest.approx(first["plain"], rel=1e-6) for name in bounds
    }
    assert len(bounds) == 6


def of_lengths(links, say):
    return losses_of_turns(built(lengths.contestants(GPT, (3, 16, 1), links)), turns=2)


@pytest.mark.processes
def test_batches_of_their_own_lengths_learn_as_padded_ones():
    *_, last = run_world(of_lengths, 2, print, deadline=DEADLINE_S)
    first, *others = last.values()
    assert len({*map(round, first, [9] * 6)}) == 6
    assert len(others) == 5
    for losses in others:
        assert losses == pytest.approx(first, abs=1e-12)


def with_replicas(links, say):
    """Also where a rank is of no stage."""
    if links.world.size == 3:
        made = built(replicas.sleeping("pipedream", 4, 0.0, ([1, 1], [2, 1]), None, links))
        return losses_of_turns(made)
    return losses_of_turns(built(replicas.on_two(CNN, 2, links)))


@pytest.mark.processes
def test_replicas_beside_ddp_and_the_same_without():
    first, last = run_world(with_replicas, 2, print, deadline=DEADLINE_S)
    ddp = [(a + b) / 2 for a, b in zip(first["torch DDP"], last["torch DDP"], strict=True)]
    assert last["1f1b"] == pytest.approx(ddp, abs=1e-12)
    shares = zip(first["replicas=2"], last["replicas=2"], strict=True)
    assert [a + b for a, b in shares] == pytest.approx(ddp, abs=1e-12)
    *_, end = run_world(with_replicas, 3, print, deadline=DEADLINE_S)
    assert len(end["[2, 1]"]) == replicas.WINDOW
