"""Suites `schedules` and `jitter`: what a schedule adds to computing, on a machine that is the same for all.

It is that of `paced`: stages of one product each, so that F, I and W take the same time; where a rank has two
stages, theirs take half of it. The bound is what `simulate` says for these times and free messages: what is
left between a schedule and its bound are messages and the runtime.

In `jitter` times vary at random. A static order makes a stage wait whenever another one is late; fbp goes on
with what is ready, as far as `in_flight` and `buffer_size` let it. All sleep the same times, so the bound is
the stage that sleeps longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from benchmark.contestants import (
    TORCHS,
    Builders,
    Contestant,
    Ours,
    ours,
    rows_of_race,
    torch_pipeline,
)
from benchmark.paced import PRODUCTS, Paced, naps, task_of
from benchmark.report import Row
from benchmark.tasks import Job, Scale, prepare
from benchmark.worlds import Say
from pipetrain.plan.plan import Plan
from pipetrain.plan.verification import verify
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.actions import SENDS, Op
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Costs, Kind

WINDOW = 4  # batches
LONG = f", {WINDOW} batches a window"


@dataclass(frozen=True, slots=True)
class Way:
    """A schedule as it is raced. `batches`: between two drains; `slices`: stages of a rank."""

    schedule: str
    batches: int = 1
    slices: int = 1


WAYS = {
    **{name: Way(name) for name in ("layer_dist", "gpipe", "1f1b", "zb_h1")},
    "interleaved_1f1b": Way("interleaved_1f1b", slices=2),
    f"zb_h2{LONG}": Way("zb_h2", WINDOW),
    **{name: Way(name, slices=2) for name in ("zbv", "v_half", "v_min", "zb_auto")},
    f"zbv{LONG}": Way("zbv", WINDOW, slices=2),
    f"pipedream{LONG}": Way("pipedream", WINDOW),
    f"pipedream_2bw{LONG}": Way("pipedream_2bw", WINDOW),
    f"v_async{LONG}": Way("v_async", WINDOW, slices=2),
}
ACTION_S, MESSAGE_S = 1e-3, 1.5e-3  # of F, I, W or B beside its products, and of 1 MiB, on two cores
OTHERS = {"x torch's": "torch {name}", "x 1f1b": "1f1b, {m}"}
LEAST = {"of bound": 0.97, "x torch's": 1.0}
GAINS = {"zb_h1, m = 8": 1.12, "zbv, m = 8": 1.2}
"""How many times as fast as 1f1b they should be with 4 ranks."""


def prepared(way: Way, ranks: int, m: int, product_s: float) -> tuple[Job, float]:
    """Prepare the training of stages of one product: return the job, and the seconds of a product.

    An order that is made for costs is made for what a profile would find, ACTION_S and MESSAGE_S included.
    `product_s`: seconds of F, of I and of W of all that a rank has.
    """
    task = task_of(ranks * way.slices, m).extended(f"window={way.batches}")
    job = prepare(task, way.schedule, ranks, way.batches)
    one_s = product_s / way.slices
    return replace(job, plan=with_costs(job.plan, costs(job.plan.stages, one_s, ACTION_S, MESSAGE_S))), one_s


def with_costs(plan: Plan, costs: Costs) -> Plan:
    """Return the plan at other costs, with programs made for them if the schedule asks for costs."""
    plan = replace(plan, costs=costs, choices={})
    if not plan.by_costs:
        return plan
    cut, windows, evaluations = verify(plan.draft, plan.cut, [*plan.windows], 1, costs, plan.modes)
    return replace(plan, cut=cut, windows=windows, evaluations=evaluations)


def costs(stages: int, product_s: float, action_s: float = 0.0, message_s: float = 0.0) -> Costs:
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
    settings, cost = plan.settings, costs(plan.stages, product_s)
    run = simulate(plan.window.program, settings.microbatches, buffer_size=plan.cut.bounds, cost=cost)
    return run.makespan / max(plan.windows)


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Race every schedule beside torch's of the same order."""
    quick = scale.quick
    for ranks in (2,) if quick else (2, 4):
        make = partial(contestants, (4,) if quick else (4, 8), 0.004 if quick else 0.04, quick)
        least = {f"{name}, m = {m}": dict(LEAST) for name in TORCHS for m in (4, 8)}
        for name, gain in GAINS.items() if ranks == 4 else ():
            least[name]["x 1f1b"] = gain
        yield from rows_of_race(f"schedules, {ranks} ranks", ranks, make, scale, say, OTHERS, least)


def contestants(
    microbatches: tuple[int, ...], product_s: float, quick: bool, groups: ProcessGroups
) -> Builders:
    """Return what builds everybody, with what each should take on paper."""

    def build(name: str, way: Way, m: int, rival: str = "") -> Contestant:
        job, one_s = prepared(way, groups.world.size, m, product_s)
        racing: Contestant = torch_pipeline(rival, job, groups, 1, name) if rival else Ours(name, job, groups)
        return Paced(racing, one_s, bound(job.plan, one_s))

    builders: dict[str, Callable[[], Contestant]] = {}
    ways = {name: WAYS[name] for name in ("1f1b", "zb_h1", "zbv")} if quick else WAYS
    for m in microbatches:
        for name, way in ways.items():
            for rival in ("", name) if name in TORCHS else ("",):
                title = f"{'torch ' * bool(rival)}{name}, m = {m}"
                builders[title] = partial(build, title, way, m, rival)
    return builders


STATIC = "pipedream, buffer_size 2"
JITTERED = {
    STATIC: ("pipedream", "buffer_size=2"),
    "pipedream, buffer_size 8": ("pipedream", "buffer_size=8"),
    "fbp, in_flight 4, buffer_size 2": ("fbp", "schedule.in_flight=4", "buffer_size=2"),
    "fbp, in_flight 8, buffer_size 4": ("fbp", "schedule.in_flight=8", "buffer_size=4"),
    "fbp, in_flight 16, buffer_size 8": ("fbp", "schedule.in_flight=16", "buffer_size=8"),
}
SPREAD = 0.5  # share by which products take more or less


def jitter_suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Race fbp beside pipedream, where stages take turns at being late."""
    for ranks in (2,) if scale.quick else (2, 4):
        make = partial(jittered, *((0.004, 24) if scale.quick else (0.01, 96)), scale.rounds)
        least = {"fbp, in_flight 8, buffer_size 4": {"x pipedream": 1.05}}
        yield from rows_of_race(
            f"jitter, {ranks} ranks", ranks, make, scale, say, {"x pipedream": STATIC}, least
        )


def jittered(product_s: float, window: int, rounds: int, groups: ProcessGroups) -> Builders:
    """Return what builds everybody, with how long the stage sleeps that sleeps longest."""
    ranks = groups.world.size
    slept = PRODUCTS * max(mean_nap(stage, product_s, window, rounds) for stage in range(ranks))

    def sleeping(build: Callable[[], Contestant]) -> Contestant:
        return Paced(build(), naps(groups.world.rank, product_s, SPREAD), slept)

    builders = ours(groups, task_of(ranks, 1), JITTERED, window=window)
    return {name: partial(sleeping, build) for name, build in builders.items()}


def mean_nap(stage: int, product_s: float, window: int, rounds: int) -> float:
    """Return the mean seconds of a stage's products in the turns that count, after one to warm up."""
    turn = PRODUCTS * window
    counted = islice(naps(stage, product_s, SPREAD), turn, (rounds + 1) * turn)
    return sum(counted) / (rounds * turn)
