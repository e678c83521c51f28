"""The study of late gradients: what it recommends, what it says of the goal, and the file for the plan."""

from __future__ import annotations

from math import inf, nan
from typing import Any

from published.experiments import staleness
from published.experiments.staleness import LATE_BY_ONE, PLAIN, SYNCHRONOUS, rows_of
from published.record import Check, Findings
from published.trials import Way


def results(ends: dict[Way, float]) -> dict[str, Any]:
    """Runs of SGD that end at these accuracies, and half a point above and below."""
    spread = -0.5, 0.0, 0.0, 0.5
    return {
        "digits, GroupNorm; sgd; " + "; ".join(map(str, way)): {
            "rate": 0.1,
            "share": 0.0,
            "trials": [[0.1, 0.0, end]],
            "scores": [end + more for more in spread],
            "losses": [[2.0, 1.0 if way == SYNCHRONOUS else 0.9]] * 4,
            "every": 44,
        }
        for way, end in ends.items()
    }


CURED = Way("pipedream_2bw", 8, 1, "msnag")
FED_BACK = Way("pipedream_2bw", 8, 1, "feedback")


def test_the_way_that_loses_least_is_recommended_and_held_against_the_goal() -> None:
    for end, reached in ((98.8, True), (98.6, False)):
        ends = {SYNCHRONOUS: 99.0, PLAIN: 70.0, LATE_BY_ONE: 90.0, CURED: end}
        (check,) = Findings.of(staleness.show(results(ends))).checks
        assert check.came_back is reached
        assert "pipedream_2bw + msnag" in check.what
        assert "plain pipedream +29" in check.what


def test_an_interval_that_holds_the_goal_tells_nothing_and_a_run_that_diverged_fails() -> None:
    def came(mean: float, half: float) -> str:
        return Check.of_interval("what", "-", (-inf, 0.3), mean, half, "points").came

    assert [came(0.1, 0.1), came(0.1, 0.3), came(0.7, 0.3), came(inf, nan)] == ["yes", "not told", "no", "no"]


def test_a_gap_is_by_seed_so_what_all_runs_share_is_no_noise() -> None:
    row = rows_of(results({SYNCHRONOUS: 99.0, PLAIN: 90.0}))[1]
    assert (row.gap, staleness.half(row.gaps), row.reached) == (9.0, 0.0, 88)


def test_the_plan_s_file_has_what_a_user_can_choose_and_2bw_at_each_depth() -> None:
    ends = {SYNCHRONOUS: 99.0, PLAIN: 90.0, FED_BACK: 99.0, CURED: 98.0}
    assert staleness.advice_csv(rows_of(results(ends))).splitlines() == [
        "optimizer,schedule,stages,correction,task,metric,gap,half",
        'sgd,pipedream,8,none,"digits, GroupNorm",accuracy,9.0000,0.0000',
        *(f'sgd,pipedream_2bw,{n},msnag,"digits, GroupNorm",accuracy,1.0000,0.0000' for n in (2, 4, 8)),
    ]
