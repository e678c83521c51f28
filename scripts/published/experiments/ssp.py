"""OneFlow's SSP: stages with uneven replicas beside data parallelism, run small and planned at full size.

Both have microbatches of as many images on a device: as many as the record had, and a few.
"""

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
from published.oneflow_ssp import documented, epochs_and_peak
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Series, Step, those


class Published(NamedTuple):
    """A model of the record. `what`: its name there.

    `devices`: of stage 0, and of all; of ResNet50 both stages have all. `images`: of a microbatch on a
    device, first as the record had. `profiles`: images and their pixels; the last profile is of the layers
    behind the convolutions. `samples`: of PipeDream's profile.
    """

    what: str
    cut: int
    devices: tuple[int, int]
    images: tuple[int, ...]
    profiles: tuple[tuple[int, int], ...]
    samples: int


SIZES = {
    "alexnet": Published("AlexNet 3:1", 6, (7, 8), (256, 128, 64), ((8, 224), (64, 64)), 256),
    "vgg16": Published("VGG16 11:7", 10, (7, 8), (32, 16, 8), ((1, 224), (16, 32)), 128),
    "resnet50": Published("ResNet50 1:27", 1, (16, 16), (64, 32, 16), ((1, 224),), 128),
}
PCIE, SPEEDS = 16.0, (4.0, 8.0, 16.0, 32.0, 64.0)  # GB/s, sent and received together
LATENCY_S, IMAGENET, WINDOW = 1e-5, 1_281_167, 16  # of a message; images; batches between two drains
SSP, PARALLEL, ALONE, CLASSES = "ssp", "data parallelism", "one device", "model.num_classes=1000"
RANKS, IMAGES = (2, 3, 4), (8, 2)  # of what is run: processes, and images of a microbatch
WIDTH, NARROW = 32, 4  # channels that the models there begin with; with --quick


def theirs(model: str, way: str, static: str = "off") -> dict[str, float] | None:
    """Return the record's `seconds` and `peak`: see `epochs_and_peak`; None if it has none of one version."""
    what = SIZES[model].what
    return epochs_and_peak(what, static) if way == SSP else epochs_and_peak(f"{what.split()[0]}, {way}")


def steps(quick: bool) -> dict[str, Step]:
    """Plan the record's sizes; race small ones, and measure what they hold."""
    of = {"versions": Step(versions, {"buffer": 4, "batches": 7}, timed=False)}
    if quick:
        one = {"models": [*SIZES][:1], "width": NARROW, "ranks": 2, "rounds": 1}
        return of | {"race 2": Step(race, one)}
    of |= {f"plan {model}": Step(planned, {"model": model}) for model in SIZES}
    for n in RANKS:
        of[f"race {n}"] = Step(race, {"models": [*SIZES], "width": WIDTH, "ranks": n, "rounds": 3})
    for model in SIZES:
        for way, (schedule, *words) in ways(model, WIDTH, RANKS[-1]).items():
            case = {"model": model, "schedule": schedule, "ranks": RANKS[-1], "overrides": words}
            of[f"held {model}, {way}"] = Step(held, case, timed=False)
    return of


def versions(buffer: int, batches: int) -> list[list[int]]:
    """Return the weight versions that the forwards of each of two stages read."""
    return [[a.version for a in of if a.op is Op.F] for of in ssp(2, batches, 1, buffer=buffer)]


def devices_of(model: str, ranks: int) -> int:
    """Return the processes of stage 0: stage 1 has one of its own, but of ResNet50 both have all."""
    return ranks if model == "resnet50" else ranks - 1


def ways(model: str, width: int, ranks: int) -> dict[str, tuple[str, ...]]:
    """Return a schedule and overrides by way and images of a microbatch; a batch is IMAGES[0] a device."""
    first, size = devices_of(model, ranks), SIZES[model]
    every, few = (f"0-{n - 1}" if n > 1 else "0" for n in (ranks, first))
    stages = f"{every}.{every}" if first == ranks else f"{few}.{first}"
    of = dict[str, tuple[str, ...]]()
    for images in IMAGES:
        for way, schedule, devices, words in (
            (SSP, SSP, first, (f"partition=[{size.cut}]", f"placement={stages}")),
            (PARALLEL, "1f1b", ranks, (f"placement={every}",)),
        ):
            batch = IMAGES[0] * devices
            cut = f"batch_size={batch}", f"microbatches={batch // images}"
            of[f"{way}, {images}"] = (schedule, f"model.width={width}", *words, *cut)
    return of


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
    """Profile a model, and plan it on the record's devices, by way and images of a microbatch.

    The `seconds` of an epoch by the GB/s of a link, and the `peaks` by stage, in bytes.
    """
    size, layers, of = SIZES[model], times(model), dict[str, Any]()
    parallel = f"placement=0-{size.devices[1] - 1}", "partition=flops"
    for images in size.images:
        for way, schedule, devices, words in (
            (SSP, SSP, size.devices[0], ()),
            (PARALLEL, "1f1b", size.devices[1], parallel),
        ):
            batch = size.images[0] * devices
            cut = f"batch_size={batch}", f"microbatches={batch // images}"
            of[f"{way}, {images}"] = plan_of(model, layers, schedule, *words, *cut)
    return of


def times(model: str) -> list[LayerTime]:
    """Return the times of each layer for an image: as measured here, all scaled by one factor.

    To what the record's device took alone; where it has no such number, to a V100 of PipeDream's authors.
    """
    words = f"experiment=ssp_{model}", CLASSES, "placement=null", "partition=flops"
    every: list[LayerTime] = []
    for images, pixels in SIZES[model].profiles:
        measured = Profile.from_json(profiled(words, images, (3, pixels, pixels), 1000, 1)).layers
        begin = sum(layer.name.startswith("conv") for layer in every)
        every[begin:] = [scaled(layer, 1.0, 1 / images) for layer in measured[begin:]]
    if alone := theirs(model, ALONE):
        image_s = alone["seconds"] / IMAGENET
    else:
        v100 = profile_of(model).profile.layers
        image_s = sum(of.forward_s + of.backward_s for of in v100) / SIZES[model].samples
    share = image_s / sum(of.forward_s + of.backward_s for of in every)
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
        yield from plan_shown(model, of, gains)
    races = {int(n): Race(of) for n, of in those(results, "race ").items()}
    speeds = list[Series]()
    for model in SIZES:
        for images in IMAGES:
            names = [f"{model}, {way}, {images}" for way in (SSP, PARALLEL)]
            ratios = {
                n: [devices_of(model, n) / n * ratio for ratio in race.ratios(*names)]
                for n, race in races.items()
                if names[0] in race.of
            }
            if ratios:
                of_whom = f"{model}, {images} images"
                speeds.append(Series.measured(of_whom, "gain", "processes", ratios, unit="x"))
                known, here = gain_of(model), speeds[-1].here[most := max(ratios)]
                if known and most == RANKS[-1]:
                    what = f"{of_whom}, {most} processes: gain"
                    yield Check.of(what, f"{known:.2f}", like(known), here, How.RUN)
            if f"held {names[0]}" in results:
                stages, (parallel,) = (fullest(results[f"held {name}"]) for name in names)
                yield from peaks_of(model, f"{RANKS[-1]} processes", images, stages, parallel, How.RUN)
    yield from speeds
    if plans:
        yield Chart("Gain over data parallelism", "GB/s of a link", "x", gains, "x")
    lines = [series.line() for series in speeds]
    yield Chart("Gain over data parallelism, small images", "processes", "x", lines, "x")
    if "vgg16" in plans:
        yield peaks_drawn(plans["vgg16"])
    read = results["versions"]
    says = f"{read[0]} and {read[1]}"
    yield Check(
        "versions read with a buffer of 4", str(RING), "the same", says, read == [RING, RING], How.ARITHMETIC
    )
    yield from documented()


def plan_shown(model: str, of: Mapping[str, Any], gains: list[Line]) -> Iterator[Finding]:
    """Show a plan, and add the lines of its gain."""
    size = SIZES[model]
    where, (first, *_, last) = f"{size.devices[1]} devices", size.images
    for images in (first, last):
        pipeline, parallel = (of[f"{way}, {images}"] for way in (SSP, PARALLEL))
        known = [theirs(model, way) if images == first else None for way in (SSP, PARALLEL)]
        epochs = {way: of["seconds"] for way, of in zip((SSP, PARALLEL), known, strict=True) if of}
        gain = {s: parallel["seconds"][str(s)] / pipeline["seconds"][str(s)] for s in SPEEDS}
        ratio = {SSP: of_it} if images == first and (of_it := gain_of(model)) else {}
        what = f"{model} on {where}, {images} images"
        here = {SSP: pipeline["seconds"][str(PCIE)], PARALLEL: parallel["seconds"][str(PCIE)]}
        yield Series(what, "an epoch", "", here, How.PLANNED, "s", epochs)
        yield Series(what, "gain", "", {SSP: gain[PCIE]}, How.PLANNED, "x", ratio)
        gains.append(Line(f"{model}, {images} images", How.PLANNED, gain))
        if ratio:
            gains.append(Line(f"{model}, {images} images", How.PUBLISHED, {PCIE: ratio[SSP]}))
            says, limits = f"{gain[PCIE]:.2f} at {PCIE:.0f} GB/s", like(ratio[SSP])
            yield Check.of(f"{what}: gain", f"{ratio[SSP]:.2f}", limits, gain[PCIE], How.PLANNED, says)
        yield from peaks_of(model, where, images, pipeline["peaks"], parallel["peaks"][0], How.PLANNED)


def gain_of(model: str) -> float | None:
    """Return how many times as fast as data parallelism the record's pipeline is, if it has both."""
    ssp, parallel = theirs(model, SSP), theirs(model, PARALLEL)
    return parallel["seconds"] / ssp["seconds"] if ssp and parallel else None


def like(published: float) -> tuple[float, float]:
    """Return the limits of a ratio that is on the same side of 1 as the published one."""
    return (1, inf) if published > 1 else (0, 1)


def fullest(stages: Sequence[Sequence[int]]) -> list[int]:
    """Return the most bytes that were measured of each stage on any process."""
    return [max(nbytes for at, nbytes, _ in stages if at == n) for n in sorted({at for at, *_ in stages})]


def peaks_of(
    model: str, where: str, images: int, stages: Sequence[int], parallel: int, how: How
) -> Iterator[Finding]:
    """Give the peaks, in bytes, and the check: on the record's side of data parallelism's, or not above that.

    A device has one stage, but of ResNet50 both.
    """
    what = f"{model} on {where}, {images} images"
    here = {**{f"stage {n}": nbytes for n, nbytes in enumerate(stages)}, PARALLEL: parallel}
    here["fullest device"] = sum(stages) if model == "resnet50" else max(stages)
    ways = [theirs(model, SSP), theirs(model, SSP, "on"), theirs(model, PARALLEL)]
    says, published, limits = NOT, dict[str, float](), (0.0, 1.0)
    if how is How.PLANNED and images == SIZES[model].images[0] and all(ways):
        off, on, whole = (of["peak"] for of in ways if of)
        says, published = (
            f"{off / whole:.2f}, static {on / whole:.2f}",
            {"fullest device": off, PARALLEL: whole},
        )
        limits = like(off / whole)
    mib = {name: nbytes / 2**20 for name, nbytes in here.items()}
    yield Series(what, "peak", "", mib, how, "MiB", published)
    most = here["fullest device"] / parallel
    yield Check.of(f"{what}: peak of a device", says, limits, most, how, unit=f" x {PARALLEL}")


def peaks_drawn(of: Mapping[str, Any]) -> Chart:
    """Draw the peaks of VGG16."""
    places = [("stage 0", SSP, 0), ("stage 1", SSP, 1), (PARALLEL, PARALLEL, 0)]
    images = SIZES["vgg16"].images
    lines = [
        Line(name, How.PLANNED, {n: of[f"{way}, {n}"]["peaks"][stage] / 2**20 for n in images})
        for name, way, stage in places
    ]
    known = {name: theirs("vgg16", way) for name, way, _ in places if name != "stage 1"}
    lines += [Line(name, How.PUBLISHED, {images[0]: of["peak"]}) for name, of in known.items() if of]
    return Chart("VGG16: peak of a device", "images of a microbatch", "MiB", lines, "x")


RING = [0, 0, 0, 0, 1, 2, 3]
