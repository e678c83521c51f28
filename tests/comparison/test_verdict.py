"""The verdict: what it says of figures whose meaning is plain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from comparison.runs import Outcome
from comparison.table import Row, make_rows
from comparison.verdict import noise, verdict
from tests.comparison.test_table import outcome


def runs(method: str, epoch_s: float, *accuracies: float, **more: float) -> list[Outcome]:
    return [
        outcome(method, seed, best_val_acc=a, val_acc=a, best_epoch=1, epoch_s=epoch_s, **more)
        for seed, a in enumerate(accuracies)
    ]


def said(*groups: list[Outcome]) -> str:
    return " ".join(verdict(make_rows([o for group in groups for o in group]), 0, 0, 6))


def test_faster_and_within_the_noise():
    first, fast = runs("layer_dist", 20, 0.90, 0.91, 0.92), runs("fbp", 10, 0.90, 0.905, 0.91)
    assert said(first, fast) == (
        "vgg16 on cifar10: fbp was the fastest, 2.00 times as fast as layer_dist (10s against 20s an epoch "
        "of training; too few seeds to say what of it is noise). After the last epoch fbp stands at 90.50 %, "
        "0.50 points below layer_dist, which is within the noise (±2.08 at 95 %)."
    )


def test_faster_and_worse_and_another_is_better():
    first, fast = runs("layer_dist", 20, 0.90, 0.901), runs("fbp", 10, 0.80, 0.801)
    best = runs("1f1b", 15, 0.95, 0.951)
    text = said(first, fast, best)
    assert "10.00 points below layer_dist, which is more than noise (±0.44 at 95 %)." in text
    assert "The most accurate, 1f1b, has 95.05 %, 5.00 points above layer_dist, which is more" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (20.0, "vgg16 on cifar10: no method was faster than layer_dist."),
        (
            19.5,
            "vgg16 on cifar10: no method was faster than layer_dist by more than five percent; the fastest "
            "was fbp. After the last epoch fbp stands at 85.00 %, 5.00 points below layer_dist (too few "
            "seeds to say what of it is noise).",
        ),
    ],
)
def test_a_tie_is_called_one_and_whose_accuracy_it_is_is_said(seconds, text):
    assert said(runs("layer_dist", 20, 0.9), runs("fbp", seconds, 0.85)) == text


@pytest.mark.parametrize("accuracies", [[0.8], [0.8, 0.8]])
@pytest.mark.parametrize("others", [[0.9], [0.9, 0.9], [0.9, 0.9, 0.9]])
def test_one_seed_or_equal_ones_say_nothing_of_noise(others, accuracies):
    text = said(runs("layer_dist", 20, *others), runs("fbp", 10, *accuracies))
    assert "10.00 points below layer_dist (too few seeds to say what of it is noise)." in text


@pytest.mark.parametrize("failed", [0, 1])
def test_a_failed_method_is_of_the_same_model_where_only_an_override_names_it(failed):
    groups = [runs(method, 10, 0.9) for method in ("layer_dist", "gpipe", "fbp")]
    groups[failed] = [outcome(groups[failed][0].spec.method.name, 0)]
    for group in groups:
        group[0] = replace(group[0], spec=replace(group[0].spec, model=None))
    assert (
        said(*groups)
        == (
            "vgg16 on cifar10: no run of layer_dist finished, so there is nothing to measure the others by.",
            "vgg16 on cifar10: no method was faster than layer_dist.",
        )[failed]
    )


def test_who_sent_the_least_is_named():
    first = runs("layer_dist", 20, 0.9, bytes_per_epoch=4e8)
    text = said(first, runs("fbp + int8", 10, 0.9, bytes_per_epoch=1e8))
    assert "fbp + int8 sent the least: 25.0% of the bytes of layer_dist." in text


def test_and_what_that_costs():
    first = runs("layer_dist", 20, 0.9, 0.91, bytes_per_epoch=4e8)
    fastest = runs("fbp", 10, 0.9, 0.91, bytes_per_epoch=4e8)
    text = said(first, fastest, runs("fbp + topk", 11, 0.6, 0.61, bytes_per_epoch=1e8))
    assert "layer_dist. It ends at 60.50 %, 30.00 points below layer_dist, which is more than noise" in text


def test_what_is_missing_is_said():
    failed = [outcome("layer_dist", 0)]
    assert "vgg16: no run finished." in said(failed)
    text = said(failed, runs("fbp", 10, 0.9))
    assert "no run of layer_dist finished, so there is nothing to measure the others by." in text
    assert "only fbp finished" in said(runs("fbp", 10, 0.9), [outcome("gpipe", 0)])
    rows = make_rows(failed)
    assert verdict(rows, 1, 2, 6)[1:] == [
        "1 of 6 runs failed, so what stands here is of the others.",
        "The comparison is not finished: 2 of 6 runs are not made yet.",
    ]


def timed(method: str, *seconds: float) -> list[Outcome]:
    return [run for s, one in enumerate(seconds) for run in runs(method, one, *[0.9] * (s + 1))[-1:]]


def test_a_speed_is_noise_as_long_as_its_interval_holds_zero():
    """The pair of an earlier comparison: 0.94 and 1.55 s an epoch, two seeds each."""
    noisy = said(timed("layer_dist", 1.39, 1.71), timed("fbp", 0.75, 1.13))
    assert "fbp was the fastest, 1.65 times as fast as layer_dist" in noisy
    assert "(0.94s against 1.5s an epoch of training; within the noise of ±1.1s" in noisy
    assert "; more than noise of ±" in said(
        timed("layer_dist", 2.0, 2.01, 2.02), timed("fbp", 1.0, 1.01, 1.02)
    )


def row(deviation: float | None, n: int) -> Row:
    (made,) = make_rows(runs("a", 1.0, 0.9))
    return replace(made, last_dev=deviation, finished=n)


def test_welch_s_interval():
    # Equal deviations and numbers: n1 + n2 - 2 degrees of freedom. From a printed table of Student's t.
    assert noise(row(1.0, 3), row(1.0, 3)) == pytest.approx(2.776 * (2 / 3) ** 0.5, rel=1e-3)
    assert noise(row(1.0, 31), row(1.0, 31)) == pytest.approx(2.000 * (2 / 31) ** 0.5, rel=1e-3)
    assert noise(row(1.0, 2), row(0.0, 5)) == pytest.approx(12.706 * 0.5**0.5, rel=1e-3)
    assert noise(row(1.0, 3), row(1.0, 3), compared=5) == pytest.approx(4.604 * (2 / 3) ** 0.5, rel=1e-3)
    assert noise(row(0.0, 3), row(0.0, 3)) is None
    assert noise(row(None, 1), row(1.0, 3)) is None
