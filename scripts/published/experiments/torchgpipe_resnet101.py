"""torchgpipe's speed of ResNet-101: run on 1 and 2 ranks, and planned for 1 to 8 from a measured profile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from pipetrain.model.chain import Pop, Stash
from pipetrain.models import resnet101
from pipetrain.models.layers import stack
from pipetrain.models.vision import Residual
from published.beside import (
    BESIDE,
    PLAIN,
    THEIRS,
    bound,
    forwards_chart,
    held_against,
    raced_beside,
    scaled,
    sized,
    under,
)
from published.measures import Race, predicted, profiled
from published.record import Chart, Check, Figure, Findings, How, Line, Record, Results, Step

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
    return raced_beside(words, entrants, rounds, [3, side, side])


def show(results: Results) -> Findings:
    """Hold speed-ups against the record, its bound, the plan and torchgpipe."""
    of, race = results["profile"], Race(results["race"])
    example, words, layers = [3, of["side"], of["side"]], of["overrides"], of["layers"]
    plan = partial(predicted, microbatch=SAMPLES, example=example, profile=of["profile"])
    base = plan(words, [layers], BASE)
    naive_s = base["seconds"] / BASE
    figures, lines, ran, checks = [], [], [], [sized(base, LAYERS, PARAMETERS)]
    for version, rows in RECORD_OF.items():
        points = []
        for ranks, (m, balance, published) in rows.items():
            if ranks > of["most"]:
                continue
            planned = plan([*words, AGAIN], scaled(balance, layers), m)
            gain, most = m * naive_s / planned["seconds"], bound(ranks, m)
            what = f"{version}, pipeline-{ranks}, m = {m}"
            figures.append(Figure(what, published, gain, How.PLANNED, bound=most, unit="x naive-1"))
            points.append((ranks, gain))
            checks += [under(what, gain, most)] if ranks > 1 else []
        lines.append(Line(f"torchgpipe {version}", How.PUBLISHED, [(n, row[2]) for n, row in rows.items()]))
        lines += [Line(f"at {NEW}'s cuts", How.PLANNED, points)] if version == NEW else []
    one_s = plan(words, [layers], M)["seconds"]
    for ranks in (1, 2):
        name, most = f"pipeline-{ranks}", bound(ranks, M)
        what, balance = f"{name}, m = {M}", scaled(RECORD_OF[NEW][ranks][1], layers)
        gain, spread = race.ratio(name, NAIVE), race.spread(name, NAIVE)
        foreseen = one_s / plan([*words, AGAIN], balance, M)["seconds"]
        figures += [
            Figure(what, None, gain, How.RUN, spread, most, "x naive-1"),
            Figure(what, None, foreseen, How.PLANNED, bound=most, unit="x naive-1"),
        ]
        close = abs(gain / foreseen - 1) <= NEAR
        checks.append(Check(f"{what}: run as planned", f"{foreseen:.3f} planned", f"{gain:.3f}", close))
        ran.append((ranks, gain))
        checks += [under(what, gain, most)] if ranks > 1 else []
    least, most = race.spread("pipeline-1", NAIVE)
    here, good = f"{ran[0][1]:.3f}, {least:.3f} to {most:.3f}", LEAST <= ran[0][1] <= MOST and most < 1
    checks.append(Check("pipeline-1, of naive-1", ".75: .70 to .80, never above 1", here, good))
    whole = race.ratio(WHOLE, NAIVE), race.spread(WHOLE, NAIVE)
    figures.append(Figure(WHOLE, None, whole[0], How.RUN, whole[1], unit="x naive-1"))
    beside, verdict = held_against(race, {f"pipeline-{n}": f"torchgpipe-{n}" for n in (1, 2)})
    lines += [
        Line(f"run, m = {M}", How.RUN, ran),
        Line("c K m / (m + K - 1)", How.BOUND, [(n, bound(n, m)) for n, (m, *_) in RECORD_OF[NEW].items()]),
    ]
    charts = [Chart("Speed-up of ResNet-101", "partitions K", "x naive-1", lines, "x"), forwards_chart(race)]
    return Findings([*figures, *beside], [*checks, *verdict], charts, NOTES)


NOTES = [
    f"Images of 224x224 are made up and seeded. Run here: a batch of {M * SAMPLES} in {M} microbatches. "
    "naive-1 is a plain loop over the same microbatches, and beside it over the whole batch at once.",
    f"Planned: from a profile of {SAMPLES} images on two ranks at a time, at the record's cuts and numbers "
    f"of microbatches; naive-1 and pipeline-1 with {BASE * SAMPLES} images, as many as the record has.",
    BESIDE,
]
RECORD = Record(
    "Speed of ResNet-101 in 1, 2, 4 and 8 partitions, every forward run again",
    "torchgpipe (Kim et al., arXiv 2004.09910), benchmarks/resnet101-speed of 0.0.3 and 0.0.7.",
    steps,
    show,
    "0.0.7's pipeline-1 runs one of its two microbatches again, whose bound is 6/7; ours runs all. The bound "
    "counts that in the drain too, where it is run while the gradient is awaited: with few microbatches more "
    "can be gained.",
)
