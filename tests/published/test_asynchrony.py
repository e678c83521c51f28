"""The map of late gradients: times and memory by hand, who may take part, and claims that can fail."""

from __future__ import annotations

from typing import Any

import pytest

from published.experiments.asynchrony import HYBRID, PLAIN, TWO_RUNS, Cell, checked, show, until
from published.record import Findings
from published.update_times import CASES, EXACT, LATE, Case, simulated

STILL = str(Case())
WAYS = {"pipedream_2bw": (1.25, 0.4), "pipedream_2bw, plain": (2.0, 0.0), "pipedream": (1.0, 0.2)}
NEEDED = {
    name: {"a task": {"more": more, "low": more - 0.1, "high": more + 0.1, "share": share}}
    for name, (more, share) in (*WAYS.items(), ("pipedream, plain", (1.0, 0.0)))
}


def cell(stages: int, pieces: int, heavy: float = 1.0) -> Cell:
    results = simulated(stages, [pieces], [STILL])[str(pieces)]
    return Cell(stages, pieces, STILL, heavy, results, NEEDED)


def test_times_of_an_update_are_those_of_the_formulas() -> None:
    """Of 8 stages and 8 microbatches: 8 + 7 for 1f1b, a third of its bubble for zb_h1, none for 2BW."""
    of = cell(8, 8)
    times = {name: [first for (first,) in of.results[name]["times"][STILL]] for name in of.results}
    assert times["1f1b"] == [15 / 8, 15 / 8]
    assert times["zb_h1"] == pytest.approx([31 / 24, 31 / 24], abs=1e-4)
    assert times["pipedream_2bw"] == [15 / 8, 1.0]


def test_hybrid_drains_in_its_share_and_loses_to_zb_h1() -> None:
    of = cell(8, 8)
    assert of.late(HYBRID, 0.4) == pytest.approx([0.4 * 15 / 8 + 0.6])
    assert of.late(TWO_RUNS, 0.4) == pytest.approx([0.4 * 31 / 24 + 0.6], abs=1e-4)
    assert (of.late(PLAIN, 0.0), of.exact()[0]) == ([1.0], "zb_h1")
    assert of.to_loss() == pytest.approx(31 / 24 / 1.35 / 1.25, abs=1e-3)
    assert str(of) == "0.77 zb_h1"


def test_an_exact_schedule_may_hold_no_more_than_the_late_one() -> None:
    """2BW holds a version, a prediction and a step more: 3 weights; zb_h2 3 microbatches of 4 more of 16."""
    light, heavy = cell(4, 8, 1.0), cell(4, 8, 16.0)
    assert light.held("1f1b") == 3 + 4 / 8
    assert light.held("pipedream_2bw") == 3 + 1 + 1 + 1 + 4 / 8
    assert heavy.held("zb_h2") > heavy.held("pipedream_2bw") > heavy.held("zbv")
    assert (light.exact()[0], heavy.exact()[0]) == ("zb_h2", "zbv")


def test_fewer_microbatches_than_stages_leave_pipedream() -> None:
    few = cell(4, 1)
    assert few.late(PLAIN, 0.0) == [1.0]
    assert few.gain() > 1
    assert str(few).endswith("pipedream")


def test_halves_of_a_backward_take_two_forwards_and_jitter_keeps_the_mean() -> None:
    from random import Random

    from pipetrain.schedule.actions import Action, Op

    cost = Case(halves=2.0).cost(1, Random(0))
    assert (cost(Action(0, Op.I)), cost(Action(0, Op.W))) == pytest.approx((4 / 3, 2 / 3))
    shaken = Case(0.1, 0.3).cost(2, Random(0))
    drawn = [shaken(Action(0, Op.F)) for _ in range(4000)]
    mean = sum(drawn) / len(drawn)
    assert mean == pytest.approx(0.5, rel=0.02)
    assert (sum((of - mean) ** 2 for of in drawn) / len(drawn)) ** 0.5 / mean == pytest.approx(0.3, rel=0.05)
    assert shaken(Action(0, Op.SEND_F)) == 0.1


def test_a_loss_is_reached_between_points() -> None:
    assert until({10: 3.0, 20: 2.0, 30: 1.0}, 1.5) == 25
    assert until({10: 3.0, 20: 2.0}, 3.5) == 10
    with pytest.raises(ValueError, match="not reached"):
        until({10: 3.0}, 1.0)


def made(late: float) -> dict[str, Any]:
    """Results of two numbers of stages in all cases, where late schedules take so many times as long."""
    results: dict[str, Any] = {"updates": NEEDED}
    for stages in (2, 4):
        of = {
            str(pieces): {
                name: {
                    "held": [1, 2],
                    "times": {case: [[late if name in LATE else 1.0]] * 2 for case in CASES},
                }
                for name in (*EXACT, "pipedream_2bw" if pieces >= stages else "pipedream")
            }
            for pieces in (1, 2, 4)
        }
        results[f"stages {stages}"] = of
    return results


def test_each_claim_comes_back_and_fails_by_the_times() -> None:
    fast, slow = (Findings.of(show(made(late))) for late in (0.1, 10.0))
    assert all(check.came_back for check in fast.checks)
    assert not any(check.came_back for check in slow.checks)
    assert len(fast.checks) == len(slow.checks) == 12
    assert "1 of 1" not in fast.checks[0].here


def test_a_claim_without_cells_is_not_made() -> None:
    assert [*checked({STILL: []})] == []
