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
    found = ["pipedream was the fastest, 1.89 times as fast as layer_dist", "1 of 8 runs failed", EVIL]
    found += ["batch_size=0 must be a whole number of at least 1", "partition=[7]"]
    found += ["Results", "Every run", "Made on", f"python scripts/compare.py {' '.join(ASKED)}"]
    assert [words for words in found if words not in read.text] == []
    pictures = {"accuracy_epoch.png", "accuracy_seconds.png"}
    assert counted["img"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, *pictures, report.FILE, "runs"}


def test_where_nothing_finished_it_says_so(tmp_path, monkeypatch):
    read = Reader(report_of(tmp_path, "gpipe", monkeypatch, "--schedules", "gpipe"))
    assert "no run finished" in read.text
    assert "Its last words:" in read.text
    assert "img" not in dict(read.tags)
