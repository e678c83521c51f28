"""What nobody vouches for: never a wait, never another surprise than DamagedCheckpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from pipetrain.ending import REFUSED, guarded
from pipetrain.errors import ConfigError
from pipetrain.untrusted import DamagedCheckpoint, opened, read_as, read_json
from tests.support.damage import NOT_JSON, ODD


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "file"


@pytest.mark.parametrize("name", [name for name in ODD if name != "20 GiB of nothing"])
def test_only_a_regular_file_is_opened(name, path):
    ODD[name](path)
    with pytest.raises(DamagedCheckpoint, match=r"is no regular file|cannot be read: "), opened(path):
        pass


def test_a_file_that_fails_while_it_is_read_is_damaged(path):
    path.write_text("x")
    with pytest.raises(DamagedCheckpoint, match="cannot be read: Input/output error"), opened(path):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("name", ODD)
def test_json_is_read_from_nothing_odd(name, path):
    ODD[name](path)
    with pytest.raises(DamagedCheckpoint):
        read_json(path, 1000)


@pytest.mark.parametrize("name", NOT_JSON)
def test_json_that_cannot_be_borne_is_refused(name, path):
    path.write_bytes(NOT_JSON[name])
    with pytest.raises(DamagedCheckpoint, match=r"is no JSON of ours|has 1000000 bytes"):
        read_json(path, 300_000)


def test_json_is_read(path):
    data = {"a": [1, 2.5, None, "ü\U0001f600"], "deep": json.loads("[" * 40 + "]" * 40)}
    path.write_text(json.dumps(data))
    assert read_json(path, 1000) == data
    with pytest.raises(DamagedCheckpoint, match="and 100 at most are read"):
        read_json(path, 100)


@dataclass
class Inner:
    number: int
    share: float
    loss: Annotated[float, "any"]


@dataclass
class Outer:
    name: str
    inner: list[Inner]
    counts: dict[int, int]
    free: Mapping[str, Any]


GOOD: dict[str, Any] = {
    "name": "x",
    "inner": [{"number": 0, "share": -0.5, "loss": math.inf}, {"number": 2**63 - 1, "share": 1, "loss": 2}],
    "counts": {"0": 1, "12": 3},
    "free": {"a": [None, {"b": True}]},
}


def test_a_dataclass_is_made_of_json():
    made = read_as(Outer, GOOD, "it")
    assert made.inner == [Inner(0, -0.5, math.inf), Inner(2**63 - 1, 1, 2)]
    assert (made.name, made.counts, made.free) == ("x", {0: 1, 12: 3}, GOOD["free"])


HUGE = 10**400
WRONG: list[tuple[str, Any, str]] = [
    *(
        ("number", value, "a whole number from 0")
        for value in (-1, 1.0, True, "1", None, 2**63, HUGE, [], {})
    ),
    *(("share", value, "a finite number") for value in (math.nan, -math.inf, True, "1", None, HUGE, [])),
    *(("loss", value, "a number") for value in (True, "1", None, HUGE, {})),
    *(("name", value, "a string") for value in (1, None, [], {}, True)),
    *(("inner", value, "a list") for value in ({}, 1, "x", None)),
    *(("inner", [value], "an object of number, share, loss") for value in (1, [], {}, {"number": 1})),
    ("inner", [{**GOOD["inner"][0], "more": 1}], "an object of number, share, loss"),
    *(("counts", value, "an object") for value in ([], 1, None, "x")),
    *(
        ("counts", {key: 1}, "keys are whole numbers")
        for key in ("-1", "", "01", "1.0", "٣", "a", "9" * 5000)
    ),
    ("counts", {"1": -1}, "a whole number from 0"),
    *(("free", value, "an object") for value in ([], 1, None, "x")),
]


@pytest.mark.parametrize(("field", "value", "wanted"), WRONG)
def test_a_field_of_another_type_is_named(field, value, wanted):
    data = {**GOOD}
    if field in GOOD:
        data[field] = value
    else:
        data["inner"] = [{**GOOD["inner"][0], field: value}]
    with pytest.raises(DamagedCheckpoint, match=wanted) as damage:
        read_as(Outer, data, "it")
    assert str(damage.value).startswith("it: ")
    assert field in str(damage.value)
    assert len(str(damage.value)) < 300


@pytest.mark.parametrize("data", [[], 1, None, "x", {}, {**GOOD, "more": 1}, {"name": "x"}])
def test_all_fields_are_there_and_no_other(data):
    with pytest.raises(DamagedCheckpoint, match="it must be an object of name, inner, counts, free"):
        read_as(Outer, data, "it")


def test_damage_that_reaches_the_edge_is_a_sentence(capsys):
    def read() -> int:
        raise DamagedCheckpoint("a file is not what it was")

    assert guarded(read) == REFUSED
    assert capsys.readouterr().err == "pipetrain: a file is not what it was\n"
    assert issubclass(DamagedCheckpoint, ConfigError)
