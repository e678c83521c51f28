"""The pictures: they are there, they can be read, and they show the curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from comparison import plots
from comparison.experiment import of_schedule
from comparison.metric import ACCURACY, metric_of
from comparison.runs import Outcome, Spec
from comparison.table import by_model, make_rows
from tests.comparison.support import asked


def outcome(schedule: str, seed: int, values: list[float], model: str = "vgg16", **more: Any) -> Outcome:
    summary = {"model": model, "data": "digits", "samples_per_s": 100.0 + seed, **more}
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


def draw(out: Path, outcomes: list[Outcome]) -> list[plots.Picture]:
    methods = list(dict.fromkeys(outcome.spec.method.name for outcome in outcomes))
    return plots.write(out, methods, make_rows(outcomes))


@pytest.mark.slow
@pytest.mark.parametrize("outcomes", CASES.values(), ids=CASES.keys())
@pytest.mark.filterwarnings("error")
def test_every_comparison_can_be_drawn(tmp_path, outcomes):
    titles = [picture.title for picture in draw(tmp_path, outcomes)]
    metric = metric_of([outcomes[0].summary or {}])
    assert titles == [f"{metric.heading} by epoch", f"{metric.heading} by time", "Throughput"]
    for name in plots.files(metric)[:3]:
        image = matplotlib.image.imread(tmp_path / name)
        assert min(image.shape[:2]) > 150
        for colour in plots.COLOURS[:2]:  # of a method, in every picture
            wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
            assert (np.abs(image[:, :, :3] - wanted).max(axis=2) < 0.01).sum() > 20


def test_a_picture_of_what_did_not_finish_is_taken_away(tmp_path):
    draw(tmp_path, SEEDS)
    assert draw(tmp_path, [Outcome(SEEDS[0].spec, 1.0, failure="status 1")]) == []
    assert list(tmp_path.iterdir()) == []


def test_curves_can_be_told_apart_without_colours_and_their_axis_is_plain():
    names = [f"s{i}" for i in range(7)]
    rows = make_rows([outcome(name, 0, [0.9751, 0.97512, 0.97513] * 4) for name in names])
    for key in ("epoch", "elapsed_s"):
        figure = plots._over(by_model(rows), names, key)
        assert figure is not None
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
    figure = plots._over(by_model(rows), ["gpipe"], "epoch")
    assert figure is not None
    figure.canvas.draw()
    (axes,) = figure.axes
    assert (axes.get_yscale(), axes.get_ylabel()) == (scale, "test squared error")
    low, high = axes.get_ylim()
    assert low < min(values) < max(values) < high
    assert max(values) - min(values) > 0.5 * (high - low) or scale == "log"
    ticks = {float(label.get_text()) for label in axes.get_yticklabels()}  # plain numbers, each another
    assert len(ticks) == len(axes.get_yticklabels()) >= 3
    assert not any(label.get_text() for label in axes.get_yticklabels(minor=True))


def test_pictures_are_named_after_the_metric(tmp_path):
    pictures = draw(tmp_path, [outcome("gpipe", 0, [0.25, 0.125], **MSE)])
    assert [picture.title for picture in pictures] == [
        *("Squared error by epoch", "Squared error by time", "Throughput")
    ]
    assert pictures[0].words.endswith("vgg16 by gpipe: 0.1250 after the last epoch")
    names = {"squared_error_epoch.png", "squared_error_seconds.png", "throughput.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert plots.files(ACCURACY)[:2] == ["accuracy_epoch.png", "accuracy_seconds.png"]


def test_methods_of_one_schedule_share_a_timeline():
    slow = ("--method", "slow: schedule=layer_dist optim.momentum=0")
    drawn, missing = plots.timelines(asked("--schedules", "layer_dist", "pipedream", *slow))
    assert [picture.title for picture in drawn] == ["layer_dist, slow", "pipedream"]
    assert drawn[0].words == "layer_dist, slow: 8 batches of 1 microbatch on 2 ranks, bubble 50.0%"
    assert missing == []


def test_a_schedule_that_decides_as_it_runs_is_drawn_at_the_buffers_that_are_configured():
    """So many forwards go ahead: it was played over buffers of 2, whatever was configured."""
    for size, ahead in ((1, 7), (2, 8)):
        (spec,) = asked("--method", f"mine: schedule=fbp buffer_size={size}", "--nproc", "4")
        _, timeline = plots.play(spec)
        assert timeline.activations[0] == ahead


def test_overrides_are_read_as_the_command_line_reads_them():
    for words in (
        "codec.backward=topk codec.backward.fraction=0.05",
        "trace.windows=2",
        "partition.profile=x",
    ):
        (spec,) = asked("--method", f"mine: schedule=gpipe {words}")
        plots.play(spec)
