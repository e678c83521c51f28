"""The report: whole in itself, true to its comparison, safe, and well laid out in a browser."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from comparison import report
from comparison.table import FILES
from tests.comparison import browser
from tests.comparison.support import compare

pytestmark = pytest.mark.slow

EVIL = "<script>alert(1)</script> & $x$ \"'"
LONG = "a-method-whose-name-is-longer-than-a-phone-is-wide-and-has-no-place-to-break-it"
VOID = {"meta", "br", "img"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A comparison in which a run failed, one with odd names, and one that only failed."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, status, fails, words in [
            ("whole", 1, {"gpipe:1": "fail"}, [*EXPERIMENT, "--seeds", "0", "1"]),
            (
                "odd",
                0,
                {},
                [
                    *("--method", f"{EVIL}: schedule=gpipe", "--method", f"{LONG}: schedule=pipedream"),
                ],
            ),
            ("failed", 1, {"gpipe": "fail"}, ["--schedules", "gpipe"]),
            ("text", 0, {}, ["--schedules", "gpipe", "pipedream", "task=language_modelling", "model=gpt"]),
        ]:
            out = tmp_path_factory.mktemp(name)
            patch.setenv("FAKE", json.dumps(fails))
            assert compare(*words, "--out", str(out)) == status
            made[name] = out / report.FILE
    return made


EXPERIMENT = ["--experiment", "xdypipe", "--schedules", "layer_dist", "gpipe", "pipedream"]
EXPERIMENT += ["--method", "pipedream + int8: schedule=pipedream codec.backward=int8", "epochs=12"]


class Reader(HTMLParser):
    """Collects what a page is made of, and notices a tag that is never closed."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_it_asks_nothing_of_anyone(pages):
    for path in pages.values():
        page = re.sub(r'"data:image/png[^"]+"', '"data:"', path.read_text())
        assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
        for tag, attributes in Reader(path).tags:
            assert tag not in {"script", "link", "iframe", "object", "embed", "base", "form"}
            assert not any(key.startswith("on") for key in attributes)
            assert (attributes.get("src") or "data:").startswith("data:")
            assert (attributes.get("href") or "runs/").startswith("runs/")


def test_it_is_sound_html_that_a_screen_reader_can_read(pages):
    for path in pages.values():
        read = Reader(path)
        assert read.open == []
        counted = Counter(tag for tag, _ in read.tags)
        assert counted["h1"] == counted["main"] == 1
        for tag, attributes in read.tags:
            assert tag != "th" or attributes["scope"] in {"col", "row", "colgroup", "rowgroup"}
            assert tag != "img" or len(attributes["alt"] or "") > 20


def test_names_are_text_and_never_markup(pages):
    page = pages["odd"].read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; $x$" in page
    assert EVIL in Reader(pages["odd"]).text


def test_it_says_what_was_found_and_how_to_find_it_again(pages):
    text = Reader(pages["whole"]).text
    assert "vgg16 on cifar10: pipedream was the fastest, 1.89 times as fast as layer_dist" in text
    assert "2 of 16 runs failed" in text
    assert "batch_size=0 must be a whole number of at least 1" in text
    assert "partition=[7]" in text
    assert f"python scripts/compare.py {' '.join(EXPERIMENT[:3])}" in text
    for heading in ("Results", "How each method ran", "Every run", "Made on", "To make it again"):
        assert f"<h2>{heading}</h2>" in pages["whole"].read_text()
    assert pages["whole"].read_text().count("<img") == 2
    pictures = {"accuracy_epoch.png", "accuracy_seconds.png"}
    assert {path.name for path in pages["whole"].parent.iterdir()} == {*FILES, *pictures, report.FILE, "runs"}


def test_perplexity_stands_where_accuracy_did(pages):
    text = Reader(pages["text"]).text
    assert (
        "After the last epoch, in perplexity (lower is better), pipedream stands at 6.500, 0.600 above"
        in text
    )
    assert "last_ppl" in text
    assert "best_ppl" in text
    assert 'alt="Perplexity by time. After the last epoch ' in pages["text"].read_text()
    assert "accura" not in text.lower()
    assert {path.name for path in pages["text"].parent.glob("*.png")} == {
        *("perplexity_epoch.png", "perplexity_seconds.png")
    }


def test_where_nothing_finished_it_says_so(pages):
    text, page = Reader(pages["failed"]).text, pages["failed"].read_text()
    assert "no run finished" in text
    assert "Its last words:" in text
    assert page.count("<img") == 0


@browser.needed
@pytest.mark.parametrize("name", ["whole", "odd"])
def test_nothing_sticks_out_at_any_width(pages, name):
    said = browser.widths(pages[name], 390, 768, 1280)
    for wide, taken, out in json.loads(said.output):
        assert (taken, out) == (wide, [])
    assert said.console == []


@browser.needed
def test_a_browser_shows_it_light_and_dark_without_a_complaint(pages, tmp_path):
    page = tmp_path / "page.html"
    page.write_bytes(pages["whole"].read_bytes())
    brightness = []
    for scheme in (1, 0):
        picture = tmp_path / f"{scheme}.png"
        options = [f"--screenshot={picture}", "--window-size=800,1200"]
        said = browser.run(page, *options, f"--blink-settings=preferredColorScheme={scheme}")
        assert said.console == []
        pixels = matplotlib.image.imread(picture)[:, :, :3]
        assert np.ptp(pixels) > 0.7
        brightness.append(float(np.median(pixels)))
    assert brightness[0] > 0.9
    assert brightness[1] < 0.4  # the pictures are white
