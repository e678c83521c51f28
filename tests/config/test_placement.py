"""What stages=, replicas= and placement= say together, and how many processes they need."""

from __future__ import annotations

from typing import Any

import pytest

from pipetrain.config.placement import PLACEMENT, REPLICAS, places_of, processes, spans
from pipetrain.errors import ConfigError
from tests.support.refusals import refusal


@pytest.mark.parametrize(
    ("value", "places", "written"),
    [
        ("0-6.7", [(0, 1, 2, 3, 4, 5, 6), (7,)], "0-6.7"),
        ("0-1.0-1", [(0, 1), (0, 1)], "0-1.0-1"),
        (0.1, [(0,), (1,)], "0.1"),
        ([[0, 2], [1]], [(0, 2), (1,)], "0 2.1"),
        ("0", [(0,)], "0"),
    ],
)
def test_a_placement_is_written_as_its_record_does_or_in_lists(value: Any, places: Any, written: str) -> None:
    assert PLACEMENT.read("placement", value) == places
    assert spans(places) == written


@pytest.mark.parametrize("value", ["1-2.3", "0-1.3", "0--1", "a", "", [], [[]], [[0], [2]], [[0.5]], True])
def test_a_placement_with_a_gap_or_none_at_all_is_refused(value: Any) -> None:
    assert "must be the ranks of each stage" in refusal(lambda: PLACEMENT.read("placement", value))


def test_replicas_are_a_number_or_one_for_each_stage() -> None:
    assert REPLICAS.read("replicas", 2) == 2
    assert REPLICAS.read("replicas", [7, 1]) == [7, 1]
    assert REPLICAS.read("replicas", "auto") == "auto"
    for value in (0, [], [2, 0], "x", 1.5, True):
        assert "must be the number of replicas" in refusal(lambda: REPLICAS.read("replicas", value))  # noqa: B023
    assert places_of(2, 6) == [(0, 1), (2, 3), (4, 5)]
    assert places_of([1, 2], 3) == [(0,), (1, 2)]


@pytest.mark.parametrize(
    ("stages", "replicas", "placement", "started", "needed"),
    [
        (None, None, None, None, 2),
        (3, None, None, None, 3),
        (None, 2, None, None, 4),
        (3, 2, None, None, 6),
        (None, 2, None, 6, 6),
        (None, [7, 1], None, None, 8),
        (2, None, [(0, 1), (0, 1)], 2, 2),
        (None, None, None, 5, 5),
        (None, "auto", None, 5, 5),
    ],
)
def test_they_say_how_many_processes_there_are_to_be(
    stages: Any, replicas: Any, placement: Any, started: Any, needed: int
) -> None:
    assert processes(stages, replicas, placement, started) == needed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((3, None, None, 2), "stages=3 needs 3 processes and there are 2; start 3"),
        ((None, 2, None, 3), "replicas=2 needs 2 processes and there are 3"),
        ((3, 2, None, 4), "stages=3 and replicas=2 needs 6 processes and there are 4"),
        ((None, [7, 1], None, 2), "replicas=[7,1] needs 8 processes and there are 2; start 8"),
        ((None, None, [(0, 1), (2,)], 2), "placement=0-1.2 needs 3 processes and there are 2"),
        ((3, [2, 1], None, None), "replicas=[2,1] has 2 stages, and stages=3"),
        ((None, 2, [(0,)], None), "placement= says what replicas= does"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(arguments: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        processes(*arguments)
    assert says in str(refused.value)
