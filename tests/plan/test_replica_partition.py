"""Cuts and replicas: what stages cost, by hand, and that none is faster than the plan, by trying all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.config.build import make_schedule
from pipetrain.config.settings import Mode, Settings
from pipetrain.errors import ConfigError
from pipetrain.plan import make_plan as making
from pipetrain.plan.make_plan import estimate_model, make_plan
from pipetrain.plan.plan import Plan, Samples
from pipetrain.plan.replica_partition import LayerSums, Machines, Planner, Way
from pipetrain.plan.text import describe
from pipetrain.plan.verification import Draft
from pipetrain.schedule.actions import Schedule
from pipetrain.schedule.memory import Items
from pipetrain.schedule.programs import one_f_one_b, pipedream, pipedream_2bw
from tests.support.cases import options_of
from tests.support.plans import Skip, bytes_of, layer, table_of
from tests.support.refusals import refusal


def sums_of(
    work: Sequence[float],
    weights: Sequence[float] = (),
    crossing: Sequence[float] = (),
    saved: Sequence[float] = (),
    step: float = 0,
    stage: float = 0,
) -> LayerSums:
    """Layers of these times and bytes; `stage`: seconds of each stage beside its layers."""
    layers = len(work)
    weights, saved = weights or [0] * layers, saved or [0] * layers

    def until(values: Sequence[float], start: float = 0) -> list[float]:
        return [start + sum(values[:n]) for n in range(layers + 1)]

    return LayerSums(
        until(work, stage),
        until([step] * layers),
        until(weights),
        [0, *(crossing or [0] * (layers - 1)), 0],
        range(1, layers),
        lambda a, b: Items(saved=round(sum(saved[a:b])), versions=round(sum(weights[a:b]))),
    )


# What stages cost


def test_a_link_counts_what_it_sends_and_receives():
    """Two machines of four ranks; within one a byte takes 1 s, between them 10 s."""
    machines = Machines(8, 4, 1, 10)
    assert [machines.reduce_s(0, r) for r in (1, 2, 4, 5)] == [0, 2, 3, 32]
    assert machines.reduce_s(3, 2) == 20  # on two machines
    message = {  # (first rank of the receiving stage, replicas before, replicas): 0 1 2 3 | 4 5 6 7
        (1, 1, 1): 1,
        (2, 2, 2): 0.5,
        (3, 1, 1): 1,
        (4, 1, 1): 10,
        (3, 3, 2): 10,  # one of two receivers is on the other machine
        (4, 4, 4): 10,  # a machine has one link, whatever its ranks
        (7, 7, 1): 10,
    }
    assert {key: machines.message_s(*key) for key in message} == message
    four = Machines(16, 4, 1, 10)
    assert [four.message_s(first, first, 16 - first) for first in (8, 12, 15)] == [5, 10, 10]


def test_a_stage_takes_the_longer_of_its_work_and_its_all_reduce_shared_by_its_replicas():
    sums = sums_of([3, 3, 4], [6, 0, 30], [8, 1])
    plan = Planner(sums, Machines(4, 4, 0.1, 0.1)).priced([(0, 3), (2, 1)])
    assert (plan.cuts, plan.replicas) == ([2], [3, 1])
    assert plan.parts == [
        {"message": 0, "compute": 2, "all-reduce": pytest.approx(4 * 2 / 3 * 6 * 0.1 / 3)},
        {"message": pytest.approx(0.1), "compute": 4, "all-reduce": 0},
    ]
    assert (plan.seconds, plan.bound) == (4, "compute of stage 1")
    added = Planner(sums, Machines(4, 4, 0.1, 0.1), adds_reduce=True).priced([(0, 3), (2, 1)])
    assert (added.parts, added.seconds) == (plan.parts, 4)
    slow = Planner(sums, Machines(4, 1, 0.1, 5), adds_reduce=True).priced([(0, 2), (1, 2)])
    assert slow.seconds == 150 + 3.5
    slow = Planner(sums, Machines(4, 1, 0.1, 5)).priced([(0, 2), (1, 2)])
    assert slow.parts[1] == {"message": 20, "compute": 3.5, "all-reduce": 150}
    assert (slow.seconds, slow.bound) == (150, "all-reduce of stage 1")


def test_an_update_of_several_microbatches_reduces_once_and_ends_with_its_busiest_replica():
    sums = sums_of([3], [6], step=2, stage=1)
    machines = Machines(3, 3, 1, 1)
    parts = {
        flushes: Planner(sums, machines, 4, flushes).priced([(0, 3)]).parts[0] for flushes in (True, False)
    }
    assert parts[True] == {"message": 0, "compute": (2 * (3 + 1) + 2) / 4, "all-reduce": 16 / 4}
    assert parts[False]["compute"] == pytest.approx((4 / 3 * (3 + 1) + 2) / 4)


def test_where_nothing_overlaps_a_rank_also_copies_what_crosses_its_cuts():
    sums = sums_of([3, 3, 3], [2, 2, 2], [10, 20])
    plan = Planner(sums, Machines(4, 4, 0.1, 0.1), overlaps=False).priced([(0, 1), (1, 2), (2, 1)])
    assert plan.parts[1] == {"message": 3 / 2, "compute": 3 / 2, "all-reduce": pytest.approx(0.2)}
    assert plan.seconds == 3 + 2  # the last stage, whose messages no replica shares
    assert plan.bound == "compute of stage 2"


def test_layers_of_a_table_have_all_that_crosses_a_cut_and_each_weight_once():
    """A skip of 5 bytes from layer 0 to layer 2, whose gradient comes back, and data that layer 1 takes."""
    layers = [layer(f"l{n}", 1, 2, output_bytes=10, step_s=0.5) for n in range(3)]
    skips = [Skip(0, (2,), 5), Skip(-1, (1,), 7, needs_grad=False)]
    table = table_of(layers, trained=[4, 8, 16], skips=skips)
    table.layers[2].weights["0.weight"] = bytes_of(4)
    sums = LayerSums.from_table(table)
    assert list(sums.work_s) == [0, 3, 6, 9]
    assert list(sums.step_s) == [0, 0.5, 1, 1.5]
    assert list(sums.weight_bytes) == [0, 4, 12, 28]
    assert list(sums.crossing) == [0, 2 * (10 + 5) + 7, 2 * (10 + 5), 0]
    assert list(LayerSums.from_table(table, mode=Mode.ALWAYS).work_s) == [0, 4, 8, 12]
    assert LayerSums.from_table(table, [2]).cuts == [2]
    assert sums.size(1, 2).versions == 8


# The fastest plan


def plans(layers: int, ranks: int) -> Iterator[list[tuple[int, int]]]:
    """All stages: their first layers and replicas."""
    for stages in range(1, min(layers, ranks) + 1):
        for cuts in combinations(range(1, layers), stages - 1):
            for replicas in product(range(1, ranks + 1), repeat=stages):
                if sum(replicas) == ranks:
                    yield [*zip((0, *cuts), replicas, strict=True)]


def slowest(planner: Planner, plan: Sequence[tuple[int, int]]) -> float:
    """The slowest of a plan's stages and cuts, each worked out alone."""
    sums, machines, rank, seconds = planner.layers, planner.machines, 0, 0.0
    ends = [start for start, _ in plan[1:]] + [len(sums.work_s) - 1]
    for n, ((start, r), end) in enumerate(zip(plan, ends, strict=True)):
        if n and start not in sums.cuts:
            return inf
        u = planner.microbatches or r
        busiest = ceil(u / r) if planner.flushes else u / r
        spans = rank // machines.per_machine != (rank + r - 1) // machines.per_machine
        weights = sums.weight_bytes[end] - sums.weight_bytes[start]
        work = busiest * (sums.work_s[end] - sums.work_s[start] + sums.work_s[0])
        work += sums.step_s[end] - sums.step_s[start]
        reduce = 4 * (r - 1) / r * weights * (machines.between_s if spans else machines.within_s)
        copied = busiest * (sums.crossing[start] + sums.crossing[end]) * machines.within_s
        seconds = max(seconds, (max(work, reduce) if planner.overlaps else work + reduce + copied) / u)
        if n:
            seconds = max(seconds, sums.crossing[start] * machines.message_s(rank, plan[n - 1][1], r))
        n_open, size = ceil((machines.ranks - rank) / r), sums.size(start, end)
        if n_open * size.saved + (n_open - 1) * planner.stashes * size.versions > planner.limit:
            return inf
        rank += r
    return seconds


NUMBERS = st.integers(0, 9)


@st.composite
def planners(draw: st.DrawFn) -> Planner:
    layers, each, machines = draw(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 2)))
    numbers = [draw(st.lists(NUMBERS, min_size=layers, max_size=layers)) for _ in range(4)]
    sums = sums_of(numbers[0], numbers[1], numbers[2][1:], numbers[3], draw(NUMBERS), draw(NUMBERS))
    return Planner(
        sums._replace(cuts=draw(st.sets(st.integers(1, layers)))),
        Machines(each * machines, each, draw(NUMBERS) / 10, draw(NUMBERS) / 2),
        draw(st.none() | st.integers(1, 6)),
        flushes=draw(st.booleans()),
        overlaps=draw(st.booleans()),
        stashes=draw(st.booleans()),
        limit=draw(st.sampled_from([inf, inf, 5, 20])),
    )


@settings(max_examples=150, deadline=None)
@given(planners())
def test_no_cuts_and_replicas_are_faster_than_those_of_the_plan(planner):
    every = [*plans(len(planner.layers.work_s) - 1, planner.machines.ranks)]
    times = {tuple(plan): slowest(planner, plan) for plan in every}
    by_stages = {len(plan.replicas): plan for plan in planner.by_stages()}
    for stages in {len(plan) for plan in every}:
        least = min(time for plan, time in times.items() if len(plan) == stages)
        assert (stages in by_stages) == (least < inf)
        if plan := by_stages.get(stages):
            assert plan.seconds == pytest.approx(least)
            assert times[(*zip([0, *plan.cuts], plan.replicas, strict=True),)] == pytest.approx(least)
    best = planner.best()
    assert (best.seconds if best else inf) == pytest.approx(min(times.values()))
    replicas = [r for _, r in every[-1]]
    these = [time for plan, time in times.items() if [r for _, r in plan] == replicas]
    same = planner.best(replicas)
    assert (same.seconds if same else inf) == pytest.approx(min(these))


def test_of_plans_that_are_equally_fast_one_has_the_fewest_stages_and_the_last_the_fewest_replicas():
    sums = sums_of([8, 0, 0, 1], crossing=[9, 9, 9])
    assert Planner(sums, Machines(4, 4, 1, 1)).best().replicas == [4]
    sums = sums_of([8, 0, 0, 1], [0, 0, 0, 20], crossing=[9, 9, 9])  # 2-2 takes 9 s too
    plan = Planner(sums, Machines(4, 2, 0.01, 1)).best()
    assert (plan.replicas, plan.seconds, plan.bound) == ([3, 1], 9, "message of stage 1")


def test_what_does_not_fit_is_none_and_a_limit_spreads_layers_over_more_ranks():
    """Stage 0 of two has both microbatches open: 1F1B on two ranks."""
    sums = sums_of([1] * 4, saved=[10] * 4)
    plan = {limit: Planner(sums, Machines(2, 2, 9, 9), limit=limit).best() for limit in (39, 40, 29)}
    assert plan[40].replicas == [2]
    assert (plan[39].replicas, plan[39].cuts) == ([1, 1], [1])
    assert plan[29] is None
    sums = sums_of([1] * 2, weights=[10, 10])  # an older version on the first rank, where weights are stashed
    fits = {
        stashes: Planner(sums, Machines(2, 2, 9, 9), stashes=stashes, limit=9) for stashes in (True, False)
    }
    assert [planner.best([1, 1]) is not None for planner in fits.values()] == [False, True]
    assert Planner(sums, Machines(5, 5, 1, 1)).best([1] * 5) is None  # more stages than layers


# For a run


def auto(schedule: Schedule, weights: int, *words: str, ranks: int = 3, s_per_byte: float = 1e-3) -> Plan:
    """Plan layers that take 1 s forward and 2 s back, the last of which has all the weights."""
    table = table_of([layer(str(n), output_bytes=8) for n in range(4)], trained=[0, 0, 0, weights])
    cfg = options_of(["partition=profile", "replicas=auto", "batch_size=12", "microbatches=12", *words])
    draft = Draft.from_settings(Settings.composed(cfg, "1f1b", ranks), schedule)
    times = replace(table.times, s_per_byte=s_per_byte)
    estimated = estimate_model(draft.settings, list(table.layers), table.inputs, Samples.of([12] * 4, [1]))
    return make_plan(draft, estimated, times)


def test_a_run_takes_the_replicas_with_which_its_schedule_is_fastest():
    """Its last layer is worth a third rank of its own where its weights are dear to sum up."""
    light, heavy = auto(one_f_one_b, 8), auto(one_f_one_b, 60_000)
    assert (light.placement, light.cuts, light.settings.replicas) == ([(0, 1, 2)], [], [3])
    assert (heavy.placement, heavy.cuts, heavy.settings.replicas) == ([(0, 1), (2,)], [3], [2, 1])
    for plan in (light, heavy):
        run = plan.timeline()
        assert plan.ways["chosen"].batch_s == run.makespan / max(plan.windows)  # by the same simulator
        assert plan.ways["chosen"] == min(plan.ways.values(), key=lambda way: way.batch_s)
    reduce_s = 4 * 2 / 3 * 60_000 * 1e-3
    parallel = Way([3], [], pytest.approx(4 * 4 * 3 + reduce_s), "all-reduce of stage 0")
    assert heavy.ways["data parallel"] == parallel
    assert heavy.ways["straight pipeline"].replicas == [1, 1, 1]
    assert heavy.ways["chosen"].bound == "compute of stage 0"
    text = describe(heavy)
    for row in (r"data parallel +3 +\[\] +\d+\.00 +all-reduce of stage 0", r"chosen +2-1 +\[3\] +\d+\.\d\d "):
        assert re.search(row, text)


def test_the_way_that_is_taken_is_planned_once(monkeypatch):
    proven: list[list[int]] = []
    verify = making.verify
    monkeypatch.setattr(
        making, "verify", lambda draft, *how: proven.append(draft.settings.replicas) or verify(draft, *how)
    )
    taken = auto(one_f_one_b, 60_000).settings.replicas
    assert (taken, proven.count(taken), len(proven) > 2) == ([2, 1], 1, True)


def test_what_a_schedule_or_the_memory_cannot_have_is_left_out():
    """Three replicas need three microbatches; a limit is that of stages which recompute."""
    few = auto(one_f_one_b, 8, "batch_size=2", "microbatches=2")
    assert few.ways["data parallel"] is None
    assert "cannot be here" in describe(few)
    assert max(map(len, few.placement)) <= 2
    one = auto(pipedream, 60_000, "microbatches=1", "batch_size=1")  # each backward waits for the sum before
    assert (one.ways["data parallel"], one.ways["chosen"].replicas) == (None, [1, 1, 1])
    with pytest.raises(ConfigError, match="memory_limit=1e-09 is too small"):
        auto(one_f_one_b, 8, "memory_limit=1e-9")


def test_replicas_are_chosen_where_no_stage_for_each_rank_can_be():
    """On seven ranks are more stages than the four layers, and than microbatches, which 2BW must have."""
    plan = auto(one_f_one_b, 8, ranks=7)
    assert (plan.ways["straight pipeline"], sum(plan.settings.replicas)) == (None, 7)
    flushed = auto(pipedream_2bw, 60_000, "batch_size=2", "microbatches=2", "window=4", ranks=4)
    assert (flushed.ways["straight pipeline"], flushed.settings.replicas) == (None, [3, 1])
    by_model = "clip_grad_norm=1", "clip_grad_norm_over=model"
    assert auto(pipedream, 8, *by_model).settings.replicas == [3]  # stages would wait for each other
    assert auto(pipedream, 60_000, by_model[0]).settings.clip_grad_norm_over == "stage"  # of two stages


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["partition=flops"], "which partition=flops does not measure: set partition=profile"),
        (["schedule=fbp"], "fbp decides its order while it runs"),
        (["stages=3"], "replicas=auto chooses the stages and their ranks: leave stages out"),
        (["placement=0-1.2"], "replicas=auto chooses the stages and their ranks: leave placement out"),
    ],
)
def test_where_replicas_cannot_be_chosen_they_are_refused(words: list[str], says: str) -> None:
    cfg = options_of(["partition=profile", "replicas=auto", *words])
    name = "fbp" if "schedule=fbp" in words else "1f1b"
    assert says in refusal(lambda: Draft.from_settings(Settings.composed(cfg, name, 3), make_schedule(cfg)))
