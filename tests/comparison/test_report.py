"""What is shown: the report, whole in itself, true to its comparison, and safe; and the pictures in it."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from comparison import plots, report
from comparison.runs import Outcome
from comparison.table import FILES, by_model, make_rows
from tests.comparison.support import compare, outcome

pytestmark = pytest.mark.slow

EVIL = "<script>alert(1)</script> & $x$ \"'"
VOID = {"meta", "br", "img"}
ASKED = [
    "--experiment",
    "xdypipe_full",
    "--models",
    "vgg16",
    "--schedules",
    "layer_dist",
    "gpipe",
    "pipedream",
]


class Reader(HTMLParser):
    """Collects what a page is made of, and notices a tag that is never closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def report_of(out: Path, failing: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setenv("FAKE", json.dumps({failing: "fail"}))
    assert compare(*words, "--out", str(out)) == 1
    return (out / report.FILE).read_text()


def test_it_is_sound_and_asks_nothing_of_anyone_and_says_what_was_found(tmp_path, monkeypatch):
    """A run of it failed, and one has an odd name."""
    odd = ["--method", f"{EVIL}: schedule=1f1b codec.backward=int8", "--seeds", "0", "1", "epochs=12"]
    whole = report_of(tmp_path, "gpipe:1", monkeypatch, *ASKED, *odd)
    page = re.sub(r'"data:image/png[^"]+"', '"data:"', whole)
    read = Reader(page)
    assert read.open == []
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    counted = Counter(tag for tag, _ in read.tags)
    assert counted["h1"] == counted["main"] == 1
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & counted.keys()
    for tag, attributes in read.tags:
        assert not any(key.startswith("on") for key in attributes)
        assert (attributes.get("src") or "data:").startswith("data:")
        assert (attributes.get("href") or "runs/").startswith("runs/")
        assert tag != "th" or attributes["scope"] in {"col", "row", "colgroup", "rowgroup"}
        assert tag != "img" or attributes["alt"]
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; $x$" in page
    found = ["pipedream is 1.89 times as fast", "1 of 8 runs failed", EVIL, "Its last words:"]
    found += ["batch_size=0 must be a whole number of at least 1", "partition=[7]"]
    found += ["Results", "Every run", "Made on", f"python scripts/compare.py {' '.join(ASKED)}"]
    assert [words for words in found if words not in read.text] == []
    pictures = {"accuracy_epoch.png", "accuracy_seconds.png"}
    assert counted["img"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, *pictures, report.FILE, "runs"}


def test_where_nothing_finished_it_says_so(tmp_path, monkeypatch):
    read = Reader(report_of(tmp_path, "gpipe", monkeypatch, "--schedules", "gpipe"))
    assert "no run of gpipe finished" in read.text
    assert "img" not in dict(read.tags)


CASES = {
    "two models and other epochs": [
        *(outcome(s, k, 0.3, 0.9, 0.97 - k / 100) for s in ("gpipe", "1f1b") for k in range(3)),
        outcome("gpipe", 3, 0.3, 0.8, model="mlp"),
        outcome("1f1b", 0, 0.1),
    ],
    "errors that are infinite or no number": [
        *(outcome("gpipe", seed, 5.0, 4.0, 0.25, metric="mse") for seed in range(2)),
        *(outcome("1f1b", seed, 9.0, v, 3.0, metric="mse") for seed, v in enumerate([np.inf, np.nan])),
    ],
    "odd names, all right and all wrong": [outcome(r"$\frac$", 0, 0.0), outcome("50 % & <b>", 0, 1.0)],
}


@pytest.mark.parametrize("outcomes", CASES.values(), ids=CASES.keys())
@pytest.mark.filterwarnings("error")
def test_every_comparison_can_be_drawn_and_shows_each_method(tmp_path, outcomes: list[Outcome]):
    methods = list(dict.fromkeys(outcome.spec.method.name for outcome in outcomes))
    names = plots.write(tmp_path, methods, make_rows(outcomes))
    assert [name.partition("_")[2] for name in names][-1] in ("seconds.png", "error_seconds.png")
    for name in names:
        image = matplotlib.image.imread(tmp_path / name)
        for colour in plots.COLOURS[:2]:
            wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
            assert (np.abs(image[:, :, :3] - wanted).max(axis=2) < 0.01).sum() > 20


def test_curves_can_be_told_apart_without_colours():
    """Eight of the same values: by markers, which are not all at the same epochs, and by their widths."""
    names = [f"s{i}" for i in range(20)]
    rows = make_rows([outcome(name, 0, *[0.9751, 0.97512, 0.97513] * 4) for name in names])
    (axes,) = plots.draw(by_model(rows[:8]), names, "epoch").axes
    assert len({line.get_marker() for line in axes.lines}) == 8
    assert len({line.get_color() for line in axes.lines}) == 8
    assert {line.get_markevery() for line in axes.lines} == {(0, 4), (1, 4), (2, 4), (3, 4)}
    widths = [line.get_linewidth() for line in axes.lines]
    assert widths == sorted(set(widths), reverse=True)
    (all_there_are,) = plots.draw(by_model(rows), names, "epoch").axes
    marked = {(line.get_marker(), repr(line._unscaled_dash_pattern)) for line in all_there_are.lines}
    assert len(marked) == 20
    assert max(line.get_linewidth() for line in all_there_are.lines) < 6
    low, high = axes.get_ylim()
    assert high - low >= 1.0  # not a hundredth of a percent as tall as the picture


@pytest.mark.parametrize(
    ("values", "scale"), [([900, 30, 7.5], "log"), ([0.004, 0.00399, 0.00398], "linear")]
)
def test_an_axis_of_numbers_is_logarithmic_where_they_span_decades(values, scale):
    figure = plots.draw(by_model(make_rows([outcome("gpipe", 0, *values, metric="mse")])), ["gpipe"], "epoch")
    figure.canvas.draw()
    (axes,) = figure.axes
    assert (axes.get_yscale(), axes.get_ylabel()) == (scale, "test squared error")
    low, high = axes.get_ylim()
    assert low < min(values) < max(values) < high
    assert len({float(label.get_text()) for label in axes.get_yticklabels()}) >= 3  # plain numbers
