"""The metric: what a run says of it, which values are better, and how they are written."""

from __future__ import annotations

from math import inf, nan

from comparison.figures import ACCURACY, LOSS, Metric, duration, metric_of, size, spread

PPL = Metric("ppl", higher=False, percent=False)


def test_the_first_metric_is_compared_and_the_loss_without_any():
    known = [{"name": name, "higher": name == "acc", "percent": name == "acc"} for name in ("ppl", "acc")]
    assert metric_of([{"metrics": known}, {}]) == PPL
    assert metric_of([{"metrics": known[1:]}]) == metric_of([]) == ACCURACY
    assert metric_of([{"metrics": []}]) == LOSS


def test_the_best_value_is_the_highest_or_the_lowest_and_never_nan():
    values = [3.0, nan, 2.0, inf]
    assert max(values, key=PPL.worth) == 2.0
    assert max(values[:3], key=ACCURACY.worth) == 3.0


def test_a_percentage_is_recorded_as_a_fraction():
    assert ACCURACY.value({"val_acc": 0.5, "best_val_acc": 0.75}, "best_val") == 75.0
    assert PPL.value({"val_ppl": 0.5}, "val") == 0.5
    assert (ACCURACY.text(86.0), PPL.text(86.0)) == ("86.00 %", "86.00")


def test_numbers_have_four_digits_and_what_stands_beside_them_as_many_decimals():
    written = [PPL.number(value) for value in (12.3456, 0.0042137, 12345.6, 0.0, inf)]
    assert written == ["12.35", "0.004214", "12346", "0.00", "inf"]
    beside = [PPL.number(*each) for each in ((0.0000312, 0.0042137), (nan, 12.0), (0.5, inf))]
    assert beside == ["0.000031", "nan", "0.50"]


def test_bytes_durations_and_means_are_written_to_two_or_three_places():
    assert [size(n) for n in (0, 999, 3.07e6, 999.6e6, 2e3)] == ["0 B", "999 B", "3.07 MB", "1 GB", "2 kB"]
    written = [duration(seconds) for seconds in (0.04, 8.26, 9.96, 21.2, 59.6, 156, 3725)]
    assert written == ["0.0s", "8.3s", "10s", "21s", "1m00s", "2m36s", "1h02m"]
    assert [spread(values) for values in ([], [1.0], [1.0, 3.0], [1.0, inf])] == [
        *("-", "1.00", "2.00 ± 1.41", "inf ± nan"),
    ]
