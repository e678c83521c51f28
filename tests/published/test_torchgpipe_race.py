"""What races beside torchgpipe say, and why one does not: bounds as published, balances of smaller models."""

from __future__ import annotations

import pytest

from published.experiments import torchgpipe_amoebanet, torchgpipe_resnet101, torchgpipe_unet
from published.measures import Race
from published.record import Findings, How
from published.torchgpipe_race import bound, forwards_chart, held_against, samples_per_s, scaled, speedup

OURS = {"seconds": [2.0, 2.0], "forwards": [0.5, 0.7], "peaks": [1 << 20, 3 << 20], "failure": ""}
THEIRS = {"seconds": [3.0, 4.0], "forwards": [0.6, 0.6], "peaks": [2 << 20], "failure": ""}


def test_the_bound_is_the_published_one() -> None:
    assert [bound(*sizes) for sizes in ((1, 1), (2, 256), (4, 256), (8, 64))] == pytest.approx(
        [0.75, 1.494, 2.965, 5.408], abs=1e-3
    )


def test_speed_ups_are_those_of_the_published_samples_per_s() -> None:
    """As the tables have them, but for AmoebaNet-D's README, whose speed-ups are not of its samples/s."""
    resnet = torchgpipe_resnet101.RECORD_OF, torchgpipe_resnet101.NAIVES
    new, old = (speedup("", "", resnet[0][of], resnet[1][of], {}).published for of in ("0.0.7", "0.0.3"))
    unet = speedup("", "", torchgpipe_unet.RECORD_OF, torchgpipe_unet.NAIVE_S, {}).published
    assert [*new.values()] == [0.853, 1.414, 2.774, 4.294]
    assert [*old.values()] == [0.756, 1.489, 2.629, 4.367]
    assert [*unet.values()] == [0.858, 1.246, 2.352, 3.105]
    speeds = torchgpipe_amoebanet.SPEED
    assert [*speeds[2].values()] == [1.0, 1.539, 1.773]
    assert [*speeds[4].values()] == [1.004, 1.666, 2.709]
    assert [*speeds[8].values()] == [0.932, 2.621, 4.953]


def test_samples_per_s_stand_beside_the_published_ones() -> None:
    rows = torchgpipe_unet.RECORD_OF
    series = samples_per_s("here", rows, 28.5, {"naive-1": 2.0, "pipeline-8": 3.0}, How.RUN)
    assert (series.here["pipeline-8"], series.published["pipeline-8"]) == (3.0, 88.497)
    assert (series.unit, series.published["naive-1"]) == ("samples/s", 28.5)


def test_a_balance_of_fewer_layers_has_as_many_stages() -> None:
    assert scaled([26, 22, 33, 44, 44, 66, 66, 69], 370) == [26, 22, 33, 44, 44, 66, 66, 69]
    assert scaled([44, 92, 124, 110], 9) == [1, 2, 3, 3]


def test_ours_is_held_against_theirs_and_where_they_fail_it_is_not_tried() -> None:
    race = Race({"pipeline-1": OURS, "torchgpipe-1": THEIRS})
    found = Findings.of(held_against(race, {"pipeline-1": "torchgpipe-1"}))
    assert [of.here["pipeline-1"] for of in found.series] == pytest.approx([1.75, 3.0, 2.0, 1.0])
    assert [check.came_back for check in found.checks] == [True, False]
    assert [line.name for line in forwards_chart(race, [1]).lines][1::2] == [
        "ours, forwards",
        "torchgpipe, forwards",
    ]
    failed = Race({"pipeline-1": OURS, "torchgpipe-1": {"failure": "no module"}})
    found = Findings.of(held_against(failed, {"pipeline-1": "torchgpipe-1"}))
    assert not found.series
    assert [check.came_back for check in found.checks if "no module" in check.here] == [None, None]
    assert len(forwards_chart(failed, [1]).lines) == 2
