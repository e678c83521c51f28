"""What races beside torchgpipe say, and why one does not: bounds as published, balances of smaller models."""

from __future__ import annotations

from typing import Any

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
    assert [check.came_back for check in found.checks] == [True, True, False]
    assert [line.name for line in forwards_chart(race, [1]).lines][1::2] == [
        "ours, forwards",
        "torchgpipe, forwards",
    ]
    failed = Race({"pipeline-1": OURS, "torchgpipe-1": {"failure": "no module"}})
    found = Findings.of(held_against(failed, {"pipeline-1": "torchgpipe-1"}))
    assert not found.series
    assert [check.came_back for check in found.checks if "no module" in check.here] == [None, None]
    assert len(forwards_chart(failed, [1]).lines) == 2


def raced(*names: str) -> dict[str, Any]:
    return {name: {**OURS, "seconds": [2.0, 2.0, 2.0], "losses": [0.9]} for name in names}


def planned(seconds: float) -> dict[str, Any]:
    of = {"seconds": seconds, "layers": 241, "parameters": 232_687_328, "routes": [[0, 1, 4], [0, 7, 8]]}
    return dict.fromkeys(("naive", "logged", "1", "2", "4", "8"), of)


def both(*names: str) -> list[str]:
    return [f"{who}-{name}" for name in names for who in ("pipeline", "torchgpipe")]


def test_the_records_of_torchgpipe_print_its_samples_per_s_beside_ours() -> None:
    version = {"naive-1": 59.0, "1": 80.0, "2": 1200.0, "4": 100.0, "8": 50.0}
    plans = {"layers": 370, "parameters": 44_549_160, "run": version, "0.0.7": version, "0.0.3": version}
    race = raced("naive-1", "naive-1, one batch", *both("1", "2"))
    resnet = Findings.of(torchgpipe_resnet101.show({"plans": plans, "race": race}))
    results = {"paper": planned(40.0), "narrow": planned(20.0), "race": raced(*both("1", "2", "4"))}
    unet = Findings.of(torchgpipe_unet.show(results))
    rates = {str(k): {str(m): float(k * m) for m in (1, 4, 32)} for k in (2, 4, 8)}
    race = raced(*both(*(f"2, m = {m}" for m in (1, 4, 16))))
    results = {"narrow": rates, "race": {"counts": [1, 4, 16], "samples": 2, "race": race}}
    amoebanet = Findings.of(torchgpipe_amoebanet.show(results))
    printed = [
        {
            (of.how, place): (here, of.published.get(place))
            for of in found.series
            if of.unit == "samples/s"
            for place, here in of.here.items()
        }
        for found in (resnet, unet, amoebanet)
    ]
    assert printed[0][How.RUN, "pipeline-2"] == (8 / 2.0, 135.539)
    assert printed[0][How.PLANNED, "naive-1"] == (2.0, 92.539)
    assert printed[1][How.RUN, "pipeline-4"] == (8 / 2.0, 67.042)
    assert printed[1][How.PLANNED, "pipeline-8"] == (40 / 20.0, 88.497)
    assert printed[2][How.PLANNED, 32] == (8 * 32.0, 132.413)
    assert printed[2][How.RUN, 4] == (2 * 4 / 2.0, 41.133)
    (log,) = [of for of in unet.series if of.name == "speed-up by work" and of.of == "pipeline-8"]
    assert log.here == {"its command, m = 40": 1.0, "its log, m = 8": 0.2}
    assert log.bound["its log, m = 8"] == pytest.approx(3 * 8 * 8 / (4 * 15 - 8))
