"""The record of OneFlow's SSP: what it says of results as they may come."""

from __future__ import annotations

from typing import Any

import pytest

from published.experiments import ssp
from published.record import Findings


@pytest.mark.parametrize("came", [True, False])
def test_its_verdict_can_fail(came: bool) -> None:
    size = ssp.SIZES["vgg16"]
    ways: dict[str, Any] = {
        way: {"seconds": dict.fromkeys(map(str, ssp.SPEEDS), 2.0), "peaks": [3, 2]}
        for way in map(str, size.pieces)
    }
    ways[ssp.PARALLEL] = {
        "seconds": dict.fromkeys(map(str, ssp.SPEEDS), 3.0 if came else 1.0),
        "peaks": [4 if came else 2],
    }
    held = {"held vgg16, ssp": [(0, 2, 0), (1, 3, 0), (0, 1, 0)]}
    held["held vgg16, data parallelism"] = [(0, 4 if came else 2, 0)]
    race = {
        f"vgg16, {way}": {"seconds": [1.0], "of bound": None, "failure": ""}
        for way in (ssp.SSP, ssp.PARALLEL)
    }
    ring = ssp.versions(4 if came else 3, 7)
    results = {"versions": ring, "plan vgg16": ways, "race 2": race, **held}
    findings = Findings.of(ssp.show(results))
    assert [check.came_back for check in findings.checks] == [came] * 4 + [None]


def test_a_way_of_few_processes_has_the_record_s_stages() -> None:
    assert [ssp.ways("vgg16", 8, n)[ssp.SSP][-2] for n in (2, 4)] == ["placement=0.1", "placement=0-2.3"]
    assert ssp.ways("resnet50", 8, 2)[ssp.SSP][-2] == "placement=0-1.0-1"
