"""torchgpipe trains as one process does, beside ours, and the bytes of both are those worked out by hand."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmark import models
from benchmark.contestants import plain
from benchmark.tasks import Task, prepare
from published.torchgpipe_race import THEIRS, race_torchgpipe

beside = pytest.importorskip("benchmark.torchgpipe_contestant", reason="pip install pipetrain[records]")
ALONE = SimpleNamespace(world=SimpleNamespace(rank=0, size=1), device=torch.device("cpu"))
IN_FOUR = ("dtype=float64", "microbatches=4", "batch_size=8")
SMALL = ("data.size=16", "data.train_limit=8", "data.test_limit=8")
SKIPPING = Task(("experiment=unet", "model.width=4", "partition=[9]", *SMALL, *IN_FOUR), None)
NORMED = Task(("model=vgg11", "model.width=4", "partition=[4]", *IN_FOUR))
TASKS = {"gpt": models.SMALL["gpt"].extended("partition=[3]", *IN_FOUR), "unet": SKIPPING, "vgg11": NORMED}
WIDTH, SAMPLES, M = 8, 16, 4  # SAMPLES of each of M microbatches
BLOCK = 8 * SAMPLES * WIDTH  # bytes of a microbatch between two layers
PRODUCTS = ("model._target_=tests.benchmark.test_torchgpipe_contestant.products", "dtype=float64")


def products():
    layers = ([nn.Linear(WIDTH, WIDTH), nn.Tanh()] for _ in range(2))
    return nn.Sequential(*(layer for pair in layers for layer in pair))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("gpt", "never"),
        ("vgg11", "except_last"),
        ("unet", "always"),
        ("gpt", "always"),
        ("gpt", "except_last"),
    ],
)
def test_trains_as_one_process_does(name, recompute):
    job = partial(prepare, TASKS[name], "gpipe", 2)
    loop = plain("plain", job(), ALONE, 3)
    theirs = beside.TorchGPipe(job(), ALONE, 3, recompute, deferred=name == "vgg11")
    loop.run()
    theirs.run()
    assert theirs.losses == pytest.approx(loop.losses, abs=1e-10)
    assert len(theirs.forwards) == 3
    assert len(theirs.peaks()) == 2
    loop.run()
    assert theirs.losses == pytest.approx(loop.losses, abs=1e-10)  # of the turn in which bytes were counted


@pytest.mark.parametrize(
    ("recompute", "blocks"),
    [
        # The first device: the outputs of tanh, and one before it. The second: copies of these, the outputs
        # of tanh again, and of the whole batch the logarithms of softmax, their gradients, the scores'.
        ("never", (M + 1, 5 * M)),
        # One microbatch's output, its gradient, and that of the input, which phonies of theirs ask for. The
        # second: copies, and what is of the whole batch.
        ("always", (3, 4 * M)),
    ],
)
def test_bytes_of_theirs_by_hand(recompute, blocks):
    task = Task(
        (*PRODUCTS, f"batch_size={M * SAMPLES}", f"microbatches={M}", "partition=[2]"), (WIDTH,), WIDTH
    )
    theirs = beside.TorchGPipe(prepare(task, "gpipe", 2), ALONE, 1, recompute, deferred=False)
    theirs.run()
    first, second = theirs.peaks()
    loss_and_its_weight = 2 * 8
    assert (first, second - loss_and_its_weight) == tuple(BLOCK * each for each in blocks)


@pytest.mark.parametrize("recompute", ["always", "except_last"])
def test_tokens_carry_its_ordering_on_one_device(recompute):
    task = models.SMALL["gpt"].extended("partition=even", "microbatches=8", "batch_size=8", "model.depth=8")
    peaks = {}
    for mode in ("never", recompute):
        theirs = beside.TorchGPipe(prepare(task, "gpipe", 1), ALONE, 1, mode, deferred=False)
        theirs.run()
        peaks[mode] = sum(theirs.peaks())
    assert peaks[recompute] < peaks["never"] / 2  # of integers, all are held at once


@pytest.mark.processes
def test_a_race_whose_results_are_json_and_bytes_of_ours_by_hand():
    words = (*PRODUCTS, f"batch_size={M * SAMPLES}", f"microbatches={M}", "recompute=never")
    entrants = {name: (name, [2, 2]) for name in ("gpipe", "1f1b", THEIRS)}
    results = race_torchgpipe(words, entrants, 2, [WIDTH], WIDTH)
    assert json.loads(json.dumps(results)) == results
    assert {name: len(of["forwards"]) for name, of in results.items()} == {"gpipe": 2, "1f1b": 0, THEIRS: 2}
    for of in results.values():
        assert of["losses"] == pytest.approx(results[THEIRS]["losses"], abs=1e-12)
        assert len(of["seconds"]) == 2
    assert min(results[THEIRS]["forwards"]) < max(results[THEIRS]["seconds"])
    # Of the first rank: outputs of tanh in flight, the gradient that has come and two receives posted ahead,
    # and the gradient of what is before tanh.
    first = {name: of["peaks"][0] for name, of in results.items()}
    assert first == {"gpipe": (M + 4) * BLOCK, "1f1b": (2 + 4) * BLOCK, THEIRS: (M + 1) * BLOCK}
