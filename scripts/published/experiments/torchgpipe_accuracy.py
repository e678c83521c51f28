"""torchgpipe's accuracy of ResNet-101: its rows, of a model whose seeds differ little.

Each seed trains all rows from the same weights on the same samples in the same order, so that rows are
compared seed by seed. What is left of a difference is the BatchNorms', which see as many samples as a row's
microbatches have; without them all rows of a batch size compute what one process does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from math import sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from benchmark.report import progress
from benchmark.worlds import Say, run_ranks, titled
from pipetrain import Classification, Pipeline
from pipetrain.data import cifar10
from pipetrain.models.layers import stack
from pipetrain.runtime.comm.collectives import World
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Series, Step
from published.trials import Added, shrunk, small_digits

Pair = tuple[Tensor, Tensor]
"""Inputs [n, 3, 8, 8] and labels [n]."""


class Row(NamedTuple):
    """A row, as it is trained here; and as published, its `error` in % and its `deviation` in points."""

    batch: int
    microbatches: int
    ranks: int
    replicas: int = 1
    error: float | None = None
    deviation: float | None = None


ROWS = {
    "dataparallel-256": Row(256, 2, 2, 2, 22.02, 0.11),
    "dataparallel-1k": Row(1024, 4, 4, 4, 22.04, 0.24),
    "dataparallel-4k": Row(4096, 4, 4, 4),  # there out of memory
    "pipeline-256": Row(256, 4, 2, 1, 21.99, 0.13),
    "pipeline-1k": Row(1024, 64, 4, 1, 22.24, 0.19),
    "pipeline-4k": Row(4096, 64, 4, 1, 22.13, 0.09),
}
BESIDE = (  # rows whose errors are compared; the last one's like did not fit into the record's memory
    ("pipeline-256", "dataparallel-256"),
    ("pipeline-1k", "dataparallel-1k"),
    ("pipeline-4k", "dataparallel-4k"),
    ("pipeline-4k", "dataparallel-256"),
)
APART = 0.25  # points: the five published errors are 21.99 to 22.24 %
NEAR = 1e-9  # of a loss in double precision: sums in another order
BATCH, RATE = 256, 0.1  # the rate grows with the batch
DECAYS = (30, 60, 80)  # epochs of 90 after which it is a tenth
ONE, BARE, AGAIN = "one process", "without BatchNorm", "pipeline-256 on 4 ranks, recomputed"

FULL = {"data": "cifar10", "train": 40_000, "width": 256, "epochs": 6}
TINY = {"data": "digits", "train": 1280, "width": 16, "epochs": 1}
SEEDS, SMALLER = 6, 4  # images are as many times lower and narrower


def steps(quick: bool) -> dict[str, Step]:
    """Train each row with all seeds, one row in another way, and each for ten updates without BatchNorm."""
    size, seeds = (TINY, 2) if quick else (FULL, SEEDS)
    rows = {name: row for name, row in ROWS.items() if not quick or row.batch == BATCH}
    ones = {f"{ONE}, {row.batch}": Row(row.batch, 1, 1) for row in rows.values()}

    def step(row: Row, seeds: int, **more: Any) -> Step:
        way = {key: getattr(row, key) for key in ("batch", "microbatches", "ranks", "replicas")}
        return Step(learned, {**way, **size, "seeds": seeds, **more}, timed=False)

    return {
        **{name: step(row, seeds) for name, row in rows.items()},
        AGAIN: step(ROWS["pipeline-256"]._replace(ranks=4), 1, recompute="always"),
        **{f"{BARE}: {name}": step(row, 1, norm=False, updates=10) for name, row in (ones | rows).items()},
    }


def learned(ranks: int, seeds: int, **way: Any) -> dict[str, list[float]]:
    """Train on so many ranks; return by seed the top-1 errors in % and the mean losses on test images."""
    return dict(run_ranks(_meet, _learned, ranks, titled(progress, "accuracy"), (seeds, way))[0])


def _meet(world: World, path: str) -> None:
    if world.size > 1:
        place = f"file://{path}"
        dist.init_process_group("gloo", init_method=place, rank=world.rank, world_size=world.size)


def _learned(_: None, say: Say, seeds: int, way: Mapping[str, Any]) -> dict[str, list[float]]:
    errors, losses = list[float](), list[float]()
    for seed in range(seeds):
        say(f"batches of {way['batch']} in {way['microbatches']}, seed {seed}")
        of = trained(seed, **way)
        errors.append(100 * (1 - of["acc"]))
        losses.append(of["loss"])
    return {"errors": errors, "losses": losses}


def trained(
    seed: int,
    data: str,
    train: int,
    batch: int,
    microbatches: int,
    replicas: int,
    width: int,
    epochs: int,
    norm: bool = True,
    updates: int | None = None,
    recompute: str = "never",
) -> dict[str, float]:
    """Train by the record's recipe, or only so many of its updates; return the test loss and accuracy."""
    inputs, labels = images(data)
    torch.manual_seed(seed)
    model = residual_mlp(inputs[0].numel(), width, norm)
    if not norm:
        inputs, model = inputs.double(), model.double()
    peak, every = batch / BATCH * RATE, train // batch * epochs
    order = torch.Generator().manual_seed(seed)
    with Pipeline(
        model,
        task=Classification(),
        optimizer=lambda p: SGD(p, peak, momentum=0.9, weight_decay=1e-4, nesterov=True),
        schedule="gpipe",
        microbatches=microbatches,
        replicas=replicas,
        partition="even",
        recompute=recompute,
        lr_schedule=lambda update: rate(update / every, peak) / peak,
        threads=1,
    ) as pipe:
        for _ in range(epochs if updates is None else 1):
            samples = torch.randperm(train, generator=order)[: train // batch * batch]
            batches = torch.split(samples, batch)[:updates]
            for _loss in pipe.train([(inputs[ids], labels[ids]) for ids in batches]):
                pass
        rest = torch.split(torch.arange(train, len(labels)), 2048)
        return pipe.evaluate([(inputs[ids], labels[ids]) for ids in rest])


@cache
def images(data: str) -> Pair:
    """Return all images of CIFAR-10, or digits, of 8x8 pixels, and their labels."""
    if data == "digits":
        splits: Any = small_digits()
    else:
        whole = cifar10.load(os.environ.get("CIFAR10", "data"))
        splits = shrunk(whole.train, SMALLER), shrunk(whole.test, SMALLER)
    every = [(split, torch.arange(len(split))) for split in splits]
    inputs = torch.cat([split.inputs(ids, None) for split, ids in every])
    return inputs, torch.cat([split.targets(ids, None) for split, ids in every])


def residual_mlp(features: int, width: int, norm: bool = True) -> nn.Sequential:
    """Images to ten logits, in four layers: three of so many units with BatchNorm, two of them residual."""

    def units(inputs: int) -> nn.Sequential:
        between = [nn.BatchNorm1d(width)] if norm else []
        return nn.Sequential(nn.Linear(inputs, width, bias=not norm), *between, nn.ReLU())

    first = nn.Sequential(nn.Flatten(), units(features))
    between = {name: Added(units(width)) for name in ("second", "third")}
    return stack(first=first, **between, head=nn.Sequential(Scaled(), nn.Linear(width, 10)))


class Scaled(nn.Module):
    """Units over the root of their number, so that the head can learn at a large batch's rate."""

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = x / x.shape[1] ** 0.5
        return scaled


def rate(done: float, peak: float) -> float:
    """Return the record's rate after a share of the updates: up in 4 of 90 epochs, and down thrice."""
    epoch = 90 * done
    low = min(RATE, peak)
    return (low + (peak - low) * min(1.0, epoch / 4)) * 0.1 ** sum(epoch >= decay for decay in DECAYS)


def show(results: Results) -> Iterator[Finding]:
    """Hold the errors of pipelines against those of data parallel, seed by seed."""
    errors = {name: results[name]["errors"] for name in ROWS if name in results}
    for name, other in BESIDE:
        if name not in errors:
            continue
        gap, half = difference(errors[name], errors[other])
        theirs, beside = published(name, other), f"{name} less {other}"
        what = f"{beside}: top-1 error"
        yield Check.of_interval(what, theirs, (-APART, APART), gap, half, "points")
        what = f"{beside}: half of its interval, so that it can be told"
        yield Check.of(what, NOT, (0, APART), half, How.RUN, unit=" points")
    losses = {name: of["losses"][0] for name, of in results.items()}
    for name in errors:
        one = losses[f"{BARE}: {ONE}, {ROWS[name].batch}"]
        off = abs(losses[f"{BARE}: {name}"] / one - 1)
        what = f"{name}: {BARE}, off the loss of one process"
        yield Check.of(what, NOT, (0, NEAR), off, How.RUN, f"{off:.1g}")
    again, once = losses[AGAIN], losses["pipeline-256"]
    yield Check(f"{AGAIN}: the loss on 2", NOT, f"{once}", f"{again}", again == once, How.RUN)
    known = {name: row.error for name, row in ROWS.items() if row.error is not None}
    apart = {name: row.deviation for name, row in ROWS.items() if row.deviation is not None}
    yield Series.measured("", "top-1 error", "", errors, fmean, unit="%", published=known)
    of_seeds = {name: stdev(each) for name, each in errors.items()}
    yield Series("", "deviation of seeds", "", of_seeds, unit="points", published=apart)
    yield chart(errors)


def published(name: str, other: str) -> str:
    """Return the published difference of two rows, in points."""
    theirs, others = ROWS[name].error, ROWS[other].error
    if theirs is None or others is None:
        return NOT
    return f"{theirs - others:+.2f}"


def difference(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Return the mean of the differences seed by seed, and half of its 95 % interval."""
    from scipy.stats import t

    gaps = [one - other for one, other in zip(ours, theirs, strict=True)]
    return fmean(gaps), float(t.ppf(0.975, len(gaps) - 1)) * stdev(gaps) / sqrt(len(gaps))


def chart(errors: Mapping[str, list[float]]) -> Chart:
    """Draw the differences of the rows that are compared, with their intervals."""
    pairs = [(name, other) for name, other in BESIDE if name in errors]
    found = [difference(errors[name], errors[other]) for name, other in pairs]
    theirs = [published(name, other) for name, other in pairs]
    lines = [
        Line(
            "here",
            How.RUN,
            {n: gap for n, (gap, _) in enumerate(found, 1)},
            [(gap - half, gap + half) for gap, half in found],
        ),
        Line("torchgpipe", How.PUBLISHED, {n: float(of) for n, of in enumerate(theirs, 1) if of != NOT}),
        *(
            Line(f"{most:+}", How.BOUND, dict.fromkeys(range(1, len(pairs) + 1), most))
            for most in (APART, -APART)
        ),
    ]
    names = [f"{name}\n- {other}" for name, other in pairs]
    return Chart("Top-1 error less that of data parallel", "", "points", lines, categories=names)
