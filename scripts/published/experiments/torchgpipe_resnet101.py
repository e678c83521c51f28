"""torchgpipe's speed of ResNet-101: run on 1 and 2 ranks, and planned for 1 to 8 from a measured profile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from pipetrain.model.chain import Pop, Stash
from pipetrain.models import resnet101
from pipetrain.models.layers import stack
from pipetrain.models.vision import Residual
from published.measures import Race, estimate, predicted, profiled
from published.record import Chart, Check, Finding, How, Line, Results, Series, Step
from published.torchgpipe_race import (
    PLAIN,
    THEIRS,
    bound,
    forwards_chart,
    held_against,
    race_torchgpipe,
    scaled,
    sized,
    under,
)

WORDS = [f"model._target_={__name__}.flat_resnet101", "model.num_classes=1000"]
FULL = {"overrides": WORDS, "side": 224, "layers": 370, "most": 8}  # partitions that are planned, at most
TINY = {"overrides": ["model=mlp", "model.width=4"], "side": 32, "layers": 6, "most": 2}
AGAIN = "recompute=always"
SAMPLES, M, BASE = 2, 4, 59  # of a microbatch; microbatches that are run; those of the record's one process
LAYERS, PARAMETERS = 370, 44_549_160
RECORD_OF = {  # by partitions: microbatches, layers of each, and the speed-up
    "0.0.7": {
        1: (BASE, [370], 0.853),
        2: (1667, [135, 235], 1.414),
        4: (256, [44, 92, 124, 110], 2.774),
        8: (150, [26, 22, 33, 44, 44, 66, 66, 69], 4.294),
    },
    "0.0.3": {
        1: (BASE, [370], 0.756),
        2: (256, [140, 230], 1.489),
        4: (256, [47, 96, 118, 109], 2.629),
        8: (64, [26, 22, 33, 44, 44, 66, 66, 69], 4.367),
    },
}
NEW, *_ = RECORD_OF
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
    entrants: dict[str, tuple[Any, ...]] = {
        WHOLE: (PLAIN, [layers], "microbatches=1"),
        NAIVE: (PLAIN, [layers]),
    }
    for ranks in (1, 2):
        balance = scaled(RECORD_OF[NEW][ranks][1], layers)
        entrants |= {
            f"pipeline-{ranks}": ("gpipe", balance, AGAIN),
            f"torchgpipe-{ranks}": (THEIRS, balance, AGAIN),
        }
    words = [*overrides, f"batch_size={M * SAMPLES}", f"microbatches={M}"]
    return race_torchgpipe(words, entrants, rounds, [3, side, side])


def show(results: Results) -> Iterator[Finding]:
    """Hold speed-ups against the record, its bound, the plan and torchgpipe."""
    of, race = results["profile"], Race(results["race"])
    example, words, layers = [3, of["side"], of["side"]], of["overrides"], of["layers"]
    estimated = estimate(words, SAMPLES, example)

    def plan(balance: list[int], m: int, *more: str) -> dict[str, Any]:
        known = SAMPLES, example, of["profile"]
        return predicted([*words, *more], scaled(balance, layers), m, *known, layers=estimated)

    base = plan([layers], BASE)
    yield sized(base, LAYERS, PARAMETERS)
    naive_s, lines = base["seconds"] / BASE, list[Line]()
    for version, rows in RECORD_OF.items():
        taken = {n: (m, balance) for n, (m, balance, _) in rows.items() if n <= of["most"]}
        gains = {n: m * naive_s / plan(balance, m, AGAIN)["seconds"] for n, (m, balance) in taken.items()}
        bounds = {n: bound(n, m) for n, (m, _) in taken.items()}
        theirs = {n: row[2] for n, row in rows.items()}
        series = Series(
            f"at {version}'s cuts", "speed-up", "K", gains, How.PLANNED, "x naive-1", theirs, bounds
        )
        yield series
        yield from (
            under(f"{version}, pipeline-{n}, m = {taken[n][0]}", gain, bounds[n])
            for n, gain in gains.items()
            if n > 1
        )
        lines += [series.theirs(f"torchgpipe {version}"), *[series.line()] * (version == NEW)]
    one_s, ranks = plan([layers], M)["seconds"], (1, 2)
    names = {n: f"pipeline-{n}" for n in ranks}
    gains_of = {n: race.ratios(name, NAIVE) for n, name in names.items()}
    bounds = {n: bound(n, M) for n in ranks}
    measured = Series.measured(f"m = {M}", "speed-up", "K", gains_of, unit="x naive-1", bound=bounds)
    foreseen = {n: one_s / plan(RECORD_OF[NEW][n][1], M, AGAIN)["seconds"] for n in ranks}
    yield measured
    yield Series(f"m = {M}", "speed-up", "K", foreseen, How.PLANNED, "x naive-1", bound=bounds)
    for n, gain in measured.here.items():
        what, close = f"pipeline-{n}, m = {M}", abs(gain / foreseen[n] - 1) <= NEAR
        yield Check(f"{what}: run as planned", f"{foreseen[n]:.3f} planned", f"{gain:.3f}", close)
        yield from [under(what, gain, bounds[n])] if n > 1 else []
    one, (least, most) = measured.here[1], measured.spread[1]
    here, good = f"{one:.3f}, {least:.3f} to {most:.3f}", LEAST <= one <= MOST and most < 1
    yield Check("pipeline-1, of naive-1", ".75: .70 to .80, never above 1", here, good)
    yield Series.measured("", WHOLE, "", {"speed": race.ratios(WHOLE, NAIVE)}, unit="x naive-1")
    yield from held_against(race, {name: f"torchgpipe-{n}" for n, name in names.items()})
    lines.append(measured.line(f"run, m = {M}"))
    bounds = {n: bound(n, m) for n, (m, *_) in RECORD_OF[NEW].items()}
    lines.append(Line("c K m / (m + K - 1)", How.BOUND, bounds))
    yield Chart("Speed-up of ResNet-101", "partitions K", "x naive-1", lines, "x")
    yield forwards_chart(race)
