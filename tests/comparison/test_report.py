"""The report: whole in itself, true to its comparison, and safe."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from comparison import report
from comparison.table import FILES
from tests.comparison.support import compare

pytestmark = pytest.mark.slow

EVIL = "<script>alert(1)</script> & $x$ \"'"
VOID = {"meta", "br", "img"}
ASKED = ["--experiment", "xdypipe", "--models", "vgg16", "--schedules", "layer_dist", "gpipe", "pipedream"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A comparison in which a run failed, with an odd name, and one that only failed."""
    made = {}
    odd = ["--method", f"{EVIL}: schedule=1f1b codec.backward=int8", "--seeds", "0", "1", "epochs=12"]
    with pytest.MonkeyPatch.context() as patch:
        for name, words in [("gpipe:1", [*ASKED, *odd]), ("gpipe", ["--schedules", "gpipe"])]:
            out = tmp_path_factory.mktemp("out")
            patch.setenv("FAKE", json.dumps({name: "fail"}))
            assert compare(*words, "--out", str(out)) == 1
            made[name] = out / report.FILE
    return {"whole": made["gpipe:1"], "failed": made["gpipe"]}


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
            assert tag != "img" or attributes["alt"]


def test_names_are_text_and_never_markup(pages):
    page = pages["whole"].read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; $x$" in page
    assert EVIL in Reader(pages["whole"]).text


def test_it_says_what_was_found_and_how_to_find_it_again(pages):
    text = Reader(pages["whole"]).text
    assert "vgg16 on cifar10: pipedream was the fastest, 1.89 times as fast as layer_dist" in text
    assert "1 of 8 runs failed" in text
    assert "batch_size=0 must be a whole number of at least 1" in text
    assert "partition=[7]" in text
    assert f"python scripts/compare.py {' '.join(ASKED)}" in text
    for heading in ("Results", "Every run", "Made on", "To make it again"):
        assert f"<h2>{heading}</h2>" in pages["whole"].read_text()
    assert pages["whole"].read_text().count("<img") == 2
    pictures = {"accuracy_epoch.png", "accuracy_seconds.png"}
    assert {path.name for path in pages["whole"].parent.iterdir()} == {*FILES, *pictures, report.FILE, "runs"}


def test_where_nothing_finished_it_says_so(pages):
    text, page = Reader(pages["failed"]).text, pages["failed"].read_text()
    assert "no run finished" in text
    assert "Its last words:" in text
    assert page.count("<img") == 0
