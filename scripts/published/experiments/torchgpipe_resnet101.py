"""torchgpipe's speed of ResNet-101: run on 1 and 2 ranks, and planned for 1 to 8 from a measured profile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

from torch import Tensor, nn

from pipetrain.model.chain import Pop, Stash
from pipetrain.models import resnet101
from pipetrain.models.layers import stack
from pipetrain.models.vision import Residual
from published.measures import Race, estimate, predicted, profiled
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Series, Step
from published.torchgpipe_race import (
    AGAIN,
    PLAIN,
    Row,
    as_published,
    bound,
    bound_line,
    forwards_chart,
    held_against,
    pairs,
    race_torchgpipe,
    samples_per_s,
    scaled,
    sized,
    speedup,
    under,
)

WORDS = [f"model._target_={__name__}.flat_resnet101", "model.num_classes=1000"]
FULL = {"overrides": WORDS, "side": 224, "layers": 370}
TINY = {"overrides": ["model=mlp", "model.width=4"], "side": 32, "layers": 6}
SAMPLES, M, BASE = 2, 4, 59  # of a microbatch; microbatches that are run; those of the record's one process
LAYERS, PARAMETERS = 370, 44_549_160
RECORD_OF = {  # by partitions: microbatches, layers of each, and samples/s
    "0.0.7": {
        1: Row(2, [370], 81.796),
        2: Row(1667, [135, 235], 135.539),
        4: Row(256, [44, 92, 124, 110], 265.958),
        8: Row(150, [26, 22, 33, 44, 44, 66, 66, 69], 411.662),
    },
    "0.0.3": {
        1: Row(BASE, [370], 69.960, spared=False),
        2: Row(256, [140, 230], 137.788),
        4: Row(256, [47, 96, 118, 109], 243.322),
        8: Row(64, [26, 22, 33, 44, 44, 66, 66, 69], 404.084),
    },
}
NAIVES = {"0.0.7": 95.862, "0.0.3": 92.539}  # samples/s of one process, without recomputation
NEW, *_ = RECORD_OF
RANKS = 1, 2  # that are run
NEAR, LEAST, MOST = 0.05, 0.70, 0.80
NAIVE, WHOLE = "naive-1", "naive-1, one batch"


def flat_resnet101(num_classes: int = 10) -> nn.Sequential:
    """ResNet101 for 224x224, in the 370 layers of torchgpipe's benchmark."""
    return flattened(resnet101(num_classes, imagenet=True))


def flattened(resnet: nn.Sequential) -> nn.Sequential:
    """Return a ResNet in whose layers each operation is one, and not each block."""
    return stack(**dict(single(resnet)))


def single(layer: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a layer's modules one by one; the input of a residual block waits in a Stash for its sum."""
    if isinstance(layer, Residual):
        stash = Stash()
        yield f"{name}_stash", stash
        yield from single(layer.body, name)
        yield f"{name}_sum", Pop(stash, Sum(layer.shortcut))
        yield f"{name}_relu", layer.relu
    elif isinstance(layer, nn.Sequential):
        for inner, module in layer.named_children():
            yield from single(module, f"{name}_{inner}" if name else inner)
    else:
        yield name, layer


class Sum(nn.Module):
    """The end of a residual block: (body, input) to `body + shortcut(input)`."""

    def __init__(self, shortcut: nn.Module) -> None:
        super().__init__()
        self.shortcut = shortcut

    def forward(self, tensors: tuple[Tensor, Tensor]) -> Tensor:
        body, x = tensors
        out: Tensor = body + self.shortcut(x)
        return out


def steps(quick: bool) -> dict[str, Step]:
    """Plan by a profile, and race."""
    size = TINY if quick else FULL
    most = 2 if quick else 8  # partitions
    return {
        "plans": Step(planned, {**size, "most": most}),
        "race": Step(run, {**size, "rounds": 1 if quick else 3}),
    }


def planned(overrides: list[str], side: int, layers: int, most: int) -> dict[str, Any]:
    """Measure the layers on two ranks at a time, and plan by that; return the seconds of a batch.

    By version, and as it is `run`: for `naive-1`, which recomputes nothing, and by partitions.
    """
    example = [3, side, side]
    profile, estimated = profiled(overrides, SAMPLES, example), estimate(overrides, SAMPLES, example)
    plan = partial(predicted, microbatch=SAMPLES, example=example, profile=profile, layers=estimated)

    def seconds(row: Row) -> float:
        balance = scaled(row.balance, layers)
        return float(plan([*overrides, row.recompute], balance, row.microbatches)["seconds"])

    base = plan(overrides, [layers], BASE)
    here = {n: seconds(RECORD_OF[NEW][n]._replace(microbatches=M, spared=False)) for n in RANKS}
    return {
        "layers": base["layers"],
        "parameters": base["parameters"],
        "run": {NAIVE: plan(overrides, [layers], M)["seconds"], **{str(n): of for n, of in here.items()}},
        **{
            version: {
                NAIVE: base["seconds"],
                **{str(n): seconds(row) for n, row in rows.items() if n <= most},
            }
            for version, rows in RECORD_OF.items()
        },
    }


def run(rounds: int, overrides: list[str], side: int, layers: int, **_: Any) -> dict[str, Any]:
    """Race a plain loop, and pipelines of 1 and 2 partitions, ours and torchgpipe's."""
    entrants = {
        WHOLE: (PLAIN, [layers], "microbatches=1"),
        NAIVE: (PLAIN, [layers]),
        **pairs(RECORD_OF[NEW], RANKS, layers, AGAIN),
    }
    words = [*overrides, f"batch_size={M * SAMPLES}", f"microbatches={M}"]
    return race_torchgpipe(words, entrants, rounds, [3, side, side])


def show(results: Results) -> Iterator[Finding]:
    """Hold speed-ups against the record, its bound, the plan and torchgpipe."""
    plans, race = results["plans"], Race(results["race"])
    yield sized(plans, LAYERS, PARAMETERS)
    lines = list[Line]()
    for version, rows in RECORD_OF.items():
        of, naive = plans[version], NAIVES[version]
        naive_s = of[NAIVE] / BASE
        gains = {n: row.microbatches * naive_s / of[str(n)] for n, row in rows.items() if str(n) in of}
        series = speedup(f"at {version}'s cuts", "speed-up", rows, naive, gains)
        yield series
        rates = {
            NAIVE: SAMPLES / naive_s,
            **{f"pipeline-{n}": gain * SAMPLES / naive_s for n, gain in gains.items()},
        }
        yield samples_per_s(f"at {version}'s cuts", rows, naive, rates, How.PLANNED)
        yield from as_published(version, series)
        lines += [series.theirs(f"torchgpipe {version}"), *[series.line()] * (version == NEW)]
    ratios = {n: race.ratios(f"pipeline-{n}", NAIVE) for n in RANKS}
    unit, bounds = "x naive-1", {n: bound(n, M) for n in RANKS}
    measured = Series.measured(f"m = {M}", "speed-up", "K", ratios, unit=unit, bound=bounds)
    foreseen = {n: plans["run"][NAIVE] / plans["run"][str(n)] for n in RANKS}
    yield measured
    rates = {
        name: M * SAMPLES / median(race.seconds(name)) for name in (NAIVE, *(f"pipeline-{n}" for n in RANKS))
    }
    yield samples_per_s(f"m = {M}, here on CPUs", RECORD_OF[NEW], NAIVES[NEW], rates, How.RUN)
    yield Series(f"m = {M}", "speed-up", "K", foreseen, How.PLANNED, unit, bound=bounds)
    for n, gain in measured.here.items():
        what, limits = f"pipeline-{n}, m = {M}", (foreseen[n] * (1 - NEAR), foreseen[n] * (1 + NEAR))
        yield Check.of(f"{what}: run as planned", NOT, limits, gain, How.RUN)
        yield under(what, gain, bounds[n], How.RUN)
    one, (least, most) = measured.here[1], measured.spread[1]
    here, good = f"{one:.3f}, {least:.3f} to {most:.3f}", LEAST <= one <= MOST and most < 1
    yield Check(
        "pipeline-1, of naive-1", "0.756 (0.0.3)", f"{LEAST} to {MOST}, never above 1", here, good, How.RUN
    )
    yield Series.measured("", WHOLE, "", {"speed": race.ratios(WHOLE, NAIVE)}, unit=unit)
    yield from held_against(race, {f"pipeline-{n}": f"torchgpipe-{n}" for n in RANKS})
    lines += [measured.line(f"run, m = {M}"), bound_line(RECORD_OF[NEW])]
    yield Chart("Speed-up of ResNet-101", "partitions K", unit, lines, "x")
    yield forwards_chart(race, RANKS)
