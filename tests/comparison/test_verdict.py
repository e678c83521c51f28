"""The verdict: what it says of figures whose meaning is plain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from comparison.runs import Outcome
from comparison.table import make_rows
from comparison.verdict import noise, verdict
from tests.comparison.test_table import PPL, outcome

NAN, INF = float("nan"), float("inf")


def runs(method: str, epoch_s: float | list[float], *accuracies: float) -> list[Outcome]:
    seconds = epoch_s if isinstance(epoch_s, list) else [epoch_s] * len(accuracies)
    return [
        outcome(method, seed, best_val_acc=a, val_acc=a, best_epoch=1, epoch_s=s)
        for seed, (a, s) in enumerate(zip(accuracies, seconds, strict=True))
    ]


def texts(method: str, epoch_s: float, *perplexities: float) -> list[Outcome]:
    return [
        outcome(method, seed, **PPL, val_ppl=ppl, best_val_ppl=ppl, epoch_s=epoch_s)
        for seed, ppl in enumerate(perplexities)
    ]


FIRST = runs("layer_dist", 20, 0.9)
IN = "After the last epoch, in accuracy (higher is better),"
FEW = "(too few seeds to say what of it is noise)"
SAID = {
    "faster and worse, and another is better": (
        [runs(*of) for of in (("a", 20, 0.90, 0.901), ("b", 10, 0.80, 0.801), ("c", 15, 0.95, 0.951))],
        f"""b was the fastest, 2.00 times as fast as a (10s against 20s an epoch of training; too few seeds to
        say what of it is noise). {IN} a stands at 90.05 %; b at 80.05 %, 10.00 points below, which is
        more than noise (±0.44 at 95 %); c (the best) at 95.05 %, 5.00 points above, which is more than
        noise (±0.44 at 95 %).""",
    ),
    "a tie": (
        [FIRST, runs("fbp", 19.5, 0.85)],
        f"""no method was faster than layer_dist by more than five percent; the fastest was fbp. {IN}
        layer_dist stands at 90.00 %; fbp at 85.00 %, 5.00 points below {FEW}.""",
    ),
    # The pair of an earlier comparison, of two seeds each, which was called 1.64 times as fast.
    "a speed is noise as long as its interval holds zero": (
        [runs("layer_dist", [1.39, 1.71], 0.9, 0.9), runs("fbp", [0.75, 1.13], 0.9, 0.9)],
        f"""no method was measurably faster than layer_dist: fbp took 0.94s against 1.5s an epoch of training,
        a difference within the noise (±1.1s at 95 %). {IN} layer_dist stands at 90.00 %; fbp at 90.00 %,
        the same {FEW}.""",
    ),
    "of perplexities the lowest is the best, and what is no number the worst": (
        [
            texts("layer_dist", 20, 12.3, 12.4, 12.5),
            texts("fbp", 10, 12.8, NAN, 13.0),
            texts("1f1b", 15, 11.9, 12.0, 12.1),
            texts("gpipe", 15, INF),
        ],
        """fbp was the fastest, 2.00 times as fast as layer_dist (10s against 20s an epoch of training; too
        few seeds to say what of it is noise). After the last epoch, in perplexity (lower is better),
        layer_dist stands at 12.40; fbp at nan, which cannot be compared; 1f1b (the best) at 12.00, 0.40
        below, which is more than noise (±0.32 at 95 %).""",
    ),
}


@pytest.mark.parametrize(("groups", "text"), SAID.values(), ids=SAID)
def test_a_verdict(groups, text):
    outcomes = [one for group in groups for one in group]
    assert verdict(make_rows(outcomes), 0, 0, 6) == [f"vgg16 on cifar10: {' '.join(text.split())}"]


def test_what_is_missing_is_said():
    failed, fbp = [outcome("layer_dist", 0)], runs("fbp", 10, 0.9)

    def said(*outcomes: Outcome) -> list[str]:
        return verdict(make_rows(outcomes), 1, 2, 6)

    assert said(*failed) == [
        "vgg16: no run finished.",
        "1 of 6 runs failed, so what stands here is of the others.",
        "The comparison is not finished: 2 of 6 runs are not made yet.",
    ]
    assert (
        "no run of layer_dist finished, so there is nothing to measure the others" in said(*failed, *fbp)[0]
    )
    assert "only fbp finished" in said(*fbp, outcome("gpipe", 0))[0]


def test_other_programs_beside_the_runs_are_said():
    quiet, busy = runs("gpipe", 10, 0.9), [replace(one, others=1.53) for one in runs("fbp", 10, 0.9, 0.9)]
    assert verdict(make_rows([*quiet, *busy]), 0, 0, 3)[-1] == (
        "Other programs ran beside 2 of 3 runs and make their times uncertain: they kept 1.5 cores busy at "
        f"most, during {busy[0].spec.title}."
    )
    assert len(verdict(make_rows(quiet), 0, 0, 3)) == 1


def row(deviation: float, n: int) -> list[float]:
    """The accuracies of n seeds that have this sample deviation, in percent."""
    half = deviation * ((n - 1) / (2 * (n // 2))) ** 0.5
    return [50 - half] * (n // 2) + [50.0] * (n % 2) + [50 + half] * (n // 2)


def test_welch_s_interval():
    # Equal deviations and numbers: n1 + n2 - 2 degrees of freedom. From a printed table of Student's t.
    three = row(1.0, 3)
    assert noise(three, three) == pytest.approx(2.776 * (2 / 3) ** 0.5, rel=1e-3)
    assert noise(row(1.0, 31), row(1.0, 31)) == pytest.approx(2.000 * (2 / 31) ** 0.5, rel=1e-3)
    assert noise(row(1.0, 2), row(0.0, 5)) == pytest.approx(12.706 * 0.5**0.5, rel=1e-3)
    assert noise(three, three, compared=5) == pytest.approx(4.604 * (2 / 3) ** 0.5, rel=1e-3)
    assert noise(row(0.0, 3), row(0.0, 3)) is None
    assert noise(three, [50.0]) is None
