"""The pictures: they are there, they can be read, and they show the curves."""

from __future__ import annotations

import matplotlib.image
import numpy as np
import pytest

from comparison import plots
from comparison.methods import of_schedule
from comparison.runs import Outcome, Spec


def outcome(schedule: str, seed: int, accuracies: list[float], model: str = "vgg16") -> Outcome:
    summary = {"model": model, "data": "digits", "samples_per_s": 100.0 + seed}
    epochs = [float(epoch) for epoch in range(1, len(accuracies) + 1)]
    curves = {"epoch": epochs, "val_acc": accuracies, "elapsed_s": [10 * epoch for epoch in epochs]}
    return Outcome(Spec(of_schedule(schedule), seed, model, (), 2), 1.0, summary, curves)


CASES = {
    "many seeds": [outcome(s, k, [0.3, 0.9, 0.97 - k / 100]) for s in ("gpipe", "1f1b") for k in range(3)],
    "one epoch": [outcome("gpipe", 0, [0.1])],
    "other epochs": [outcome("gpipe", 0, [0.3, 0.9, 0.97]), outcome("gpipe", 1, [0.3, 0.8])],
    "all right and all wrong": [outcome("gpipe", 0, [0.0, 1.0, 1.0]), outcome("1f1b", 0, [1.0, 1.0, 1.0])],
    "two models": [outcome("gpipe", 0, [0.5, 0.6], model) for model in ("vgg16", "resnet18")],
    "odd names": [outcome(name, 0, [0.5, 0.6]) for name in (r"$\frac$", "50 % & <b>", "a$")],
    "many schedules": [outcome(f"s{i}", 0, [0.5, 0.6]) for i in range(9)],
    "none finished": [Outcome(Spec(of_schedule("gpipe"), 0, None, (), 2), 1.0, failure="status 1")],
}


@pytest.mark.parametrize("outcomes", CASES.values(), ids=CASES.keys())
@pytest.mark.filterwarnings("error")
def test_every_comparison_can_be_drawn(tmp_path, outcomes):
    plots.write(tmp_path, outcomes)
    for name in plots.FILES:
        image = matplotlib.image.imread(tmp_path / name)
        assert min(image.shape[:2]) > 150
        assert np.ptp(image[:, :, :3]) > 0.5


def test_a_schedule_has_its_colour_in_every_picture(tmp_path):
    plots.write(tmp_path, CASES["many seeds"])
    for name in plots.FILES:
        pixels = matplotlib.image.imread(tmp_path / name)[:, :, :3].reshape(-1, 3)
        for colour in plots.COLOURS[:2]:
            wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
            assert (np.abs(pixels - wanted).max(axis=1) < 0.01).sum() > 20
