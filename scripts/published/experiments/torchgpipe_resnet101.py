"""torchgpipe's speed of ResNet-101: run on 1 and 2 ranks, and planned for 1 to 8 from a measured profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
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
    bound,
    bound_line,
    forwards_chart,
    held_against,
    pairs,
    race_torchgpipe,
    scaled,
    sized,
    speedup,
    under,
)

WORDS = [f"model._target_={__name__}.flat_resnet101", "model.num_classes=1000"]
FULL = {"overrides": WORDS, "side": 224, "layers": 370, "most": 8}  # partitions that are planned, at most
TINY = {"overrides": ["model=mlp", "model.width=4"], "side": 32, "layers": 6, "most": 2}
SAMPLES, M, BASE = 2, 4, 59  # of a microbatch; microbatches that are run; those of the record's one process
LAYERS, PARAMETERS = 370, 44_549_160
RECORD_OF = {  # by partitions: microbatches, layers of each, and the speed-up
    "0.0.7": {
        1: Row(BASE, [370], 0.853),
        2: Row(1667, [135, 235], 1.414),
        4: Row(256, [44, 92, 124, 110], 2.774),
        8: Row(150, [26, 22, 33, 44, 44, 66, 66, 69], 4.294),
    },
    "0.0.3": {
        1: Row(BASE, [370], 0.756),
        2: Row(256, [140, 230], 1.489),
        4: Row(256, [47, 96, 118, 109], 2.629),
        8: Row(64, [26, 22, 33, 44, 44, 66, 66, 69], 4.367),
    },
}
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
    """Measure a profile, and race."""
    size = TINY if quick else FULL
    return {"profile": Step(profile, size), "race": Step(run, {**size, "rounds": 1 if quick else 3})}


def profile(**size: Any) -> dict[str, Any]:
    """Measure the layers, on two ranks at a time; return the profile, and what it is of."""
    return {**size, "profile": profiled(size["overrides"], SAMPLES, [3, size["side"], size["side"]])}


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
    of, race = results["profile"], Race(results["race"])
    example, words, layers = [3, of["side"], of["side"]], of["overrides"], of["layers"]
    estimated = estimate(words, SAMPLES, example)
    plan = partial(predicted, microbatch=SAMPLES, example=example, profile=of["profile"], layers=estimated)

    def seconds(balance: Sequence[int], m: int) -> float:
        return float(plan([*words, AGAIN], scaled(balance, layers), m)["seconds"])

    base = plan(words, [layers], BASE)
    yield sized(base, LAYERS, PARAMETERS)
    naive_s, lines = base["seconds"] / BASE, list[Line]()
    for version, rows in RECORD_OF.items():
        planned = {n: row for n, row in rows.items() if n <= of["most"]}
        gains = {n: m * naive_s / seconds(balance, m) for n, (m, balance, _) in planned.items()}
        series = speedup(f"at {version}'s cuts", "speed-up", rows, gains)
        yield series
        for n, gain in gains.items():
            what = f"{version}, pipeline-{n}, m = {rows[n].microbatches}"
            yield under(what, gain, series.bound[n], How.PLANNED)
        lines += [series.theirs(f"torchgpipe {version}"), *[series.line()] * (version == NEW)]
    one_s = plan(words, [layers], M)["seconds"]
    ratios = {n: race.ratios(f"pipeline-{n}", NAIVE) for n in RANKS}
    unit, bounds = "x naive-1", {n: bound(n, M) for n in RANKS}
    measured = Series.measured(f"m = {M}", "speed-up", "K", ratios, unit=unit, bound=bounds)
    foreseen = {n: one_s / seconds(RECORD_OF[NEW][n].balance, M) for n in RANKS}
    yield measured
    yield Series(f"m = {M}", "speed-up", "K", foreseen, How.PLANNED, unit, bound=bounds)
    for n, gain in measured.here.items():
        what, limits = f"pipeline-{n}, m = {M}", (foreseen[n] * (1 - NEAR), foreseen[n] * (1 + NEAR))
        yield Check.of(f"{what}: run as planned", NOT, limits, gain, How.RUN)
        yield under(what, gain, bounds[n], How.RUN)
    one, (least, most) = measured.here[1], measured.spread[1]
    here, good = f"{one:.3f}, {least:.3f} to {most:.3f}", LEAST <= one <= MOST and most < 1
    yield Check("pipeline-1, of naive-1", ".75", f"{LEAST} to {MOST}, never above 1", here, good, How.RUN)
    yield Series.measured("", WHOLE, "", {"speed": race.ratios(WHOLE, NAIVE)}, unit=unit)
    yield from held_against(race, {f"pipeline-{n}": f"torchgpipe-{n}" for n in RANKS})
    lines += [measured.line(f"run, m = {M}"), bound_line(RECORD_OF[NEW])]
    yield Chart("Speed-up of ResNet-101", "partitions K", unit, lines, "x")
    yield forwards_chart(race, RANKS)
