"""Small trainings with late gradients, emulated: the tasks, and a training of them.

Each method chooses its rate, and the share that it trains synchronously, from the same few: by seeds that are
not reported, on samples that are neither trained on nor reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from math import isfinite
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from pipetrain.config.build import make_correction
from pipetrain.config.parameter_groups import KINDS, ChainedOptimizer
from pipetrain.config.rate import learning_rate
from pipetrain.data import Images, Split, cifar10, digits, text
from pipetrain.models import gpt
from pipetrain.muon import Muon
from pipetrain.schedule.actions import Schedule, most_open, most_versions
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import one_f_one_b, pipedream, pipedream_2bw, zb_h1
from pipetrain.schedule.simulate import simulate, unit_cost
from published.emulation import Emulation, Feed, Pipeline, even_cuts

SCHEDULES: Mapping[str, Schedule] = {
    "synchronous": one_f_one_b,
    "zb_h1": zb_h1,
    "pipedream": pipedream,
    "pipedream_2bw": pipedream_2bw,
}
FLUSH = Pipeline(one_f_one_b, window=1)
WARMUP, DECAY = 0.05, {"sgd": 5e-4, "adamw": 0.01, "muon": 0.01}
OTHERS = {"accuracy": 3e-3, "loss": 2e-3}  # the rate of what Muon leaves to AdamW, by the task's metric
PIECES = {
    "synchronous": 8,
    "zb_h1": 8,
    "pipedream_2bw": 8,
}  # microbatches on paper, which change no training of these
POOLS, BLOCK = (1, 4), 32  # the convolutions that a max-pool follows; bytes of a text
HYBRID, FEEDBACK = "hybrid", "feedback"
SHARES = 0.4, 0.2, 0.6  # of the updates, which hybrid makes synchronously; rates are tried at the first


@dataclass(frozen=True)
class Task:
    """A model, its data (to train on, to tune by, to test on) and the rates that are tried, by optimizer.

    `every`: updates a point of a curve; `tuned`: the seeds that are tuned by.
    """

    model: Callable[[], nn.Sequential]
    data: Callable[[], tuple[Split, Split, Split]]
    rates: Mapping[str, Sequence[float]]
    batch_size: int = 32
    epochs: int = 8
    every: int = 44
    metric: str = "accuracy"  # of the images, in %; or loss: in nats
    tuned: Sequence[int] = (100, 101)


class Way(NamedTuple):
    """How a training is pipelined. `correction`: names joined by +; `hybrid` and `feedback` are two more."""

    schedule: str
    ranks: int
    microbatches: int
    correction: str

    def __str__(self) -> str:
        pieces = f", {self.microbatches} microbatches" * (self.microbatches > 1)
        corrected = "" if self.correction == "none" else f" + {self.correction.replace('+', ' + ')}"
        return self.schedule + pieces + corrected

    @property
    def corrections(self) -> list[str]:
        return [name for name in self.correction.split("+") if name not in (HYBRID, FEEDBACK, "none")]

    def pipeline(self, layers: int) -> Pipeline:
        """Return its pipeline; the two versions of 2BW are the same of one stage and of many."""
        if self.schedule == "synchronous":
            return FLUSH
        ranks = 1 if self.schedule == "pipedream_2bw" else self.ranks
        return Pipeline(SCHEDULES[self.schedule], ranks, self.microbatches, even_cuts(layers, ranks))


# Models of 16 layers, or of 8, that any number of stages divides


def chain(norm: Callable[[int], nn.Module], residual: bool = False) -> nn.Sequential:
    """Eight 3x3 convolutions of 16 channels on 8x8 images; norm, ReLU and what follows are layers too.

    `residual`: each is one layer, whose input is added after the first.
    """
    layers = list[nn.Module]()
    for number in range(8):
        conv = nn.Conv2d(16 if number else 3, 16, 3, padding=1, bias=False)
        rest = [norm(16), nn.ReLU(), *([nn.MaxPool2d(2)] if number in POOLS else [])]
        if number == 7:
            rest += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
        if residual:
            inner = nn.Sequential(conv, *rest[:2])
            layers.append(nn.Sequential(Added(inner) if number else inner, *rest[2:]))
        else:
            layers += [conv, nn.Sequential(*rest)]
    return nn.Sequential(*layers)


class Added(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


def groups(channels: int) -> nn.Module:
    """Return a GroupNorm of groups of four."""
    return nn.GroupNorm(channels // 4, channels)


def tiny_gpt() -> nn.Sequential:
    """Eight blocks; the embedding is with the first, the head with the last."""
    embedding, *blocks, norm, head = gpt(8, 4, 32, BLOCK, 256)
    first, *between, last = blocks
    return nn.Sequential(nn.Sequential(embedding, first), *between, nn.Sequential(last, norm, head))


@cache
def small_digits() -> tuple[Split, Split, Split]:
    """Return the digits at their own 8x8 pixels: 1,197, 240 and 360."""
    data = digits.load()
    train, test = shrunk(data.train, 4), shrunk(data.test, 4)
    return *parted(train, len(train) - 240), test


@cache
def some_cifar(n: int = 10_000) -> tuple[Split, Split, Split]:
    """Return images of CIFAR-10, from the folder `data`: n, 2,000 more, and all 10,000 to test on."""
    data = cifar10.load("data")
    assert isinstance(data.train, Images)
    return *parted(data.train.first(n + 2000), n), data.test


def shrunk(split: Split, times: int) -> Images:
    """Return images so many times smaller."""
    assert isinstance(split, Images)
    small = functional.avg_pool2d(split.images.float(), times).round().to(torch.uint8)
    return replace(split, images=small)


def parted(split: Images, n: int) -> tuple[Images, Images]:
    """Return the first n images and the rest."""
    return split.first(n), replace(split, images=split.images[n:], labels=split.labels[n:])


@cache
def shakespeare() -> tuple[Split, Split, Split]:
    """Return blocks of 32 bytes: one pass of 1,000 updates of 8, the 512 after, and 2,048 to test on."""
    data, used = text.load(block=BLOCK), 1000 * 8
    assert isinstance(data.train, text.Blocks)
    after = replace(data.train, start=used * BLOCK, tokens=512 * BLOCK + 1)
    return data.train.first(used), after, data.test.first(2048)


RATES = 0.00125, 0.0025, 0.005, 0.01, 0.02
TASKS = {
    "digits, GroupNorm": Task(lambda: chain(groups), small_digits, {"sgd": RATES, "muon": RATES}),
    "digits, BatchNorm": Task(lambda: chain(nn.BatchNorm2d), small_digits, {"sgd": RATES, "muon": RATES}),
    "digits, residual": Task(lambda: chain(groups, True), small_digits, {"sgd": RATES, "muon": RATES}),
    "CIFAR-10, GroupNorm": Task(
        lambda: chain(groups),
        some_cifar,
        {"sgd": (0.005, 0.01, 0.02, 0.05), "muon": (0.005, 0.01, 0.02, 0.04)},
        64,
        2,
        52,
        tuned=(100,),
    ),
    "CIFAR-10, 4 times as long": Task(
        lambda: chain(groups),
        lambda: some_cifar(40_000),
        {"muon": (0.01, 0.02, 0.04)},
        64,
        2,
        52,
        tuned=(100,),
    ),
    "GPT": Task(
        tiny_gpt,
        shakespeare,
        {"adamw": (0.002, 0.004, 0.008), "muon": (0.005, 0.01, 0.02)},
        8,
        1,
        50,
        "loss",
        (100,),
    ),
}


def compared(
    task: str,
    optimizer: str,
    setting: Mapping[str, Any],
    rates: Sequence[float],
    shares: Sequence[float],
    seeds: Sequence[int],
    batches: int | None = None,
) -> dict[str, Any]:
    """Choose the rate, by the first share, then the share; train the seeds with them.

    `batches`: only so many, in one epoch. Returns the `rate` and `share`, the `trials` as
    [rate, share, score], the last `scores` by seed, and `losses` of the training, by seed, as means of
    `every` updates.
    """
    of, how, trials = TASKS[task], Way(**setting), list[list[float]]()
    if batches:
        train, tuning, test = (split.first(batches * of.batch_size) for split in of.data())
        of = replace(of, data=lambda: (train, tuning, test), epochs=1, every=batches)
    sign = -1 if of.metric == "accuracy" else 1

    def best(tried: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Return the rate and share of the best, whose scores are noted."""
        for rate, share in tried if len(tried) > 1 else ():
            runs = (trained(of, optimizer, how, rate, share, seed, tunes=True)[0] for seed in of.tuned)
            trials.append([rate, share, fmean(runs)])
        noted = [(sign * score, rate, share) for rate, share, score in trials if isfinite(score)]
        return min(noted)[1:] if noted else tried[0]

    rate, share = best([(rate, shares[0]) for rate in rates])
    rate, share = best([(rate, share) for share in shares[1:]]) if len(shares) > 1 else (rate, share)
    scores, losses = zip(*(trained(of, optimizer, how, rate, share, seed) for seed in seeds), strict=True)
    return {
        "rate": rate,
        "share": share,
        "trials": trials,
        "scores": scores,
        "losses": losses,
        "every": of.every,
    }


def rounded_otherwise(
    task: str, optimizer: str, setting: Mapping[str, Any], rate: float, share: float, seeds: Sequence[int]
) -> dict[str, Any]:
    """Train the seeds with oneDNN's convolutions and with torch's own, which round otherwise.

    As another processor would. Returns the `scores` and the `others`, by seed.
    """
    scores = {}
    for name, onednn in (("scores", True), ("others", False)):
        with torch.backends.mkldnn.flags(enabled=onednn):
            scores[name] = [
                trained(TASKS[task], optimizer, Way(**setting), rate, share, seed)[0] for seed in seeds
            ]
    return scores


def trained(
    task: Task, optimizer: str, how: Way, rate: float, share: float, seed: int, tunes: bool = False
) -> tuple[float, list[float]]:
    """Train; return the last score, and the curve of the loss.

    `share`: of the updates that are synchronous, the first; `tunes`: scored on what is tuned by.
    """
    torch.manual_seed(seed)
    model, (train, tuning, test) = task.model(), task.data()
    feed = Feed(train, task.batch_size, how.microbatches, seed)
    updates = task.epochs * len(feed)
    emulation = Emulation(
        model,
        loss_of,
        optimizer_of(optimizer, model, rate, OTHERS[task.metric]),
        learning_rate("cosine", WARMUP, updates),
        make_correction("correction", how.corrections),
        FEEDBACK in how.correction,
    )
    pipeline, losses = how.pipeline(len(model)), list[float]()
    switch = round(share * updates)
    for epoch in range(task.epochs):
        batches, early = iter(feed.epoch(epoch)), min(max(switch - len(losses), 0), len(feed))
        late = len(feed) - early
        losses += emulation.train(FLUSH, islice(batches, early), early)
        losses += emulation.train(pipeline, batches, late) if late else []
    means = [fmean(losses[n : n + task.every]) for n in range(0, updates, task.every)]
    return score(emulation, tuning if tunes else test, task.metric), [round(mean, 4) for mean in means]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, of classes or of tokens."""
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def score(emulation: Emulation, test: Split, metric: str) -> float:
    """Return the accuracy in % or the mean loss."""
    total = 0.0
    for ids in torch.split(torch.arange(len(test)), 256):
        outputs, targets = emulation.outputs(test.inputs(ids, None)), test.targets(ids, None)  # type: ignore[arg-type]
        if metric == "accuracy":
            total += 100 * int(torch.eq(outputs.argmax(-1), targets).sum())  # type: ignore[arg-type]
        else:
            total += len(ids) * loss_of(outputs, targets).item()  # type: ignore[arg-type]
    return round(total / len(test), 4)


def optimizer_of(name: str, model: nn.Module, rate: float, others: float) -> Optimizer:
    """Return an optimizer with a group for each parameter; `others`: AdamW's rate, beside Muon."""
    left = KINDS["all_but_hidden"].names(model) if name == "muon" else set[str]()
    named, decay = dict(model.named_parameters()), DECAY[name]
    groups = [{"params": [p]} for n, p in named.items() if n not in left]
    if name == "sgd":
        return SGD(groups, rate, momentum=0.9, weight_decay=decay)
    if name == "adamw":
        return AdamW(groups, rate, weight_decay=decay)
    rest = [{"params": [named[n]]} for n in named if n in left]
    muon = Muon(groups, lr=rate, weight_decay=decay)
    return ChainedOptimizer([muon, AdamW(rest, others, weight_decay=decay)])


@cache
def priced(schedule: str, ranks: int, microbatches: int) -> dict[str, float]:
    """Return what a pipeline costs on paper, where all its stages cost the same.

    `time` of an update in that of one device, `versions` of the weights and `activations` of a batch that the
    fullest rank holds, both in what one rank's part of the model has.
    """
    pieces = PIECES.get(schedule, 1) if microbatches == 1 else microbatches
    window = 1 if schedule in ("synchronous", "zb_h1") else 44
    program = Pipeline(SCHEDULES[schedule], ranks, pieces).program(window)
    time = simulate(lower(program), pieces, cost=lambda a: unit_cost(a) / (3 * ranks * pieces)).makespan
    versions = max(sum(most_versions(actions).values()) for actions in program)
    fullest = max(most_open([actions]) for actions in program)
    return {"time": time / window, "versions": versions, "activations": fullest / pieces}
