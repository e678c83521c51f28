"""The largest AmoebaNet-D that fits on 1, 2, 4 and 8 devices, by the plan, and bytes of small ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import inf, sqrt
from typing import Any

from benchmark.held import NEAR, stage_peaks
from benchmark.report import progress
from benchmark.tasks import Task, prepare
from benchmark.worlds import Say, run_world
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.memory import GIB
from published.measures import partition, predicted
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Series, Step, those

LIMIT, P40 = 8e9 / GIB, 22.4  # GiB of a TPUv2's core, and of the GPU that torchgpipe had
PUBLISHED: dict[
    int, tuple[int, int, list[int], float, float, float]
] = {  # devices: cells, filters, cut, million parameters; GiB of model and activations
    1: (18, 416, [24], 319.0, 3.57, 0.91),
    2: (18, 544, [16, 8], 542.7, 6.07, 3.39),
    4: (36, 544, [16, 12, 7, 7], 1060, 11.80, 6.91),
    8: (72, 512, [23, 16, 11, 6, 6, 5, 5, 6], 1840, 20.62, 10.83),
}
ALONE = 81_505_540  # parameters of (18, 208)
BATCH, IMAGE, STEP = 128, 224, 8  # filters are a multiple of STEP
MODEL = (
    "model._target_=published.amoebanet.amoebanet",
    "model.num_classes=1000",
    "optim._target_=torch.optim.RMSprop",
    "~optim.momentum",
)
SMALL = {  # cells, filters, cut
    "1 device (3, 64)": (3, 64, [9]),
    "1 device (6, 128)": (6, 128, [12]),
    "2 devices (3, 64)": (3, 64, [6, 3]),
    "2 devices (6, 128)": (6, 128, [8, 4]),
}


def sized(cells: int, filters: int, recompute: str = "always") -> list[str]:
    """Return the overrides of a model of this size."""
    return [*MODEL, f"model.cells={cells}", f"model.filters={filters}", f"recompute={recompute}"]


def steps(quick: bool) -> dict[str, Step]:
    """Plan the published sizes and the largest ones that fit; measure small ones."""
    names = ("cells", "filters", "balance")
    if quick:
        tiny = {"batch": 2, "image": 64}
        known = dict(zip(names, (3, 8, [9]), strict=True))
        return {
            "fits 1": Step(fits, known | tiny | {"limit": 0.003}),
            "held 1 device (3, 8)": Step(held, known | tiny),
        }
    return {
        "alone": Step(alone),
        **{f"fits {k}": Step(fits, dict(zip(names, of, strict=False))) for k, of in PUBLISHED.items()},
        **{f"held {name}": Step(held, dict(zip(names, of, strict=True))) for name, of in SMALL.items()},
    }


def alone() -> dict[str, Any]:
    """Plan (18, 208) on a device for the whole batch at once."""
    return predicted(sized(18, 208, "never"), [24], 1, BATCH, (3, IMAGE, IMAGE))


def fits(
    cells: int,
    filters: int,
    balance: Sequence[int],
    limit: float = LIMIT,
    batch: int = BATCH,
    image: int = IMAGE,
) -> list[dict[str, Any]]:
    """Plan a size, and with more filters until the fullest device is near the limit in GiB.

    Bytes grow at most with the square of the filters, so that what comes next fits.
    """
    plans: list[dict[str, Any]] = []
    while len(plans) < 3:
        plan = predicted(sized(cells, filters), balance, batch, 1, (3, image, image))
        plans.append({"size": (cells, filters), **{key: plan[key] for key in ("parameters", "peaks")}})
        more = int(filters * sqrt(limit * GIB / max(plan["peaks"])) / STEP) * STEP
        if more == filters:
            break
        filters = more
    return plans


def held(
    cells: int, filters: int, balance: Sequence[int], batch: int = 16, image: int = 64
) -> list[tuple[int, int]]:
    """Train a size with samples as microbatches; return the peaks of its stages, measured and planned."""
    words = [f"batch_size={batch}", f"microbatches={batch}", partition(balance)]
    task = Task((*sized(cells, filters), *words), (3, image, image), 1000)
    of_ranks = run_world(_held, len(balance), progress, task)
    return [(measured, planned) for stages in of_ranks for _, measured, planned in stages]


def _held(groups: ProcessGroups, say: Say, task: Task) -> list[tuple[int, int, int]]:
    return stage_peaks(groups, prepare(task, "gpipe", groups.world.size))


def show(results: Results) -> Iterator[Finding]:
    """Hold sizes and bytes against what was published, and plans against what was measured."""
    plans = {int(k): of for k, of in those(results, "fits ").items()}
    millions, model_gib, rest_gib = (
        dict(zip(PUBLISHED, of, strict=True))
        for of in zip(*(row[3:] for row in PUBLISHED.values()), strict=True)
    )
    parameters = {k: of[0]["parameters"] / 1e6 for k, of in plans.items()}
    of_model = {k: 3 * 4 * of[0]["parameters"] / GIB for k, of in plans.items()}
    rest = {k: sum(of[0]["peaks"]) / GIB - of_model[k] for k, of in plans.items()}
    fullest = {k: max(of[0]["peaks"]) / GIB for k, of in plans.items()}
    largest = {k: of[-1]["parameters"] / 1e6 for k, of in plans.items()}
    planned = partial(Series, "", at="devices", how=How.PLANNED)
    size, limit = "the published size", dict.fromkeys(plans, LIMIT)
    model = planned(f"{size}: weights, gradients, RMSprop", here=of_model, unit="GiB", published=model_gib)
    activations = planned(f"{size}: all else", here=rest, unit="GiB", published=rest_gib)
    most = planned("the largest that fits", here=largest, unit="M parameters", published=millions)
    yield planned(size, here=parameters, unit="M parameters", published=millions)
    yield from (model, activations, most)
    yield planned("filters of it", here={k: of[-1]["size"][1] for k, of in plans.items()})
    yield planned(f"{size}: the fullest device", here=fullest, unit="GiB", bound=limit)
    for k, of in plans.items():
        what = f"{k} x {tuple(of[0]['size'])}: fits"
        yield Check.of(what, "it does", (0, LIMIT), fullest[k], How.PLANNED, unit=" GiB")
    grows = all(one < more for one, more in pairwise(largest.values()))
    says, theirs = (" ".join(f"{n:.0f}" for n in of.values()) for of in (largest, millions))
    yield Check(
        "million parameters that fit grow with devices",
        theirs,
        "each over the one before",
        says,
        grows,
        How.PLANNED,
    )
    if "alone" in results:
        gib, count = max(results["alone"]["peaks"]) / GIB, results["alone"]["parameters"]
        what = "(18, 208) without a pipeline"
        same = count == ALONE
        yield Check("(18, 208): parameters", f"{ALONE:,}", "the same", f"{count:,}", same, How.ARITHMETIC)
        yield Check.of(what, "out of memory", (P40, inf), gib, How.PLANNED, unit=" GiB")
        yield Series("", what, "", {"bytes": gib}, How.PLANNED, "GiB", bound={"bytes": P40})
    stages = {
        f"{name}, stage {stage}": of
        for name, every in those(results, "held ").items()
        for stage, of in enumerate(every)
    }
    for how, n in ((How.RUN, 0), (How.PLANNED, 1)):
        yield Series(
            "", "small ones, fullest", "", {at: of[n] / 2**20 for at, of in stages.items()}, how, "MiB"
        )
    for name, (measured, foreseen) in stages.items():
        limits = 1 - NEAR, 1 + NEAR
        yield Check.of(f"{name}: measured as planned", NOT, limits, measured / foreseen, How.RUN)
    lines = [Line("published", How.PUBLISHED, millions), most.line("largest in 8 GB")]
    yield Chart("Parameters", "devices", "million", lines, "xy")
    both = {"model": model, "activations": activations}
    lines = [series.theirs(name) for name, series in both.items()]
    lines += [series.line(name) for name, series in both.items()]
    yield Chart("Bytes on all devices, at the published sizes", "devices", "GiB", lines, "xy")
