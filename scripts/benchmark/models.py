"""Suites `vgg16` and `resnet18`: two processes at the best cut; `one-process`: what the engine itself costs.

The ideal of two processes is each stage alone on local tensors, at the same time as the other, with no
message: its slower stage is the pace that no pipeline beats. The cut is the one with the best such pace, by
measurement. In one process, where a pipeline is of no use, the ideal is a plain PyTorch loop.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median

from benchmark.contestants import FULL, RIVALS, SCHEDULES, Alone, Contestant, Ours, Plain, TorchPipeline, race
from benchmark.report import Row, Series, timed_row
from benchmark.tasks import Job, Scale, Task, compose_task, prepare, schedules
from benchmark.worlds import Say, fitted, run_world, titled
from pipetrain.measure import measure as measure_costs
from pipetrain.network.chain import Chain
from pipetrain.plan.balance import choose_cuts
from pipetrain.plan.estimate import Layer
from pipetrain.plan.profile import profile_conditions
from pipetrain.runtime.mesh import Mesh
from pipetrain.settings import PROFILE, STRATEGIES

RANKS = 2
MODELS = {
    "vgg16": Task(("model=vgg16", "batch_size=64")),
    "resnet18": Task(("model=resnet18", "batch_size=64")),
}
SMALL = Task(("model=mlp", "batch_size=64"))
MICROBATCHES = 4
BATCHES, WINDOW = 4, 12  # of a turn; of an asynchronous window
ONE_THREAD = "one process, 1 thread"
PLAIN = "plain loop"
NEIGHBOURS = 2  # cuts tried on either side of the one that flops chooses
WHOLE = "microbatches=1"
CONTIGUOUS = "memory_format=contiguous"  # the layout of everybody else's, who cannot send another over gloo
SPLIT = ("v_async", "v_half", "v_min", "zb_auto", "zb_h1", "zb_h2", "zbv")  # raced by the suite zero-bubble
QUICK = ["1f1b", "interleaved_1f1b", "pipedream"]
ALIKE = {f"{name}, contiguous": name for name in ("gpipe", "1f1b", "pipedream")}
# Further rows of pipedream's: with options of the configuration, and what they gain over the defaults.
OPTIONS: dict[str, tuple[str, ...]] = {
    "optimizer not fused": ("optim.fused=false",),
    "compile": ("compile=true",),
    "bf16": ("precision=bf16",),
    "bf16, compile": ("precision=bf16", "compile=true"),
}
COMPILERS = ("c++", "g++", "clang++")  # one of which torch.compile needs
Cut = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured for one model: the cuts, and everybody at the best. `ideals`: by contestant."""

    by_cut: Series
    best: str
    series: Series
    ideals: Mapping[str, str]


def suite(model: str, scale: Scale, say: Say) -> Iterator[Row]:
    """Measure one model, and give its rows."""
    task = SMALL if scale.quick else MODELS[model]
    yield from make_rows(model, run_world(measure, RANKS, titled(say, model), task, scale)[0])


def candidate_cuts(layers: Sequence[Layer], stages: int) -> dict[Cut, list[str]]:
    """Return the cuts to try and who chooses each: every strategy's, and the neighbours of flops'."""
    cuts: dict[Cut, list[str]] = {}
    for strategy in STRATEGIES:
        cuts.setdefault(tuple(choose_cuts(strategy, layers, stages)), []).append(strategy)
    by_flops = choose_cuts("flops", layers, stages)
    for distance in range(-NEIGHBOURS, NEIGHBOURS + 1):
        cut = tuple(first + distance for first in by_flops)
        if cut[0] > 0 and cut[-1] < len(layers):
            cuts.setdefault(cut, [])
    return dict(sorted(cuts.items()))


def profiled_cut(mesh: Mesh, task: Task) -> Cut:
    """Return the cut of partition=profile, for whole batches."""
    whole = task.extended(WHOLE)
    cfg, job = compose_task(whole, "1f1b"), prepare(whole, "1f1b", RANKS)
    draft = job.plan
    conditions = profile_conditions(draft.settings, cfg.optim)
    profile = measure_costs(
        fitted(mesh, draft), draft, conditions, lambda: (Chain(deepcopy(job.model)), job.optimizer)
    )
    return tuple(prepare(whole.extended("partition=profile"), "1f1b", RANKS, profile=profile).plan.cuts)


def measure(mesh: Mesh, say: Say, task: Task, scale: Scale) -> Found:
    """Find the best cut, then race everybody at it, on one rank."""
    batches, window = (1, 8) if scale.quick else (BATCHES, WINDOW)
    candidates = candidate_cuts(prepare(task, "1f1b", RANKS).plan.layers, RANKS)
    candidates.setdefault(profiled_cut(mesh, task), []).append(PROFILE)
    cuts = {
        f"before layer {', '.join(map(str, cut))} ({', '.join(names) or 'neighbour'})": cut
        for cut, names in candidates.items()
    }
    stages = [Alone(label, _job(task, cut, 1), mesh, batches) for label, cut in cuts.items()]
    by_cut = race(mesh, stages, scale.rounds // 2 + 1, titled(say, "cuts"))
    best = min(by_cut, key=lambda label: median(by_cut[label]))
    compiles = not scale.quick and any(map(shutil.which, COMPILERS))  # minutes
    raced = [schedule for schedule in schedules() if schedule not in SPLIT]
    raced = QUICK if scale.quick else raced
    everybody = contestants(mesh, task, cuts[best], batches, window, compiles, raced)
    ideals = {one.name + end: _ideal_of(one) for one in everybody for end in ("", FULL)}
    return Found(by_cut, best, race(mesh, everybody, scale.rounds, say), ideals)


def contestants(
    mesh: Mesh, task: Task, cut: Cut, batches: int, window: int, compiles: bool, raced: Sequence[str]
) -> list[Contestant]:
    """Build everybody for one cut; `raced`: schedules. Synchronous ones flush after each batch."""

    def ours(name: str, schedule: str, task: Task) -> Ours:
        return Ours(name, prepare(task, schedule, RANKS, window), mesh, batches)

    def usual(schedule: str) -> Task:
        if schedule == "interleaved_1f1b":  # two stages a rank: a cut of its own
            return task.extended(f"microbatches={MICROBATCHES}")
        return whole if schedule in ("layer_dist", "pipedream") else pieces

    whole, pieces = _cut(task, cut, 1), _cut(task, cut, MICROBATCHES)
    jobs = [_job(layout, cut, m) for layout in (task, task.extended(CONTIGUOUS)) for m in (1, MICROBATCHES)]
    ideals = {_ideal(job.microbatches, job.plan.numerics.memory_format): job for job in jobs}
    made: list[Contestant] = [Alone(name, job, mesh, batches) for name, job in ideals.items()]
    made += [ours(schedule, schedule, usual(schedule)) for schedule in raced]
    made.append(ours(f"pipedream, m = {MICROBATCHES}", "pipedream", pieces))
    made += [ours(name, schedule, usual(schedule).extended(CONTIGUOUS)) for name, schedule in ALIKE.items()]
    for name, overrides in OPTIONS.items():
        if compiles or "compile=true" not in overrides:
            made.append(ours(f"pipedream, {name}", "pipedream", whole.extended(*overrides)))
    made += [TorchPipeline(name, _job(task, cut, MICROBATCHES), mesh, batches) for name in SCHEDULES]
    cores = os.cpu_count() or 1
    made.append(Plain("torch DDP", _job(task, cut, 1), mesh, batches, parallel=True))
    made.append(Plain(f"one process, {cores} threads", _job(task, cut, 1), mesh, batches, cores))
    made.append(Plain(ONE_THREAD, _job(task, cut, 1), mesh, batches))
    return made


def _cut(task: Task, cut: Cut, microbatches: int) -> Task:
    return task.extended(f"partition={list(cut)}", f"microbatches={microbatches}")


def _job(task: Task, cut: Cut, microbatches: int) -> Job:
    return prepare(_cut(task, cut, microbatches), "1f1b", RANKS)


def _ideal(m: int, layout: str) -> str:
    return f"ideal without messages, m = {m}, {layout}"


def _ideal_of(one: Contestant) -> str:
    layout = one.plan.numerics.memory_format if isinstance(one, Ours) else "contiguous"
    return one.name if isinstance(one, Alone) else _ideal(one.microbatches, layout)


def make_rows(model: str, found: Found) -> list[Row]:
    """Hold the cuts against the best, and everybody against the ideal, torch's pipelines and one thread."""
    rows = [
        timed_row(f"{model}, slower stage alone", label, found.by_cut, {"of bound": found.best})
        for label in found.by_cut
    ]
    for name in found.series:
        against = {"of bound": found.ideals[name]}
        against |= {f"x {rival}": rival for rival in RIVALS.values()}
        against["x 1 thread"] = ONE_THREAD
        if name.startswith("pipedream, "):
            against["x pipedream"] = "pipedream" + (FULL if name.endswith(FULL) else "")
        schedule = ALIKE.get(name.removesuffix(FULL), name.removesuffix(FULL))
        least: dict[str, float] = {}
        if schedule in RIVALS:
            least = {f"x {RIVALS[schedule]}": 1.0}
        elif schedule == "pipedream" and name.endswith(FULL):
            least = {"of bound": 0.95, "x torch 1F1B": 1.15}
        rows.append(timed_row(f"{model}, cut {found.best}", name, found.series, against, least))
    return rows


def one_process_suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure one process, and give the rows as they come."""
    for model, task in [("mlp", SMALL)] if scale.quick else MODELS.items():
        title = f"one process, {model}"
        series = run_world(measure_one_process, 1, titled(say, title), task, scale.rounds)[0]
        for name in series:
            least = {} if name == PLAIN else {"of bound": 0.98}
            yield timed_row(title, name, series, {"of bound": PLAIN}, least)


def measure_one_process(mesh: Mesh, say: Say, task: Task, rounds: int) -> Series:
    """Race a plain loop and ours, in our layout and in its."""
    whole = task.extended(WHOLE)
    plain = Plain(PLAIN, prepare(whole, "1f1b", 1), mesh, BATCHES)
    tasks = {"1f1b": whole, "1f1b, contiguous": whole.extended(CONTIGUOUS)}
    ours = [Ours(name, prepare(task, "1f1b", 1), mesh, BATCHES) for name, task in tasks.items()]
    return race(mesh, [plain, *ours], rounds, say)
