"""The verdict: what it says of figures whose meaning is plain."""

from __future__ import annotations

import pytest

from comparison.runs import Outcome
from comparison.table import make_rows
from comparison.verdict import noise, verdict
from tests.comparison.test_table import PPL, outcome


def runs(method: str, epoch_s: float | list[float], *accuracies: float, **more: float) -> list[Outcome]:
    seconds = epoch_s if isinstance(epoch_s, list) else [epoch_s] * len(accuracies)
    return [
        outcome(method, seed, best_val_acc=a, val_acc=a, best_epoch=1, epoch_s=s, **more)
        for seed, (a, s) in enumerate(zip(accuracies, seconds, strict=True))
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
    text = said(first, fast, runs("1f1b", 15, 0.95, 0.951))
    assert "10.00 points below layer_dist, which is more than noise (±0.44 at 95 %)." in text
    assert "The most accurate, 1f1b, has 95.05 %, 5.00 points above layer_dist, which is more" in text


def test_a_tie_is_called_one_and_the_accuracy_of_the_faster_is_said():
    first = runs("layer_dist", 20, 0.9)
    assert said(first, runs("fbp", 20, 0.85)) == (
        "vgg16 on cifar10: no method was faster than layer_dist. After the last epoch layer_dist stands at "
        "90.00 %; fbp at 85.00 %, 5.00 points below layer_dist (too few seeds to say what of it is noise)."
    )
    assert said(first, runs("fbp", 19.5, 0.85)) == (
        "vgg16 on cifar10: no method was faster than layer_dist by more than five percent; the fastest was "
        "fbp. After the last epoch fbp stands at 85.00 %, 5.00 points below layer_dist (too few seeds to say "
        "what of it is noise)."
    )


def test_a_speed_is_noise_as_long_as_its_interval_holds_zero():
    """The pair of an earlier comparison, of two seeds each, which was called 1.64 times as fast."""
    noisy = said(runs("layer_dist", [1.39, 1.71], 0.9, 0.91), runs("fbp", [0.75, 1.13], 0.8, 0.81))
    assert noisy.startswith(
        "vgg16 on cifar10: no method was measurably faster than layer_dist: fbp took 0.94s against 1.5s an "
        "epoch of training, a difference within the noise (±1.1s at 95 %). After the last epoch fbp stands at"
    )
    first, fast = (
        runs("layer_dist", [2.0, 2.01, 2.02], *[0.9] * 3),
        runs("fbp", [1.0, 1.01, 1.02], *[0.9] * 3),
    )
    assert (
        "1.99 times as fast as layer_dist (1s against 2s an epoch of training; more than the noise of ±"
        in (said(first, fast))
    )


def texts(method: str, epoch_s: float, *perplexities: float) -> list[Outcome]:
    return [
        outcome(method, seed, **PPL, val_ppl=ppl, best_val_ppl=ppl, epoch_s=epoch_s)
        for seed, ppl in enumerate(perplexities)
    ]


def test_of_perplexities_the_lowest_is_the_best():
    first, fast = texts("layer_dist", 20, 12.3, 12.4, 12.5), texts("fbp", 10, 12.8, 12.9, 13.0)
    assert said(first, fast, texts("1f1b", 15, 11.9, 12.0, 12.1), texts("gpipe", 16, 99, 100, 101)) == (
        "vgg16 on cifar10: fbp was the fastest, 2.00 times as fast as layer_dist (10s against 20s an epoch "
        "of training; too few seeds to say what of it is noise). After the last epoch, in perplexity (lower "
        "is better), fbp stands at 12.90, 0.50 above layer_dist, which is more than noise (±0.32 at 95 %). "
        "The best, 1f1b, has 12.00, 0.40 below layer_dist, which is more than noise (±0.32 at 95 %)."
    )


def test_a_perplexity_that_is_no_number_is_the_worst_and_is_compared_with_nothing():
    text = said(
        texts("layer_dist", 20, 12.3), texts("fbp", 10, float("nan")), texts("1f1b", 15, float("inf"))
    )
    assert "fbp stands at nan, not to be compared with the 12.30 of layer_dist." in text
    assert "The best" not in text


@pytest.mark.parametrize("accuracies", [[0.8], [0.8, 0.8]])
def test_one_seed_or_equal_ones_say_nothing_of_noise(accuracies):
    text = said(runs("layer_dist", 20, 0.9, 0.9, 0.9), runs("fbp", 10, *accuracies))
    assert "10.00 points below layer_dist (too few seeds to say what of it is noise)." in text


def test_what_is_missing_is_said():
    failed = [outcome("layer_dist", 0)]
    assert "vgg16: no run finished." in said(failed)
    text = said(failed, runs("fbp", 10, 0.9))
    assert "no run of layer_dist finished, so there is nothing to measure the others by." in text
    assert "only fbp finished" in said(runs("fbp", 10, 0.9), [outcome("gpipe", 0)])
    assert verdict(make_rows(failed), 1, 2, 6)[1:] == [
        "1 of 6 runs failed, so what stands here is of the others.",
        "The comparison is not finished: 2 of 6 runs are not made yet.",
    ]


def row(deviation: float, n: int) -> list[float]:
    """The accuracies of n seeds that have this sample deviation, in percent."""
    half = deviation / 100 * ((n - 1) / (2 * (n // 2))) ** 0.5
    middle = [0.5] * (n % 2)
    (made,) = make_rows(runs("a", 1.0, *[0.5 - half] * (n // 2), *middle, *[0.5 + half] * (n // 2)))
    return made.last


def test_welch_s_interval():
    # Equal deviations and numbers: n1 + n2 - 2 degrees of freedom. From a printed table of Student's t.
    three = row(1.0, 3)
    assert noise(three, three) == pytest.approx(2.776 * (2 / 3) ** 0.5, rel=1e-3)
    assert noise(row(1.0, 31), row(1.0, 31)) == pytest.approx(2.000 * (2 / 31) ** 0.5, rel=1e-3)
    assert noise(row(1.0, 2), row(0.0, 5)) == pytest.approx(12.706 * 0.5**0.5, rel=1e-3)
    assert noise(three, three, compared=5) == pytest.approx(4.604 * (2 / 3) ** 0.5, rel=1e-3)
    assert noise(row(0.0, 3), row(0.0, 3)) is None
