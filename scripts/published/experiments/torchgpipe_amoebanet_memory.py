"""The five rows of torchgpipe's table of AmoebaNet-D's memory, by the plan, and bytes of small ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from benchmark.held import stage_peaks
from benchmark.report import progress
from benchmark.tasks import Task, prepare
from benchmark.worlds import Say, run_world
from pipetrain.config.settings import Mode
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.memory import GIB
from published.measures import estimate, partition, predicted
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Series, Step, those

LIMIT, P40 = 8e9 / GIB, 22.4  # GiB of each of Huang's devices, and of the GPU that torchgpipe had
GB = GIB / 1e9
HELD = 0.01  # of what is held, of which all but a tenth are weights: so all else comes within 10 %
ROUNDED = 0.005  # GiB and GB: torchgpipe's have two places
OVER = 0.01  # of weights, gradients and optimizer: ROUNDED is 0.6 % of the least, and BatchNorm has buffers
BATCH, IMAGE = 128, 224
MODEL = (
    "model._target_=published.amoebanet.amoebanet",
    "model.num_classes=1000",
    "optim._target_=torch.optim.RMSprop",
    "~optim.momentum",
)
STATE, REST = "weights, gradients, RMSprop", "all else"
WHOLE, THEIRS, ALL = Mode.NEVER.value, Mode.EXCEPT_FIRST_MICROBATCH.value, Mode.ALWAYS.value


class Row(NamedTuple):
    """A column of torchgpipe's table. `rounded`: half of the last place of `millions` of parameters.

    GiB and Huang's GB: of weights, gradients and RMSprop's averages (`model`), and the peak of all else
    (`rest`; None: out of memory).
    """

    cells: int
    filters: int
    balance: list[int]
    millions: float
    rounded: float
    model: float
    rest: float | None
    huang_millions: float
    huang_model: float
    huang_rest: float


PUBLISHED = {
    "baseline": Row(18, 208, [24], 81.5, 0.05, 0.91, None, 82, 1.05, 6.26),
    "pipeline-1": Row(18, 416, [24], 319.0, 0.05, 3.57, 0.91, 318, 3.8, 3.46),
    "pipeline-2": Row(18, 544, [16, 8], 542.7, 0.05, 6.07, 3.39, 542, 6.45, 8.11),
    "pipeline-4": Row(36, 544, [16, 12, 7, 7], 1060, 5, 11.80, 6.91, 1050, 12.53, 15.21),
    "pipeline-8": Row(72, 512, [23, 16, 11, 6, 6, 5, 5, 6], 1840, 5, 20.62, 10.83, 1800, 24.62, 26.24),
}
SMALL = {"1 device": [12], "2 devices": [8, 4]}  # of (6, 128)


def sized(cells: int, filters: int) -> list[str]:
    """Return the overrides of a model of this size."""
    return [*MODEL, f"model.cells={cells}", f"model.filters={filters}"]


def steps(quick: bool) -> dict[str, Step]:
    """Plan the published sizes; measure small ones."""
    size: dict[str, Any] = {"cells": 3, "filters": 8} if quick else {"cells": 6, "filters": 128}
    planned = {
        name: {"cells": row.cells, "filters": row.filters, "balance": row.balance}
        for name, row in PUBLISHED.items()
    }
    planned["baseline"]["microbatches"] = 1
    if quick:
        planned = {"tiny": {**size, "balance": [9], "microbatches": 2, "batch": 2, "image": 64}}
    return {name: Step(fits, arguments, timed=False) for name, arguments in planned.items()} | {
        f"held {devices}, {mode}": Step(
            held, {**size, "balance": [9] if quick else balance, "mode": mode}, timed=False
        )
        for devices, balance in [*SMALL.items()][: 1 if quick else None]
        for mode in (ALL, THEIRS)
    }


def fits(
    cells: int,
    filters: int,
    balance: Sequence[int],
    microbatches: int = BATCH,
    batch: int = BATCH,
    image: int = IMAGE,
) -> dict[str, dict[str, Any]]:
    """Plan a size in each mode of recompute; in one microbatch nothing is recomputed."""
    words, example, each = sized(cells, filters), (3, image, image), batch // microbatches
    layers = estimate(words, each, example)
    plans = {
        mode: predicted([*words, f"recompute={mode}"], balance, microbatches, each, example, layers=layers)
        for mode in ([WHOLE] if microbatches == 1 else [THEIRS, ALL])
    }
    return {mode: {key: of[key] for key in ("parameters", "peaks", "model")} for mode, of in plans.items()}


def held(
    cells: int, filters: int, balance: Sequence[int], mode: str, batch: int = 16, image: int = 64
) -> list[tuple[int, int]]:
    """Train a size with samples as microbatches; return the peaks of its stages, measured and planned."""
    words = [f"batch_size={batch}", f"microbatches={batch}", partition(balance), f"recompute={mode}"]
    task = Task((*sized(cells, filters), *words), (3, image, image), 1000)
    of_ranks = run_world(_held, len(balance), progress, task)
    return [(measured, planned) for stages in of_ranks for _, measured, planned in stages]


def _held(groups: ProcessGroups, say: Say, task: Task) -> list[tuple[int, int, int]]:
    return stage_peaks(groups, prepare(task, "gpipe", groups.world.size))


def show(results: Results) -> Iterator[Finding]:
    """Hold sizes and bytes against what was published, and plans against what was measured."""
    plans = {name: results[name] for name in (*PUBLISHED, "tiny") if name in results}

    def rest(mode: str) -> dict[str, float]:
        """Return the GiB of all else on all devices, as they count: beside 12 bytes a parameter."""
        moded = {name: of.get(mode) or of[WHOLE] for name, of in plans.items()}
        return {name: (sum(of["peaks"]) - 12 * of["parameters"]) / GIB for name, of in moded.items()}

    def theirs(part: str) -> dict[str, float]:
        numbers = {name: getattr(PUBLISHED[name], part) for name in plans if name in PUBLISHED}
        return {name: number for name, number in numbers.items() if number is not None}

    firsts = {name: next(iter(of.values())) for name, of in plans.items()}  # in the mode of theirs
    millions = {name: of["parameters"] / 1e6 for name, of in firsts.items()}
    model = {name: sum(of["model"]) / GIB for name, of in firsts.items()}
    fullest = {name: max(of["peaks"]) / GIB for name, of in firsts.items()}
    spared, always = rest(THEIRS), rest(ALL)
    planned = partial(Series, "", at="experiment", how=How.PLANNED)
    yield planned("parameters", here=millions, unit="M", published=theirs("millions"))
    yield planned(STATE, here=model, unit="GiB", published=theirs("model"))
    yield planned(REST, here=spared, unit="GiB", published=theirs("rest"))
    yield planned("the fullest device", here=fullest, unit="GiB", bound=dict.fromkeys(plans, LIMIT))
    yield planned("Huang et al.: parameters", here=millions, unit="M", published=theirs("huang_millions"))
    yield planned(f"Huang et al.: {STATE}", here=_gb(model), unit="GB", published=theirs("huang_model"))
    what = f"Huang et al.: {REST}; here all recomputed"
    yield planned(what, here=_gb(always), unit="GB", published=theirs("huang_rest"))
    for name, row in PUBLISHED.items():
        if name in plans:
            yield from _checks(name, row, millions[name], model[name], fullest[name], spared[name])
            what, most = f"{name}: {REST}, beside Huang et al.", row.huang_rest + ROUNDED
            here = always[name] * GB
            yield Check.of(what, f"{row.huang_rest} GB", (0, most), here, How.PLANNED, unit=" GB")
    stages = {
        f"{name}, stage {stage}": of
        for name, every in those(results, "held ").items()
        for stage, of in enumerate(every)
    }
    for how, n in ((How.RUN, 0), (How.PLANNED, 1)):
        yield Series(
            "", "a small one, fullest", "", {at: of[n] / 2**20 for at, of in stages.items()}, how, "MiB"
        )
    for name, (measured, foreseen) in stages.items():
        limits = 1 - HELD, 1 + HELD
        yield Check.of(f"{name}: measured as planned", NOT, limits, measured / foreseen, How.RUN)
    devices = {name: len(row.balance) for name, row in PUBLISHED.items() if row.rest} | {"tiny": 1}

    def line(name: str, how: How, numbers: Mapping[str, float]) -> Line:
        return Line(name, how, {devices[at]: gib for at, gib in numbers.items() if at in devices})

    lines = [line(name, How.PUBLISHED, theirs(part)) for name, part in ((STATE, "model"), (REST, "rest"))]
    lines += [line(name, How.PLANNED, gib) for name, gib in ((STATE, model), (REST, spared))]
    lines.append(line(f"{REST}, all recomputed", How.PLANNED, always))
    lines = [each for each in lines if each.points]
    yield Chart("Bytes on all devices", "devices", "GiB", lines, "xy")


def _checks(
    name: str, row: Row, millions: float, model: float, fullest: float, rest: float
) -> Iterator[Check]:
    """Hold a row against torchgpipe's; bytes in GiB."""
    same = abs(millions - row.millions) <= row.rounded
    count = f"{millions:.1f} M"
    yield Check(f"{name}: parameters", f"{row.millions:g} M", "the same", count, same, How.ARITHMETIC)
    near = (1 - OVER) * row.model, (1 + OVER) * row.model
    yield Check.of(f"{name}: {STATE}", f"{row.model} GiB", near, model, How.PLANNED, unit=" GiB")
    if row.rest is None:
        what = f"{name}: the whole batch at once"
        yield Check.of(what, "out of memory", (P40, inf), fullest, How.PLANNED, unit=" GiB")
    else:
        what, most = f"{name}: {REST}, as it recomputes", row.rest + ROUNDED
        yield Check.of(what, f"{row.rest} GiB", (0, most), rest, How.PLANNED, unit=" GiB")
        what = f"{name}: fits 8 GB"
        yield Check.of(what, "it does", (0, LIMIT), fullest, How.PLANNED, unit=" GiB")


def _gb(gib: Mapping[str, float]) -> dict[str, float]:
    return {name: number * GB for name, number in gib.items()}
