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


def outcome(
    schedule: str, seed: int, values: list[float], model: str = "vgg16", name: str = "acc"
) -> Outcome:
    metric = {"name": name, "higher": name == "acc", "percent": name == "acc"}
    epochs = [float(epoch) for epoch in range(1, len(values) + 1)]
    curves = {"epoch": epochs, f"val_{name}": values, "elapsed_s": [10 * epoch for epoch in epochs]}
    summary: dict[str, Any] = {
        "model": model,
        "data": "digits",
        "metrics": [metric],
        f"val_{name}": values[-1],
    }
    return Outcome(Spec(of_schedule(schedule), seed, model, (), 2), 1.0, summary, curves)


CASES = {
    "two models and other epochs": [
        *(outcome(s, k, [0.3, 0.9, 0.97 - k / 100]) for s in ("gpipe", "1f1b") for k in range(3)),
        outcome("gpipe", 3, [0.3, 0.8], "mlp"),
        outcome("1f1b", 0, [0.1]),
    ],
    "errors that are infinite or no number": [
        *(outcome("gpipe", seed, [5.0, 4.0, 0.25], name="mse") for seed in range(2)),
        *(outcome("1f1b", seed, [9.0, v, 3.0], name="mse") for seed, v in enumerate([np.inf, np.nan])),
    ],
    "odd names, all right and all wrong": [outcome(r"$\frac$", 0, [0.0]), outcome("50 % & <b>", 0, [1.0])],
}


def draw(out: Path, outcomes: list[Outcome]) -> list[str]:
    methods = list(dict.fromkeys(outcome.spec.method.name for outcome in outcomes))
    return plots.write(out, methods, make_rows(outcomes))


@pytest.mark.slow
@pytest.mark.parametrize("outcomes", CASES.values(), ids=CASES.keys())
@pytest.mark.filterwarnings("error")
def test_every_comparison_can_be_drawn_and_shows_each_method(tmp_path, outcomes):
    names = draw(tmp_path, outcomes)
    title = metric_of([outcomes[0].summary or {}]).title.replace(" ", "_")
    assert names == [f"{title}_epoch.png", f"{title}_seconds.png"]
    for name in names:
        image = matplotlib.image.imread(tmp_path / name)
        for colour in plots.COLOURS[:2]:
            wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
            assert (np.abs(image[:, :, :3] - wanted).max(axis=2) < 0.01).sum() > 20


def test_curves_can_be_told_apart_without_colours():
    names = [f"s{i}" for i in range(7)]
    rows = make_rows([outcome(name, 0, [0.9751, 0.97512, 0.97513] * 4) for name in names])
    (axes,) = plots.draw(by_model(rows), names, "epoch").axes
    assert len({line.get_marker() for line in axes.lines}) == 7
    assert len({repr(line._unscaled_dash_pattern) for line in axes.lines}) == 7
    widths = [line.get_linewidth() for line in axes.lines]
    assert widths == sorted(widths, reverse=True) != [widths[0]] * 7
    low, high = axes.get_ylim()
    assert high - low >= 1.0  # not a hundredth of a percent as tall as the picture


@pytest.mark.parametrize(
    ("values", "scale"), [([900.0, 30.0, 7.5], "log"), ([0.004, 0.00399, 0.00398], "linear")]
)
def test_an_axis_of_numbers_is_logarithmic_where_they_span_decades(values, scale):
    rows = make_rows([outcome("gpipe", 0, values, name="mse")])
    figure = plots.draw(by_model(rows), ["gpipe"], "epoch")
    figure.canvas.draw()
    (axes,) = figure.axes
    assert (axes.get_yscale(), axes.get_ylabel()) == (scale, "test squared error")
    low, high = axes.get_ylim()
    assert low < min(values) < max(values) < high
    ticks = [label.get_text() for label in axes.get_yticklabels()]
    assert len({float(tick) for tick in ticks}) >= 3  # plain numbers
