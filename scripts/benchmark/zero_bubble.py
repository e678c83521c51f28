"""Suite `zero-bubble`: schedules that split the backward, beside those of torch.distributed.pipelining.

First on a machine where a matrix product takes a given time and no core (see `paced`), with stages of one
product, so that F, I and W take the same time; stages placed as a V are twice as many, and their products
take half of it. The bound is what `simulate` says for these times and free messages. What is left between a
schedule and its bound are messages and the runtime. Then real models on two processes, where W is as cheap as
the library's way to split a backward makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from benchmark import gpt, models
from benchmark.contestants import Contestant, Ours, TorchPipeline, race
from benchmark.paced import SAMPLE, WIDTH, Paced
from benchmark.report import Row, Series, timed_row
from benchmark.tasks import Job, Scale, Task, compose_task, prepare
from benchmark.worlds import Say, fitted, run_world, titled
from pipetrain.measure import measure as measure_costs
from pipetrain.network.chain import Chain
from pipetrain.plan.plan import Plan, with_costs
from pipetrain.plan.profile import LayerTime, profile_conditions
from pipetrain.runtime.mesh import Mesh
from pipetrain.schedule.actions import SENDS, Op
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Costs, Kind


@dataclass(frozen=True, slots=True)
class Way:
    """A schedule as it is raced. `batches`: between two drains; `rival`: torch's with the same order."""

    schedule: str
    batches: int = 1
    rival: str = ""
    v: bool = False  # placed as a V: two stages a rank


ONCE = "1f1b"
WAYS = {
    ONCE: Way("1f1b", rival="torch 1F1B"),
    "zb_h1": Way("zb_h1", rival="torch InterleavedZeroBubble"),
    "zb_h2, 4 batches a window": Way("zb_h2", 4),
    "zbv": Way("zbv", rival="torch ZBVZeroBubble", v=True),
    "zbv, 4 batches a window": Way("zbv", 4, v=True),
    "v_half": Way("v_half", v=True),
    "v_min": Way("v_min", v=True),
    "zb_auto": Way("zb_auto", v=True),
    "v_async, 4 batches a window": Way("v_async", 4, v=True),
    "pipedream, 4 batches a window": Way("pipedream", 4),
}
ACTION_S, MESSAGE_S = 1e-3, 1.5e-3  # of F, I, W or B beside its products, and of 1 MiB, on two cores
OF_BOUND, OF_TORCH, OF_ONCE = "of bound", "x torch's", "x 1f1b"
LEAST = {OF_BOUND: 0.97, OF_TORCH: 1.0}
GAINS = {"zb_h1": 1.12, "zbv": 1.2}
"""How many times as fast as 1f1b they should be with 4 ranks and 8 microbatches."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is tried on the paced machine. `product_s`: seconds of F, of I and of W of a whole stage."""

    product_s: float
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]
    ways: Mapping[str, Way]


SLEEP = Sizes(0.06, (2, 4), (4, 8, 16), WAYS)
SLEEP_SMALL = Sizes(0.004, (2,), (4,), {name: WAYS[name] for name in ("1f1b", "zb_h1", "zbv")})


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure, and give the rows as they come."""
    sizes = SLEEP_SMALL if scale.quick else SLEEP
    for ranks in sizes.ranks:
        title = f"zero bubble, {ranks} ranks"
        yield from make_rows(title, *run_world(measure, ranks, titled(say, title), sizes, scale.rounds)[0])
    for model, task in tasks(scale).items():
        title = f"zero bubble, {model}"
        found = run_world(measure_model, RANKS, titled(say, title), task, scale)[0]
        yield from make_model_rows(title, *found)


# Sleeping stages


def prepared(way: Way, ranks: int, m: int, product_s: float) -> tuple[Job, float]:
    """Prepare the training of stages of one product; a microbatch is a sample.

    An order that is made for costs is made for what a profile would find, ACTION_S and MESSAGE_S included.
    `product_s`: seconds of a whole stage's product. Returns the job, and the seconds of a product.
    """
    slices = 2 if way.v else 1
    overrides = (
        "model._target_=benchmark.paced.products",
        f"+model.stages={ranks * slices}",
        "partition=even",
        f"batch_size={m}",
        f"microbatches={m}",
        f"window={way.batches}",
    )
    job = prepare(Task(overrides, SAMPLE, WIDTH), way.schedule, ranks, way.batches)
    one_s = product_s / slices
    found = product_costs(job.plan.stages, one_s, ACTION_S, MESSAGE_S)
    return replace(job, plan=with_costs(job.plan, found)), one_s


def product_costs(stages: int, product_s: float, action_s: float = 0.0, message_s: float = 0.0) -> Costs:
    """Return the costs of stages of one product. The first has no I: its W is a whole backward.

    `action_s`: seconds that each action takes beside its products; `message_s`: of a message.
    """
    products = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}
    seconds: dict[Kind, float] = {}
    for stage in range(stages):
        seconds |= {(stage, op): n * product_s + action_s for op, n in products.items()}
        seconds |= {(stage, op): message_s for op in SENDS}
    return Costs(seconds | {(0, Op.I): 0.0, (0, Op.W): 2 * product_s + action_s})


def bound(plan: Plan, product_s: float) -> float:
    """Return the seconds of a batch on paper, where products of so many seconds are all that takes time."""
    settings, costs = plan.settings, product_costs(plan.stages, product_s)
    run = simulate(plan.window.program, settings.microbatches, buffer_size=settings.buffer_size, cost=costs)
    return run.makespan / max(plan.windows)


def copied(job: Job) -> Job:
    """Return the same job for another one who trains it."""
    return replace(job, model=deepcopy(job.model))


def measure(mesh: Mesh, say: Say, sizes: Sizes, rounds: int) -> tuple[Series, dict[str, float]]:
    """Race everybody, on one rank; returns the series, and what each should be on paper."""
    ranks = mesh.world.size
    contestants: list[Contestant] = []
    bounds: dict[str, float] = {}
    for m in sizes.microbatches:
        for name, way in sizes.ways.items():
            job, one_s = prepared(way, ranks, m, sizes.product_s)
            full = f"{name}, m = {m}"
            bounds[full] = bound(job.plan, one_s)
            if way.rival:
                rival = TorchPipeline(way.rival.removeprefix("torch "), copied(job), mesh, 1)
                rival.name += f", m = {m}"
                contestants.append(Paced(rival, one_s))
                bounds[rival.name] = bounds[full]
            contestants.append(Paced(Ours(full, job, mesh), one_s))
    return race(mesh, contestants, rounds, say), bounds


def make_rows(benchmark: str, series: Series, bounds: Mapping[str, float]) -> list[Row]:
    """Hold everybody against the bound and 1f1b, and ours against theirs."""
    rows: list[Row] = []
    for name, seconds in series.items():
        way, m = name.rsplit(", ", 1)
        against = {OF_BOUND: "bound", OF_ONCE: f"{ONCE}, {m}"}
        least = {OF_BOUND: LEAST[OF_BOUND]} if way in WAYS else {}
        if way in WAYS and WAYS[way].rival:
            against[OF_TORCH] = f"{WAYS[way].rival}, {m}"
            least[OF_TORCH] = LEAST[OF_TORCH]
        if way in GAINS and (benchmark, m) == ("zero bubble, 4 ranks", "m = 8"):
            least[OF_ONCE] = GAINS[way]
        bounded = {**series, "bound": [bounds[name]] * len(seconds)}
        rows.append(timed_row(benchmark, name, bounded, against, least))
    return rows


# Real models on two processes

RANKS = 2
BATCHES = 4  # of a turn, and of a window where it has several
MODELS = ("1f1b", "zb_h1", "zb_h2, 4 batches a window", "zbv", "zbv, 4 batches a window")
CONTIGUOUS = models.CONTIGUOUS  # as everybody else's, so that only the schedule and the split differ


def tasks(scale: Scale) -> dict[str, Task]:
    """Return what is trained, by name."""
    if scale.quick:
        return {"mlp": models.SMALL.extended("microbatches=4", CONTIGUOUS)}
    found = {"vgg16": models.MODELS["vgg16"], "gpt": gpt.GPT}
    return {name: task.extended("microbatches=4", CONTIGUOUS) for name, task in found.items()}


def measure_model(mesh: Mesh, say: Say, task: Task, scale: Scale) -> tuple[Series, dict[str, list[int]]]:
    """Race everybody on one model, each at the cut that is fastest on paper for its order, on one rank.

    Returns the series, and the cut of each.
    """
    layers = layer_times(mesh, task)
    contestants: list[Contestant] = []
    cuts: dict[str, list[int]] = {}
    for name in MODELS:
        way = WAYS[name]
        one = task.extended(f"window={way.batches}")
        cut = best_cut(prepare(one.extended("partition=even"), way.schedule, RANKS, way.batches).plan, layers)
        job = prepare(one.extended(f"partition={cut}"), way.schedule, RANKS, way.batches)
        cuts[name] = cut
        if way.rival:
            rival = TorchPipeline(way.rival.removeprefix("torch "), copied(job), mesh, BATCHES)
            contestants.append(rival)
            cuts[rival.name] = cut
        contestants.append(Ours(name, job, mesh, BATCHES))
    return race(mesh, contestants, scale.rounds, say), cuts


def layer_times(mesh: Mesh, task: Task) -> list[LayerTime]:
    """Measure the layers for a microbatch, on all ranks at once. All ranks get the same times."""
    cfg, job = compose_task(task, ONCE), prepare(task, ONCE, RANKS)
    draft = job.plan
    conditions = profile_conditions(draft.settings, cfg.optim)
    return measure_costs(
        fitted(mesh, draft), draft, conditions, lambda: (Chain(deepcopy(job.model)), job.optimizer)
    ).layers


def best_cut(plan: Plan, layers: Sequence[LayerTime]) -> list[int]:
    """Return the cut with which a plan's window takes the least time on paper, messages apart."""

    def seconds(cut: Sequence[int]) -> float:
        cost = costs([layers[start:end] for start, end in pairwise([0, *cut, len(layers)])])
        return simulate(plan.window.program, plan.settings.microbatches, cost=cost).makespan

    return min(map(list, combinations(range(1, len(layers)), plan.stages - 1)), key=seconds)


def costs(stages: Sequence[Sequence[LayerTime]]) -> Costs:
    """Return what the actions of stages cost. The first has no I: its W is a whole backward."""
    seconds: dict[Kind, float] = {}
    for stage, layers in enumerate(stages):
        back = sum(layer.backward_s for layer in layers)
        seconds[stage, Op.F] = sum(layer.forward_s for layer in layers)
        seconds[stage, Op.B] = back
        seconds[stage, Op.I] = sum(layer.input_s for layer in layers) if stage else 0.0
        seconds[stage, Op.W] = sum(layer.weight_s for layer in layers) if stage else back
    return Costs(seconds)


def make_model_rows(benchmark: str, series: Series, cuts: Mapping[str, Sequence[int]]) -> list[Row]:
    """Hold everybody against our 1f1b, and ours against theirs."""
    rows = []
    for name in series:
        against = {OF_ONCE: ONCE}
        least = {}
        if name in WAYS and WAYS[name].rival:
            against[OF_TORCH] = WAYS[name].rival
            least[OF_TORCH] = LEAST[OF_TORCH]
        cut = ", ".join(map(str, cuts[name]))
        row = timed_row(benchmark, name, series, against, least)
        rows.append(replace(row, contestant=f"{name}, cut before {cut}"))
    return rows
