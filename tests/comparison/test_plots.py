"""The pictures: they are there, they can be read, and they show the curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from comparison import plots
from comparison.figures import metric_of
from comparison.request import Spec
from comparison.runs import Outcome
from comparison.table import by_model, make_rows
from tests.comparison.support import of_schedule

ACC = {"name": "acc", "higher": True, "percent": True}


def outcome(schedule: str, seed: int, values: list[float], model: str = "vgg16", **more: Any) -> Outcome:
    summary = {"model": model, "data": "digits", "metrics": [ACC], **more}
    key = f"val_{metric_of([summary]).name}"
    epochs = [float(epoch) for epoch in range(1, len(values) + 1)]
    curves = {"epoch": epochs, key: values, "elapsed_s": [10 * epoch for epoch in epochs]}
    spec = Spec(of_schedule(schedule), seed, model, (), 2)
    return Outcome(spec, 1.0, summary | {key: values[-1]}, curves)


MSE: dict[str, Any] = {"metrics": [{"name": "mse", "higher": False, "percent": False}]}
SEEDS = [outcome(s, k, [0.3, 0.9, 0.97 - k / 100]) for s in ("gpipe", "1f1b") for k in range(3)]
CASES = {
    "two models and other epochs": [
        *SEEDS,
        outcome("gpipe", 3, [0.3, 0.8], "mlp"),
        outcome("1f1b", 0, [0.1]),
    ],
    "errors that are infinite or no number": [
        *(outcome("gpipe", seed, [5.0, 4.0, 0.25], **MSE) for seed in range(2)),
        *(outcome("1f1b", seed, [9.0, value, 3.0], **MSE) for seed, value in enumerate([np.inf, np.nan])),
    ],
    "odd names, all right and all wrong": [
        outcome(name, 0, [value, value])
        for name, value in {r"$\frac$": 0.0, "50 % & <b>": 1.0, "a$": 1.0, "gpipe": 0.5}.items()
    ],
}


def draw(out: Path, outcomes: list[Outcome]) -> list[str]:
    methods = list(dict.fromkeys(outcome.spec.method.name for outcome in outcomes))
    return plots.write(out, methods, make_rows(outcomes))


@pytest.mark.slow
@pytest.mark.parametrize("outcomes", CASES.values(), ids=CASES.keys())
@pytest.mark.filterwarnings("error")
def test_every_comparison_can_be_drawn(tmp_path, outcomes):
    names = draw(tmp_path, outcomes)
    metric = metric_of([outcomes[0].summary or {}])
    assert names == [f"{metric.slug}_epoch.png", f"{metric.slug}_seconds.png"]
    for name in names:
        image = matplotlib.image.imread(tmp_path / name)
        assert min(image.shape[:2]) > 150
        for colour in plots.COLOURS[:2]:  # of a method, in every picture
            wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
            assert (np.abs(image[:, :, :3] - wanted).max(axis=2) < 0.01).sum() > 20


def test_nothing_is_drawn_of_what_did_not_finish(tmp_path):
    assert draw(tmp_path, [Outcome(SEEDS[0].spec, 1.0, failure="status 1")]) == []
    assert list(tmp_path.iterdir()) == []


def test_curves_can_be_told_apart_without_colours_and_their_axis_is_plain():
    names = [f"s{i}" for i in range(7)]
    rows = make_rows([outcome(name, 0, [0.9751, 0.97512, 0.97513] * 4) for name in names])
    for key in ("epoch", "elapsed_s"):
        figure = plots.draw(by_model(rows), names, key)
        figure.canvas.draw()
        (axes,) = figure.axes
        assert len({line.get_marker() for line in axes.lines}) == 7
        assert len({repr(line._unscaled_dash_pattern) for line in axes.lines}) == 7
        widths = [line.get_linewidth() for line in axes.lines]
        assert (key == "epoch") == (widths == sorted(widths, reverse=True) != [widths[0]] * 7)
        ticks = [label.get_text() for label in axes.get_yticklabels()]
        assert 3 <= len(set(ticks)) == len(ticks) <= 12
        assert all(96 < float(tick.removesuffix(" %")) < 99 for tick in ticks)


@pytest.mark.parametrize(
    ("values", "scale"),
    [([900.0, 30.0, 7.5], "log"), ([9.0, 8.0, 7.5], "linear"), ([0.004, 0.00399, 0.00398], "linear")],
)
def test_an_axis_of_numbers_is_fitted_and_logarithmic_where_they_span_decades(values, scale):
    rows = make_rows([outcome("gpipe", 0, values, **MSE)])
    figure = plots.draw(by_model(rows), ["gpipe"], "epoch")
    figure.canvas.draw()
    (axes,) = figure.axes
    assert (axes.get_yscale(), axes.get_ylabel()) == (scale, "test squared error")
    low, high = axes.get_ylim()
    assert low < min(values) < max(values) < high
    assert max(values) - min(values) > 0.5 * (high - low) or scale == "log"
    ticks = {float(label.get_text()) for label in axes.get_yticklabels()}  # plain numbers, each another
    assert len(ticks) == len(axes.get_yticklabels()) >= 3
    assert not any(label.get_text() for label in axes.get_yticklabels(minor=True))
