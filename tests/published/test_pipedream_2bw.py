"""The record of PipeDream-2BW: what it says of results as they may come."""

from __future__ import annotations

from typing import Any

import pytest

from published.experiments import pipedream_2bw
from published.record import Findings


def test_updates_to_a_loss_lie_between_two_epochs() -> None:
    assert pipedream_2bw.updates_to(2.5, [3.0, 2.0], 10) == 15
    assert pipedream_2bw.updates_to(3.0, [3.0, 2.0], 10) == 10


@pytest.mark.parametrize("slow", [False, True])
def test_its_verdict_can_fail(slow: bool) -> None:
    names = "1f1b", "pipedream", "pipedream_2bw", "gpipe", "torch DDP", "one process"
    gains = dict.fromkeys(names, 1.0) | dict.fromkeys(names[1:3], 1.02 if slow else 1.4)
    race = {name: {"seconds": [1 / gain], "of bound": None, "failure": ""} for name, gain in gains.items()}
    mib = {"pipedream": [8, 6, 4, 2], "pipedream_2bw": [9 if slow else 7, 6, 5, 4], "1f1b": [4, 4, 4, 4]}
    results: dict[str, Any] = {"race, GPT": race}
    for n, name in enumerate(names[:3]):
        results[f"train, GPT, {name}, 0"] = {"curves": {"val_loss": [3.0, 2.0 + n / 4]}}
        results[f"held, {name}"] = [(stage, of * 2**20, 0) for stage, of in enumerate(mib[name])]
    findings = Findings.of(pipedream_2bw.show(results))
    assert [check.came_back for check in findings.checks] == [not slow] * 9
    (updates,) = (of for of in findings.series if of.name == "to a test loss of 2.5" and of.unit == "updates")
    assert (updates.here["1f1b"], updates.here["pipedream_2bw"]) == (30, 40)
