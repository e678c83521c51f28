"""What is read as a document has its type, or is refused in one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from pipetrain import typed_json as documents
from pipetrain.typed_json import DamagedCheckpoint, read_as, read_json


@dataclass
class Inner:
    number: int
    share: float | None


@dataclass
class Outer:
    name: str
    inner: list[Inner]
    counts: dict[int, int]
    free: Mapping[str, Any]


def test_what_is_written_is_read(tmp_path):
    made = Outer("ü", [Inner(0, math.inf), Inner(2**63, None)], {1: 2, 12: 3}, {"a": [None, {"b": True}]})
    (tmp_path / "file").write_text(json.dumps(asdict(made)))
    assert read_as(Outer, read_json(tmp_path / "file"), "it") == made
    assert read_as(Outer, GOOD, "it") == Outer("x", [Inner(0, 1)], {0: 1}, {})


GOOD: dict[str, Any] = {"name": "x", "inner": [{"number": 0, "share": 1}], "counts": {"0": 1}, "free": {}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[" * 100_000, "/file is no JSON of ours"),
        (b" " * 300_001, "/file is no JSON of ours: over 300000 bytes"),
        (None, "/file cannot be read: No such file"),
        ({"name": 1}, "^it: name must be of type str, and is 1"),
        ({"inner": [{"number": True, "share": 1}]}, "^it: inner: 0: number must be of type int, and is True"),
        ({"inner": [{"number": 1}]}, "^it: inner: 0 must be an object of number, share, and is "),
        ({"counts": {"x": 1}}, "^it: counts must have whole numbers as keys: .*'x'$"),
        ({"free": []}, "^it: free must be of type Mapping"),
        ({"more": 1}, "^it must be an object of name, inner, counts, free, and is .{,200}$"),
    ],
)
def test_what_cannot_be_read_or_has_another_type_is_named(content, says, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MOST_BYTES", 300_000)
    if content is not None:
        text = json.dumps(GOOD | content).encode() if isinstance(content, dict) else content
        (tmp_path / "file").write_bytes(text)
    with pytest.raises(DamagedCheckpoint, match=says):
        read_as(Outer, read_json(tmp_path / "file"), "it")
