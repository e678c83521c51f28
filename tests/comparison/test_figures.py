"""The metric: what a run says of it, which values are better, and how they are written."""

from __future__ import annotations

from math import inf, nan

import pytest

from comparison.figures import ACCURACY, LOSS, Metric, duration, metric_of, size

PPL = Metric("ppl", higher=False, percent=False)


def test_the_first_metric_is_compared_and_the_loss_without_any():
    known = [
        {"name": "ppl", "higher": False, "percent": False},
        {"name": "acc", "higher": True, "percent": True},
    ]
    assert metric_of([{"metrics": known}, {}]) == PPL
    assert metric_of([{"metrics": []}]) == LOSS
    assert metric_of([]) == ACCURACY


def test_the_best_value_is_the_highest_or_the_lowest_and_never_nan():
    values = [3.0, nan, 2.0, inf]
    assert max(values, key=PPL.worth) == 2.0
    assert max(values[:3], key=ACCURACY.worth) == 3.0


def test_a_percentage_is_recorded_as_a_fraction():
    assert ACCURACY.value({"val_acc": 0.5, "best_val_acc": 0.75}, "best_val") == 75.0
    assert PPL.value({"val_ppl": 0.5}, "val") == 0.5


@pytest.mark.parametrize(
    ("value", "level", "text"),
    [
        (12.3456, None, "12.35"),
        (0.0042137, None, "0.004214"),
        (0.0000312, 0.0042137, "0.000031"),
        (12345.6, None, "12346"),
        (0.0, None, "0.00"),
        (inf, None, "inf"),
        (nan, 12.0, "nan"),
        (0.5, inf, "0.50"),
    ],
)
def test_numbers_have_four_digits_and_what_stands_beside_them_as_many_decimals(value, level, text):
    assert PPL.number(value, level) == text


def test_names_in_sentences_and_files():
    miou = Metric("miou", higher=True, percent=True)
    assert (miou.title, miou.heading, miou.slug) == ("mean IoU", "Mean IoU", "mean_iou")
    assert (Metric("a/b", True, False).slug, ACCURACY.slug) == ("a_b", "accuracy")
    assert (miou.text(86.0), PPL.text(86.0)) == ("86.00 %", "86.00")


def test_bytes_and_durations_are_written_to_two_or_three_places():
    assert [size(n) for n in (0, 999, 3.07e6, 999.6e6, 2e3)] == ["0 B", "999 B", "3.07 MB", "1 GB", "2 kB"]
    written = {
        0.04: "0.0s",
        8.26: "8.3s",
        9.96: "10s",
        21.2: "21s",
        59.6: "1m00s",
        156: "2m36s",
        3725: "1h02m",
    }
    assert {seconds: duration(seconds) for seconds in written} == written
