"""OneFlow's SSP: stages with uneven replicas beside data parallelism, run small and planned at full size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

from benchmark.contestants import Builders, Contestant, Ours
from benchmark.held import MODELS as SMALL
from benchmark.tasks import prepare
from pipetrain.model.specs import Size
from pipetrain.plan.costs import SECONDS, LayerTime, Profile
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.actions import Op
from pipetrain.schedule.memory import peaks
from pipetrain.schedule.programs import ssp
from published.measures import Race, held, on_paper, profile_of, profiled, raced
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Series, Step, those


class Published(NamedTuple):
    """A model of the record. `pieces`: microbatches of a batch; the last number is priced.

    `profiles`: images and their pixels; the last profile is of the layers behind the convolutions. `samples`:
    of PipeDream's profile. `epochs`: seconds, of the pipeline and of data parallelism.
    """

    cut: int
    ranks: int
    pieces: tuple[int, ...]
    profiles: tuple[tuple[int, int], ...]
    samples: int
    epochs: tuple[float, float] | None = None


SIZES = {
    "alexnet": Published(6, 8, (7, 14, 28), ((8, 224), (64, 64)), 256, (85.5, 76.3)),
    "vgg16": Published(10, 8, (7, 14, 28), ((1, 224), (16, 32)), 128, (1352, 1848)),
    "resnet50": Published(1, 16, (16, 32, 64), ((1, 224),), 128),
}
PEAKS = {"vgg16": (4609, 3287, 6165)}  # MiB: of stage 0, stage 1, data parallelism
PCIE, SPEEDS = 16.0, (4.0, 8.0, 16.0, 32.0, 64.0)  # GB/s, sent and received together
LATENCY_S, IMAGENET, WINDOW = 1e-5, 1_281_167, 16  # of a message; images; batches between two drains
SSP, PARALLEL, CLASSES = "ssp", "data parallelism", "model.num_classes=1000"
RANKS, BATCH, PIECES = (2, 3, 4), 24, 12  # of what is run
WIDTH, NARROW = 32, 4  # channels that the models there begin with; with --quick


def steps(quick: bool) -> dict[str, Step]:
    """Plan the record's sizes; race small ones, and measure what they hold."""
    of = {"versions": Step(versions, {"buffer": 4, "batches": 7})}
    if quick:
        one = {"models": [*SIZES][:1], "width": NARROW, "ranks": 2, "rounds": 1}
        return of | {"race 2": Step(race, one)}
    of |= {f"plan {model}": Step(planned, {"model": model}) for model in SIZES}
    for n in RANKS:
        of[f"race {n}"] = Step(race, {"models": [*SIZES], "width": WIDTH, "ranks": n, "rounds": 3})
    for model in SIZES:
        for way, (schedule, *words) in ways(model, WIDTH, RANKS[-1]).items():
            case = {"model": model, "schedule": schedule, "ranks": RANKS[-1], "overrides": words}
            of[f"held {model}, {way}"] = Step(held, case)
    return of


def versions(buffer: int, batches: int) -> list[list[int]]:
    """Return the weight versions that the forwards of each of two stages read."""
    return [[a.version for a in of if a.op is Op.F] for of in ssp(2, batches, 1, buffer=buffer)]


def ways(model: str, width: int, ranks: int) -> dict[str, tuple[str, ...]]:
    """Return a schedule and overrides; stage 1 has one process, of ResNet50 all, as stage 0."""
    every, first = (f"0-{last}" if last else "0" for last in (ranks - 1, ranks - 2))
    stages = f"{every}.{every}" if model == "resnet50" else f"{first}.{ranks - 1}"
    words, cut = (f"model.width={width}", f"batch_size={BATCH}"), f"partition=[{SIZES[model].cut}]"
    return {
        SSP: (SSP, *words, cut, f"placement={stages}", f"microbatches={PIECES}"),
        PARALLEL: ("1f1b", *words, f"placement={every}", f"microbatches={ranks}"),
    }


def race(models: Sequence[str], width: int, ranks: int, rounds: int) -> Any:
    """Race pipelines beside data parallelism."""
    return raced(partial(contestants, models, width), ranks, rounds)


def contestants(models: Sequence[str], width: int, groups: ProcessGroups) -> Builders:
    """Return what builds them, for turns of two batches."""

    def build(name: str, model: str, schedule: str, *words: str) -> Contestant:
        return Ours(name, prepare(SMALL[model].extended(*words), schedule, groups.world.size, 2), groups, 2)

    return {
        f"{model}, {way}": partial(build, f"{model}, {way}", model, *words)
        for model in models
        for way, words in ways(model, width, groups.world.size).items()
    }


# Planned


def planned(model: str) -> dict[str, Any]:
    """Profile a model, and plan it on the record's devices: by way the `seconds` of an epoch and the `peaks`.

    Seconds by the GB/s of a link; peaks by stage, in bytes.
    """
    size, layers = SIZES[model], times(model)
    parallel = (f"placement=0-{size.ranks - 1}", "partition=flops", f"microbatches={size.ranks}")
    every = {str(m): (SSP, f"microbatches={m}") for m in size.pieces} | {PARALLEL: ("1f1b", *parallel)}
    return {way: plan_of(model, layers, *words) for way, words in every.items()}


def times(model: str) -> list[LayerTime]:
    """Return the times of each layer for an image: as measured here, scaled to a V100's for all of them."""
    words = f"experiment=ssp_{model}", CLASSES, "placement=null", "partition=flops"
    every: list[LayerTime] = []
    for images, pixels in SIZES[model].profiles:
        measured = Profile.from_json(profiled(words, images, (3, pixels, pixels), 1000, 1)).layers
        begin = sum(layer.name.startswith("conv") for layer in every)
        every[begin:] = [scaled(layer, 1.0, 1 / images) for layer in measured[begin:]]
    theirs = sum(of.forward_s + of.backward_s for of in profile_of(model).profile.layers)
    share = theirs / SIZES[model].samples / sum(of.forward_s + of.backward_s for of in every)
    return [scaled(layer, share, 1.0) for layer in every]


def scaled(layer: LayerTime, share: float, samples: float) -> LayerTime:
    """Return the times of a layer for so many times the samples, where all takes `share` of the time."""
    seconds = {name: share * samples * getattr(layer, name) for name in SECONDS}
    own = {"output_bytes": round(samples * layer.output_bytes), "step_s": share * layer.step_s}
    return replace(layer, **seconds | own)


def plan_of(model: str, layers: Sequence[LayerTime], schedule: str, *words: str) -> dict[str, Any]:
    """Plan a model that is made nowhere, by its layers' times for an image: see `planned`."""
    overrides = f"experiment=ssp_{model}", CLASSES, *words

    def profile(full: Size) -> Profile:
        return Profile({}, {}, LATENCY_S, 0.0, [scaled(layer, 1.0, full.samples) for layer in layers])

    plan = on_paper(overrides, schedule, [3, 224, 224], profile, WINDOW)
    full, batch = plan.settings.full, plan.settings.batch_size
    seconds = {}
    for speed in SPEEDS:
        table = replace(plan.table, times=replace(profile(full), s_per_byte=1e-9 / speed))
        costs = table.costs(plan.cut, plan.modes, False, full, plan.placement)
        batch_s = replace(plan, costs=costs).timeline().makespan / max(plan.windows)
        seconds[str(speed)] = batch_s * IMAGENET / batch
    return {"seconds": seconds, "peaks": [of["total"] for of in peaks(plan.memory())]}


# Shown


def show(results: Results) -> Iterator[Finding]:
    """Hold gains, peaks and versions against the record's."""
    plans, gains = those(results, "plan "), [Line(PARALLEL, How.BOUND, dict.fromkeys(SPEEDS, 1.0))]
    for model, of in plans.items():
        size, pipeline, parallel = SIZES[model], of[str(SIZES[model].pieces[-1])], of[PARALLEL]
        what = f"{model} on {size.ranks} devices"
        here = {name: way["seconds"][str(PCIE)] for name, way in ((SSP, pipeline), (PARALLEL, parallel))}
        theirs = dict(zip(here, size.epochs or (), strict=False))
        ratio = size.epochs[1] / size.epochs[0] if size.epochs else None
        yield Series(what, "an epoch", "", here, How.PLANNED, "s", theirs)
        gain = {s: parallel["seconds"][str(s)] / pipeline["seconds"][str(s)] for s in SPEEDS}
        gains.append(Line(model, How.PLANNED, gain))
        published = {} if ratio is None else {SSP: ratio}
        yield Series(what, "gain", "", {SSP: gain[PCIE]}, How.PLANNED, "x", published)
        if ratio is not None:
            gains.append(Line(f"{model}, published", How.PUBLISHED, {PCIE: ratio}))
            says, limits = f"{gain[PCIE]:.2f} at {PCIE:.0f} GB/s", (1, inf) if ratio > 1 else (0, 1)
            yield Check.of(f"{what}: gain", f"{ratio:.2f}", limits, gain[PCIE], How.PLANNED, says)
        peaks, parallel_peak = pipeline["peaks"], parallel["peaks"][0]
        yield from peaks_of(what, peaks, parallel_peak, How.PLANNED, PEAKS.get(model, ()))
    races = {int(n): Race(of) for n, of in those(results, "race ").items()}
    speeds = list[Series]()
    for model in SIZES:
        names = f"{model}, {SSP}", f"{model}, {PARALLEL}"
        if ratios := {n: race.ratios(*names) for n, race in races.items() if names[0] in race.of}:
            speeds.append(Series.measured(model, "gain", "processes", ratios, unit="x"))
        if f"held {names[0]}" in results:
            stages, (parallel,) = (fullest(results[f"held {name}"]) for name in names)
            yield from peaks_of(f"{model} on {RANKS[-1]} processes", stages, parallel, How.RUN)
    yield from speeds
    if plans:
        yield Chart("Gain over data parallelism", "GB/s of a link", "x", gains, "x")
    lines = [series.line() for series in speeds]
    yield Chart("Gain over data parallelism, small images", "processes", "x", lines, "x")
    if plans:
        yield microbatches(plans["vgg16"])
    read = results["versions"]
    says = f"{read[0]} and {read[1]}"
    yield Check(
        "versions read with a buffer of 4", str(RING), "the same", says, read == [RING, RING], How.ARITHMETIC
    )
    says = "orders are always static: there is nothing to switch"
    yield Check("an epoch changes by static scheduling", "by < 2 %", "at most 2 %", says, None, How.PLANNED)


def fullest(stages: Sequence[Sequence[int]]) -> list[int]:
    """Return the most bytes that were measured of each stage on any process."""
    return [max(nbytes for at, nbytes, _ in stages if at == n) for n in sorted({at for at, *_ in stages})]


def peaks_of(
    what: str, stages: Sequence[int], parallel: int, how: How, theirs: Sequence[float] = ()
) -> Iterator[Finding]:
    """Give the peaks, in bytes, and the check that no stage holds as much as data parallelism."""
    here = {**{f"stage {n}": nbytes for n, nbytes in enumerate(stages)}, PARALLEL: parallel}
    mib, published = {name: n / 2**20 for name, n in here.items()}, dict(zip(here, theirs, strict=False))
    yield Series(what, "peak", "", mib, how, "MiB", published)
    most = max(stages) / parallel
    yield Check.of(f"{what}: peak of each stage", NOT, (0, 1), most, how, unit=f" x {PARALLEL}")


def microbatches(of: Mapping[str, Any]) -> Chart:
    """Draw the peaks of VGG16."""
    pieces, mib = SIZES["vgg16"].pieces, {name: [n / 2**20 for n in way["peaks"]] for name, way in of.items()}
    rows = {f"stage {n}": {m: mib[str(m)][n] for m in pieces} for n in range(2)}
    rows[PARALLEL] = dict.fromkeys(pieces, mib[PARALLEL][0])
    lines = [Line(name, How.PLANNED, row) for name, row in rows.items()]
    names = zip(rows, PEAKS["vgg16"], strict=True)
    lines += [Line(name, How.PUBLISHED, {pieces[-1]: theirs}) for name, theirs in names]
    return Chart("VGG16: peak of a device", "microbatches of a batch", "MiB", lines, "x")


RING = [0, 0, 0, 0, 1, 2, 3]
