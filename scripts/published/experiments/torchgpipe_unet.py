"""torchgpipe's U-Net: planned in full size, and a narrow one trained on 1, 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from pipetrain.model.chain import Pop, Stash
from pipetrain.models.layers import NormalConvolution, before_relu
from pipetrain.models.unet import Concatenate
from published.measures import Race, estimate, predicted, profiled
from published.record import NOT, Chart, Check, Finding, How, Results, Series, Step
from published.torchgpipe_race import (
    AGAIN,
    SPARED,
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
)

MASKS = [
    f"model._target_={__name__}.unet_instancenorm",
    "model.num_classes=1",
    f"loss._target_={__name__}.loss",
]
SHAPES = ["data=shapes", "+data.source.train=8", "+data.source.test=8"]
FULL = {"narrow": ["model.width=16"], "side": 192, "trained": 96, "layers": 241, "partitions": [1, 2, 4]}
SMALL = ["model.depth=1", "model.convolutions=1", "model.width=4"]
TINY = {"narrow": SMALL, "side": 16, "trained": 16, "layers": 17, "partitions": [1, 2]}
M, BATCH, BASE, IMAGES = 4, 8, 40, 16  # BASE: microbatches of one process; IMAGES: of one, where planned
LAYERS, PARAMETERS = 241, 232_687_328
NAIVE_S = 28.500  # samples/s of one process, without recomputation
RECORD_OF = {  # by partitions: microbatches, layers of each, and samples/s
    1: Row(2, [241], 24.456),
    2: Row(32, [104, 137], 35.502),
    4: Row(16, [30, 66, 84, 61], 67.042),
    8: Row(40, [16, 27, 31, 44, 22, 57, 27, 17], 88.497),
}
LOGGED = 8  # microbatches of pipeline-8 by its log, of one sample each
SAME, ALL = 1e-5, ", all again"  # SAME: of a loss


def unet_instancenorm(
    num_classes: int = 1, depth: int = 5, convolutions: int = 5, width: int = 64, channels: int = 3
) -> nn.Sequential:
    """Torchgpipe's U-Net: images (n, channels, h, w) to the scores of each pixel (n, num_classes, h, w).

    Its InstanceNorm and dropout mix no samples, and each operation is a layer. `depth`: how often the size is
    halved, so h and w are multiples of 2^depth, and more than that. Pixels are repeated on the way up, which
    narrows the channels to half of `width`, an even number.
    """
    model, stashes = nn.Sequential(), [Stash() for _ in range(depth)]
    for level, stash in enumerate(stashes, start=1):
        _add_convolutions(model, f"down{level}", channels, [width] * convolutions)
        model.add_module(f"down{level}_skip", stash)
        model.add_module(f"down{level}_pool", nn.MaxPool2d(2))
        channels, width = width, 2 * width
    _add_convolutions(model, "bottom", channels, [width] * (convolutions - 1) + [channels])
    for level in range(depth, 0, -1):
        width //= 2
        model.add_module(f"up{level}_grow", nn.Upsample(scale_factor=2))
        model.add_module(f"up{level}_skip", Pop(stashes[level - 1], Concatenate()))
        _add_convolutions(model, f"up{level}", 2 * width, [width // 2] * convolutions)
    width //= 2
    head = NormalConvolution(width, num_classes, std=width**-0.5, kernel_size=1, bias=False)
    model.add_module("head", head)
    return model


def _add_convolutions(model: nn.Sequential, name: str, channels: int, widths: Sequence[int]) -> None:
    """Add, for each width, a 3x3 convolution, dropout of channels, InstanceNorm and LeakyReLU."""
    for index, width in enumerate(widths, start=1):
        std = before_relu(9 * channels)
        conv = NormalConvolution(channels, width, std=std, kernel_size=3, padding=1, bias=False)
        drop, norm = nn.Dropout2d(0.1), nn.InstanceNorm2d(width)
        parts = {"conv": conv, "dropout": drop, "norm": norm, "relu": nn.LeakyReLU()}
        for kind, part in parts.items():
            model.add_module(f"{name}_{kind}{index}", part)
        channels = width


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy of scores [n, 1, h, w], where a pixel belongs to any shape."""
    return binary_cross_entropy_with_logits(scores[:, 0], (labels > 0).to(scores))


def steps(quick: bool) -> dict[str, Step]:
    """Plan by work, measure a profile of a narrow one, and race."""
    size: Any = TINY if quick else FULL
    layers = {"layers": size["layers"], "side": size["side"]}
    return {
        "paper": Step(planned, {"words": [*MASKS, *(SMALL if quick else [])], **layers}, timed=False),
        "narrow": Step(planned_by_profile, {"words": [*MASKS, *size["narrow"]], **layers}),
        "race": Step(run, {**size, "rounds": 1 if quick else 3}),
    }


def planned(
    words: list[str], layers: int, side: int, profile: Any = None, images: int = IMAGES
) -> dict[str, Any]:
    """Plan one process without recomputation, and the record's partitions with it; `logged`: see LOGGED."""
    example = [3, side, side]
    estimated = estimate(words, images, example) if profile else None
    plan = partial(predicted, microbatch=images, example=example, profile=profile, layers=estimated)
    again = [*words, SPARED]
    return {
        "naive": plan(words, [layers], BASE),
        "logged": plan(again, scaled(RECORD_OF[8].balance, layers), LOGGED),
        **{
            str(n): plan(again, scaled(row.balance, layers), row.microbatches) for n, row in RECORD_OF.items()
        },
    }


def planned_by_profile(words: list[str], layers: int, side: int) -> dict[str, Any]:
    """Measure the layers, on two ranks at a time, and plan by that, an image a microbatch."""
    return planned(words, layers, side, profiled(words, 1, [3, side, side]), images=1)


def run(rounds: int, narrow: list[str], trained: int, layers: int, partitions: list[int], **_: Any) -> Any:
    """Race pipelines, ours and torchgpipe's, as theirs recompute, and where all is run again."""
    words = [*MASKS, *narrow, *SHAPES, f"data.size={trained}", f"batch_size={BATCH}"]
    entrants = pairs(RECORD_OF, partitions, layers, SPARED) | {
        f"{name}{ALL}": way for name, way in pairs(RECORD_OF, partitions, layers, AGAIN).items()
    }
    return race_torchgpipe([*words, f"microbatches={M}"], entrants, rounds)


def gains_of(by: str, plans: Any) -> Series:
    """Return how many times as fast as one process each number of partitions is."""
    naive_s = plans["naive"]["seconds"] / BASE
    gains = {n: row.microbatches * naive_s / plans[str(n)]["seconds"] for n, row in RECORD_OF.items()}
    return speedup("", f"speed-up {by}", RECORD_OF, NAIVE_S, gains)


def logged(plans: Mapping[str, Any]) -> Iterator[Finding]:
    """Plan pipeline-8 by its command, and by the microbatches that its log counted."""
    m, speed = RECORD_OF[8].microbatches, round(RECORD_OF[8].samples_s / NAIVE_S, 3)
    ways = {f"its command, m = {m}": ("8", m), f"its log, m = {LOGGED}": ("logged", LOGGED)}
    bounds, theirs = {name: bound(8, m, True) for name, (_, m) in ways.items()}, dict.fromkeys(ways, speed)
    for by, of in plans.items():
        naive_s = of["naive"]["seconds"] / BASE
        gains = {name: m * naive_s / of[key]["seconds"] for name, (key, m) in ways.items()}
        yield Series("pipeline-8", f"speed-up {by}", "", gains, How.PLANNED, "x naive-1", theirs, bounds)


def show(results: Results) -> Iterator[Finding]:
    """Hold speed-ups, losses and bytes of skips against what must come back."""
    paper, narrow, race = results["paper"], results["narrow"], Race(results["race"])
    yield sized(paper["naive"], LAYERS, PARAMETERS)
    plans = {"by work": paper, "by times of a narrow one": narrow}
    gains = {by: gains_of(by, of) for by, of in plans.items()}
    yield from gains.values()
    yield from logged(plans)
    rates = {"naive-1": BASE / narrow["naive"]["seconds"]}
    rates |= {f"pipeline-{n}": row.microbatches / narrow[str(n)]["seconds"] for n, row in RECORD_OF.items()}
    yield samples_per_s("width 16, 192x192", RECORD_OF, NAIVE_S, rates, How.PLANNED)
    for by, series in gains.items():
        yield from as_published(by, series)
    ranks = [n for n in RECORD_OF if f"pipeline-{n}" in race.of]
    ran = {f"pipeline-{n}": BATCH / median(race.seconds(f"pipeline-{n}")) for n in ranks}
    yield samples_per_s("width 16, 96x96", RECORD_OF, NAIVE_S, ran, How.RUN)
    losses = [race.of[f"pipeline-{n}"]["losses"][0] for n in ranks]
    stages, says = f"on {', '.join(map(str, ranks))} stages", f"{min(losses):.7f} to {max(losses):.7f}"
    same = max(losses) - min(losses) <= SAME * max(losses)
    yield Check(f"equal losses {stages}", NOT, f"within {SAME} of it", says, same, How.RUN)
    routes = [(target - source, nbytes / 2**20) for source, target, nbytes in paper["8"]["routes"]]
    straight = sum(mib for crossed, mib in routes if crossed > 1)
    through, unit = sum(crossed * mib for crossed, mib in routes if crossed > 1), f"MiB, {IMAGES} images"
    skips = {"by routes": straight, "through every stage": through}
    yield Series("", "skips, 8 stages", "", skips, How.PLANNED, unit)
    beside = [(f"pipeline-{n}{more}", f"torchgpipe-{n}{more}") for n in ranks for more in ("", ALL)]
    yield from held_against(race, {ours: theirs for ours, theirs in beside if ours in race.of})
    lines = [gains["by work"].theirs("torchgpipe 0.0.7"), *(of.line(by) for by, of in gains.items())]
    lines.append(bound_line(RECORD_OF))
    yield Chart("Speed-up of the U-Net, at the record's cuts", "partitions K", "x naive-1", lines, "x")
    yield forwards_chart(race, ranks)
