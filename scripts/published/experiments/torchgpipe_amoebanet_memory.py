"""The largest AmoebaNet-D that fits on 1, 2, 4 and 8 devices, by the plan, and bytes of small ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import sqrt
from typing import Any

from benchmark.held import NEAR, stage_peaks
from benchmark.report import progress
from benchmark.tasks import Task, prepare
from benchmark.worlds import Say, run_world
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.memory import GIB
from published.measures import predicted
from published.record import Chart, Check, Figure, Findings, How, Line, Record, Results, Step

LIMIT, P40 = 8e9 / GIB, 22.4  # GiB of a TPUv2's core, and of the GPU that torchgpipe had
PUBLISHED = {  # devices: cells, filters, cut, million parameters; GiB of model and activations
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
    words = [
        f"batch_size={batch}",
        f"microbatches={batch}",
        f"partition={[*accumulate(balance)][:-1] or 'even'}",
    ]
    task = Task((*sized(cells, filters), *words), (3, image, image), 1000)
    of_ranks = run_world(_held, len(balance), progress, task)
    return [(measured, planned) for stages in of_ranks for _, measured, planned in stages]


def _held(groups: ProcessGroups, say: Say, task: Task) -> list[tuple[int, int, int]]:
    return stage_peaks(groups, prepare(task, "gpipe", groups.world.size))


def show(results: Results) -> Findings:
    """Hold sizes and bytes against what was published, and plans against what was measured."""
    figures, checks = list[Figure](), list[Check]()
    largest, lines = dict[int, float](), {name: dict[int, float]() for name in ("model", "activations")}
    for k, plans in ((int(key.split()[1]), of) for key, of in results.items() if key.startswith("fits")):
        millions, model, activations = PUBLISHED[k][3:]
        first, last = plans[0], plans[-1]
        of_model = 3 * 4 * first["parameters"] / GIB
        lines["model"][k], lines["activations"][k] = of_model, sum(first["peaks"]) / GIB - of_model
        largest[k] = last["parameters"] / 1e6
        what, fullest = f"{k} x {tuple(first['size'])}", max(first["peaks"]) / GIB
        figures += [
            Figure(f"{what}: parameters", millions, first["parameters"] / 1e6, How.PLANNED, unit="M"),
            Figure(f"{what}: weights, gradients, RMSprop", model, of_model, How.PLANNED, unit="GiB"),
            Figure(f"{what}: all else", activations, lines["activations"][k], How.PLANNED, unit="GiB"),
            Figure(f"{what}: the fullest device", None, fullest, How.PLANNED, None, LIMIT, "GiB"),
            Figure(f"{k} x {tuple(last['size'])}: largest", millions, largest[k], How.PLANNED, unit="M"),
        ]  # fmt: skip
        checks.append(Check(f"{what} fits", "it does", f"{fullest:.2f} of {LIMIT:.2f} GiB", fullest <= LIMIT))
    sizes = [*largest.values()]
    grows = all(one < more for one, more in pairwise(sizes))
    says, theirs = (" ".join(f"{n:.0f}" for n in of) for of in (sizes, [of[3] for of in PUBLISHED.values()]))
    checks.append(Check("million parameters that fit grow with devices", theirs, says, grows))
    if "alone" in results:
        gib, parameters = max(results["alone"]["peaks"]) / GIB, results["alone"]["parameters"]
        checks += [
            Check("(18, 208): parameters", f"{ALONE:,}", f"{parameters:,}", parameters == ALONE),
            Check("(18, 208) without a pipeline", f"out of memory, {P40} GiB", f"{gib:.1f} GiB", gib > P40),
        ]
        figures.append(Figure("(18, 208) without a pipeline", None, gib, How.PLANNED, None, P40, "GiB"))
    for name, stages in (
        (key.removeprefix("held "), of) for key, of in results.items() if key.startswith("held")
    ):
        for stage, (measured, planned) in enumerate(stages):
            what, of_plan = f"{name}, stage {stage}", measured / planned
            figures.append(Figure(f"{what}: measured", None, measured / 2**20, How.RUN, unit="MiB"))
            figures.append(Figure(f"{what}: planned", None, planned / 2**20, How.PLANNED, unit="MiB"))
            near = abs(of_plan - 1) <= NEAR
            checks.append(Check(f"{what}: measured as planned", "within 10 %", f"{of_plan:.3f} of it", near))
    million, model_gib, activations_gib = zip(*(of[3:] for of in PUBLISHED.values()), strict=True)
    sizes_lines = [
        Line("published", How.PUBLISHED, [*zip(PUBLISHED, million, strict=True)]),
        Line("largest in 8 GB", How.PLANNED, [*largest.items()]),
    ]
    bytes_lines = [
        Line("model", How.PUBLISHED, [*zip(PUBLISHED, model_gib, strict=True)]),
        Line("activations", How.PUBLISHED, [*zip(PUBLISHED, activations_gib, strict=True)]),
    ]
    bytes_lines += [Line(name, How.PLANNED, [*of.items()]) for name, of in lines.items()]
    title = "Bytes on all devices, at the published sizes"
    charts = [
        Chart("Parameters", "devices", "million", sizes_lines, "xy"),
        Chart(title, "devices", "GiB", bytes_lines, "xy"),
    ]
    return Findings(figures, checks, charts, NOTES)


NOTES = (
    "torchgpipe took the sizes of Huang et al., whose devices had 8 GB; its own P40 (22.4 GiB) would hold "
    "more. So 8 GB is the limit here. Its bytes are the allocator's, and of version 0.0.5.",
    "Batch 128 in 128 microbatches, 224x224, RMSprop, all recomputed, the published cuts. The largest: the "
    "published number of cells at the published cut, with as many filters as fit.",
    "Small ones were trained here on made-up, seeded images of 64x64, 16 in 16.",
)
RECORD = Record(
    "Memory of AmoebaNet-D (cells, filters) on 1 to 8 devices",
    "torchgpipe, benchmarks/amoebanetd-memory, on 1 to 8 Tesla P40; sizes of Huang et al., arXiv 1811.06965.",
    steps,
    show,
    "The table of torchgpipe 0.0.3 had another model, which its authors corrected in November 2019: its "
    "(6, 208), of 90M, has 31.4M parameters.",
)
