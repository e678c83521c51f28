"""Suite: VGG16 and ResNet18 on two processes, at the best cut, ours and everybody else's.

The ideal is each stage alone on local tensors, at the same time as the other, with no message: its slower
stage is the pace that no pipeline beats. The cut is the one with the best such pace, by measurement.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pipetrain.bench.figures import Row, Scale, Series, timed_row
from pipetrain.bench.ours import Ours
from pipetrain.bench.rounds import FULL, Contestant, race
from pipetrain.bench.tasks import Task, prepare
from pipetrain.bench.theirs import SCHEDULES, Alone, Plain, TorchPipeline
from pipetrain.bench.worlds import Say, run_world, titled
from pipetrain.config import conf_dir
from pipetrain.partition.balance import STRATEGIES, choose_cuts
from pipetrain.partition.estimate import Layer
from pipetrain.runtime.mesh import Mesh

RANKS = 2
MODELS = {
    "vgg16": Task(("model=vgg16", "batch_size=64")),
    "resnet18": Task(("model=resnet18", "batch_size=64")),
}
SMALL = {"mlp": Task(("model=mlp", "batch_size=64"))}
MICROBATCHES = 4
BATCHES, WINDOW = 4, 12  # of a turn; of an asynchronous window
NEIGHBOURS = 2  # cuts tried on either side of the one that flops chooses

# What each schedule is given. Synchronous ones flush after each batch.
SCHEDULE_OPTIONS: dict[str, tuple[str, ...]] = {
    "layer_dist": ("microbatches=1",),
    "pipedream": ("microbatches=1",),
}
# Further rows of pipedream's: the same with an option of the configuration, and what it gains over plain.
OPTIONS: dict[str, tuple[str, ...]] = {"fused optimizer": ("+optim.fused=true",)}
ASYNCHRONOUS = ("pipedream", "pipedream_2bw")
RIVALS = {"gpipe": "torch GPipe", "1f1b": "torch 1F1B"}
Cuts = dict[tuple[int, ...], list[str]]
"""By cut: which strategies choose it; none for a neighbour."""


def suite(scale: Scale, say: Say) -> list[Row]:
    """Measure, and return the rows."""
    tasks = SMALL if scale.quick else MODELS
    rows: list[Row] = []
    for model, task in tasks.items():
        found = run_world(measure, RANKS, titled(say, model), task, scale)[0]
        rows += make_rows(model, *found)
    return rows


def candidate_cuts(layers: Sequence[Layer], stages: int) -> Cuts:
    """Return the cuts to try: every strategy's, and the neighbours of the one that flops chooses."""
    cuts: Cuts = {}
    for strategy in STRATEGIES:
        cuts.setdefault(tuple(choose_cuts(strategy, layers, stages)), []).append(strategy)
    by_flops = choose_cuts("flops", layers, stages)
    for distance in range(-NEIGHBOURS, NEIGHBOURS + 1):
        cut = tuple(first + distance for first in by_flops)
        if cut[0] > 0 and cut[-1] < len(layers):
            cuts.setdefault(cut, [])
    return dict(sorted(cuts.items()))


def measure(mesh: Mesh, say: Say, task: Task, scale: Scale) -> tuple[Cuts, Series, tuple[int, ...], Series]:
    """Find the best cut, then race everybody at it, on one rank."""
    batches, window = (1, 8) if scale.quick else (BATCHES, WINDOW)
    cuts = candidate_cuts(prepare(task, "1f1b", RANKS).plan.layers, RANKS)
    alone = [Alone(_cut_name(cut), prepare(_cut(task, cut, 1), "1f1b", RANKS), mesh, batches) for cut in cuts]
    by_cut = race(mesh, alone, max(1, scale.rounds // 2 + 1), titled(say, "cuts"))
    del alone
    best = min(cuts, key=lambda cut: sorted(by_cut[_cut_name(cut)])[len(by_cut[_cut_name(cut)]) // 2])
    series = race(mesh, contestants(mesh, task, best, batches, window), scale.rounds, say)
    return cuts, by_cut, best, series


def contestants(mesh: Mesh, task: Task, cut: tuple[int, ...], batches: int, window: int) -> list[Contestant]:
    """Build everybody for one cut."""
    whole, pieces = _cut(task, cut, 1), _cut(task, cut, MICROBATCHES)
    made: list[Contestant] = [
        Alone(_ideal(m), prepare(_cut(task, cut, m), "1f1b", RANKS), mesh, batches) for m in (1, MICROBATCHES)
    ]
    for schedule in sorted(path.stem for path in (conf_dir() / "schedule").glob("*.yaml")):
        mine = pieces.extended(*SCHEDULE_OPTIONS.get(schedule, ()))
        if schedule == "interleaved_1f1b":  # two stages a rank: a cut of its own
            mine = task.extended(f"microbatches={MICROBATCHES}")
        made.append(_ours(schedule, schedule, mine, mesh, batches, window))
    made.append(_ours(f"pipedream, m = {MICROBATCHES}", "pipedream", pieces, mesh, batches, window))
    for name, overrides in OPTIONS.items():
        made.append(
            _ours(f"pipedream, {name}", "pipedream", whole.extended(*overrides), mesh, batches, window)
        )
    made += [TorchPipeline(name, prepare(pieces, "1f1b", RANKS), mesh, batches) for name in SCHEDULES]
    cores = os.cpu_count() or 1
    made += [
        Plain("torch DDP", prepare(whole, "1f1b", RANKS), mesh, batches, parallel=True),
        Plain(f"one process, {cores} threads", prepare(whole, "1f1b", RANKS), mesh, batches, cores),
        Plain("one process, 1 thread", prepare(whole, "1f1b", RANKS), mesh, batches),
    ]
    return made


def _ours(name: str, schedule: str, task: Task, mesh: Mesh, batches: int, window: int) -> Ours:
    if schedule in ASYNCHRONOUS:
        return Ours(name, prepare(task, schedule, RANKS, window), mesh)
    return Ours(name, prepare(task, schedule, RANKS), mesh, batches)


def _cut(task: Task, cut: tuple[int, ...], microbatches: int) -> Task:
    return task.extended(f"partition={list(cut)}", f"microbatches={microbatches}")


def _ideal(m: int) -> str:
    return f"ideal without messages, m = {m}"


def _cut_name(cut: tuple[int, ...]) -> str:
    return f"before layer {', '.join(map(str, cut))}"


def make_rows(model: str, cuts: Cuts, by_cut: Series, best: tuple[int, ...], series: Series) -> list[Row]:
    """Hold the cuts against the best, and everybody against the ideal and torch's 1F1B."""
    rows = [
        Row(
            f"{model}, slower stage alone by cut",
            f"{_cut_name(cut)} ({', '.join(names) or 'neighbour'})",
            [1000 * seconds for seconds in by_cut[_cut_name(cut)]],
            "ms",
            timed_row("", _cut_name(cut), by_cut, {"of bound": _cut_name(best)}).ratios,
        )
        for cut, names in cuts.items()
    ]
    return rows + [_row(f"{model}, {_cut_name(best)}", name, series) for name in series]


def _row(benchmark: str, name: str, series: Series) -> Row:
    whole = name.startswith(("pipedream", "layer_dist", "one process", "torch DDP")) and "2bw" not in name
    m = 1 if whole and f"m = {MICROBATCHES}" not in name else MICROBATCHES
    against = {
        "of bound": _ideal(m),
        "x torch GPipe": "torch GPipe",
        "x torch 1F1B": "torch 1F1B",
        "x 1 thread": "one process, 1 thread",
    }
    least: dict[str, float] = {}
    if name in RIVALS:
        least = {f"x {RIVALS[name]}": 1.0}
    elif name == "pipedream" + FULL:
        least = {"of bound": 0.95, "x torch 1F1B": 1.15}
    if name.startswith("ideal"):
        against["of bound"] = name
    return timed_row(benchmark, name, series, against, least)
