"""The five rows of torchgpipe's table: what comes back of them, and that a wrong number does not."""

from __future__ import annotations

from typing import Any

import pytest

from pipetrain.schedule.memory import GIB
from published.experiments import torchgpipe_amoebanet_memory as record
from published.record import Findings, How

PARAMETERS = {
    "baseline": 81_505_540,
    "pipeline-1": 319_024_120,
    "pipeline-2": 542_734_840,
    "pipeline-4": 1_055_832_376,
    "pipeline-8": 1_844_858_344,
}


def results(rest: float = 0.5, off: float = 1.0) -> dict[str, Any]:
    """Plans whose devices hold beside the model `rest` of what torchgpipe published."""
    made: dict[str, Any] = {}
    for name, row in record.PUBLISHED.items():
        count, k = round(off * PARAMETERS[name]), len(row.balance)
        beside = (row.rest or 100.0) * rest * GIB
        plan = {"parameters": count, "model": [12 * count / k] * k, "peaks": [(12 * count + beside) / k] * k}
        made[name] = (
            {"never": plan} if row.rest is None else {"except_first_microbatch": plan, "always": plan}
        )
    return made | {"held 1 device, always": [[100, 101]]}


def verdict(made: dict[str, Any]) -> dict[str, bool | None]:
    return {check.what: check.came_back for check in Findings.of(record.show(made)).checks}


def test_what_torchgpipe_and_huang_published_comes_back_but_for_huang_s_baseline():
    checks = Findings.of(record.show(results())).checks
    assert [check.what for check in checks if not check.came_back] == [
        "baseline: all else, beside Huang et al."
    ]
    assert len(checks) == 1 + 4 + 4 * 5
    published = {check.what: check.published for check in checks}
    assert published["pipeline-2: all else, as it recomputes"] == "3.39 GiB"
    assert published["pipeline-8: all else, beside Huang et al."] == "26.24 GB"
    assert {check.how for check in checks if "parameters" in check.what} == {How.ARITHMETIC}


@pytest.mark.parametrize(
    ("wrong", "fails"),
    [
        (results(off=1.02), {"parameters", "weights, gradients, RMSprop"}),
        (results(rest=1.02), {"all else, as it recomputes"}),
        (results(rest=4.0), {"all else, as it recomputes", "all else, beside Huang et al.", "fits 8 GB"}),
        (results(rest=0.1), {"the whole batch at once"}),
        (results() | {"held 1 device, always": [[120, 100]]}, {"measured as planned"}),
    ],
)
def test_each_line_can_fail(wrong, fails):
    failed = {what.partition(": ")[2] for what, came in verdict(wrong).items() if came is False}
    assert fails <= failed <= fails | {"all else, beside Huang et al."}
