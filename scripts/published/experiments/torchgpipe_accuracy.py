"""torchgpipe's accuracy: a pipeline learns as one process, with recompute and deferred BatchNorm too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from comparison.verdict import noise
from published.measures import ends, trained
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Series, Step

ONE, BARE = "one process", "without BatchNorm"
ADDED = {  # to the name of a pipeline, such as pipeline-2
    "": ["recompute=never", "batchnorm=microbatch"],
    ", recompute": ["recompute=always", "batchnorm=microbatch"],
    ", deferred": ["recompute=never", "batchnorm=batch"],
}
APART = 0.25  # published: points from data parallel's error, at most
NEAR = 1e-9  # of a loss in double precision: sums in another order

RECIPE = ["threads=1", "schedule=gpipe", "batch_size=128", "optim=sgd", "optim.lr=0.05", "lr_schedule=cosine"]
CIFAR = ["data=cifar10", "data.root=${oc.env:CIFAR10,data}", "data.fallback=null"]
SIZES = ["epochs=2", "data.train_limit=10000", "data.test_limit=5000"]
TINY = ["data=digits", "epochs=1", "data.train_limit=128", "data.test_limit=64"]
WITH = ["model=resnet18", "model.width=8"]
WITHOUT = ["model=vgg11", "model.width=8", "model.batchnorm=false", "dtype=float64", "max_updates=79"]


def steps(quick: bool) -> dict[str, Step]:
    """Train one epoch without BatchNorm, and all seeds with it."""
    data = [*RECIPE, *(TINY if quick else [*CIFAR, *SIZES])]
    own = {f"seed {seed}": (seed, ["model=mlp"] if quick else WITH) for seed in range(1 if quick else 3)}
    kinds = own if quick else {BARE: (0, WITHOUT), **own}
    return {
        f"{name}: {key}": Step(learned, {"overrides": [*data, *model, *way], "seed": seed, "nproc": ranks})
        for key, (seed, model) in kinds.items()
        for name, ranks, way in (ways([1], [""]) if quick else ways([2, 4], [*ADDED]))
        if not (key == BARE and "deferred" in name)
    }


def ways(counts: Sequence[int], added: Sequence[str]) -> Iterator[tuple[str, int, list[str]]]:
    """Give each way to train: its name, its ranks, and its overrides."""
    yield ONE, 1, ["microbatches=1"]
    for ranks in counts:
        for name in added:
            yield f"pipeline-{ranks}{name}", ranks, ["microbatches=4", *ADDED[name]]


def learned(overrides: Sequence[str], seed: int, nproc: int) -> dict[str, float]:
    """Train; return the last top-1 error in %, and the last loss, on the test images."""
    summary = trained(overrides, seed, nproc)["summary"]
    return {"error": 100 * (1 - summary["val_acc"]), "loss": summary["val_loss"]}


def show(results: Results) -> Iterator[Finding]:
    """Hold errors and losses against those of one process."""
    runs: dict[str, dict[str, Any]] = {}  # by way, then by seed
    for key, result in results.items():
        name, _, which = key.partition(": ")
        runs.setdefault(name, {})[which] = result
    bare = {name: of.pop(BARE)["loss"] for name, of in runs.items() if BARE in of}
    errors = {name: [result["error"] for result in of.values()] for name, of in runs.items()}
    gaps = {name: fmean(of) - fmean(errors[ONE]) for name, of in errors.items() if name != ONE}
    if bare:
        off = max(abs(loss / bare[ONE] - 1) for loss in bare.values())
        says = f"{len(bare) - 1} pipelines off by {off:.1g} at most"
        yield Check.of(f"{BARE}: the loss of one process", NOT, (0, NEAR), off, How.RUN, says)
    alike: dict[tuple[bool, str], set[float]] = {}  # losses, by what must give the same one
    for name, gap in gaps.items():
        margin = noise(errors[name], errors[ONE], len(gaps))
        here = f"{gap:+.2f}, noise ±{margin:.2f}" if margin else f"{gap:+.2f}, too few seeds to tell noise"
        what = f"{name}: within the noise of one process"
        within = None if margin is None else abs(gap) <= margin
        yield Check(what, NOT, "within it", here, within, How.RUN)
        what, near = f"{name}: as near to one process as published", abs(gap) <= APART
        yield Check(what, f"within {APART} points", "the same", f"{gap:+.2f}", near, How.RUN)
        for seed, result in runs[name].items():
            alike.setdefault(("deferred" in name, seed), set()).add(result["loss"])
    most = max(map(len, alike.values()))
    says = "equal" if most == 1 else f"up to {most} losses of a seed"
    yield Check("recompute and more stages change no bit of a loss", NOT, "equal", says, most == 1, How.RUN)
    yield Series.measured("", "top-1 error", "", errors, fmean, unit="%")
    furthest = max(map(abs, gaps.values()))
    yield Series("", "most points from one process", "", {"here": furthest}, published={"here": APART})
    yield chart(errors)


def chart(errors: dict[str, list[float]]) -> Chart:
    """Draw how far the errors are from one process, seed by seed; recompute changes nothing."""
    lines = []
    for added, name in (("", "pipeline"), (", deferred", "deferred")):
        gaps = {1: [0.0]}
        for way, of in errors.items():
            if way[:9] == "pipeline-" and way[10:] == added:
                gaps[int(way[9])] = [error - one for error, one in zip(of, errors[ONE], strict=True)]
        lines.append(
            Line(name, How.RUN, {n: fmean(of) for n, of in gaps.items()}, [*map(ends, gaps.values())])
        )
    around = dict.fromkeys((1, max(x for line in lines for x in line.points)), 0.0)
    lines.append(Line(f"±{APART}", How.PUBLISHED, around, [(-APART, APART)] * len(around)))
    return Chart("Top-1 error beside one process", "stages", "points", lines, "x")
