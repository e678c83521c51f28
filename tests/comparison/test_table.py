"""The table: its columns to the letter, its means and deviations, and what it says of failures."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comparison.methods import of_schedule
from comparison.runs import Outcome, Spec
from comparison.table import COLUMNS, make_rows, remarks, write
from comparison.text import duration, size

RECORD = (
    "method | dataset | model | device | lr | batch_size | data_worker | buffer_size | epoch | acc | eachtime"
)

GOLDEN = Path(__file__).with_name("golden_table.md")
DONE: dict[str, Any] = {"best_val_acc": 0.9, "val_acc": 0.9, "best_epoch": 1, "epoch_s": 5.0}


def outcome(schedule: str, seed: int, **summary: Any) -> Outcome:
    spec = Spec(of_schedule(schedule), seed, "vgg16", (), 2)
    if not summary:
        return Outcome(spec, 1.0, failure="status 1")
    alike = {"model": "vgg16", "data": "cifar10", "device": "2 x 2080ti", "lr": 0.01, "batch_size": 64}
    alike |= {
        "data_workers": 0,
        "buffer_size": 2,
        "epochs": 90,
        "updates": 70380,
        "samples_per_s": 320.0,
        "total_s": 1e4,
    }
    return Outcome(spec, 1.0, {**alike, **summary})


def three_methods() -> list[Outcome]:
    return [
        outcome("layer_dist", 0, best_val_acc=0.900, val_acc=0.89, best_epoch=60, epoch_s=156.0),
        outcome("gpipe", 0, best_val_acc=0.904, val_acc=0.90, best_epoch=75, epoch_s=78.0),
        outcome("pipedream", 0),
        outcome("layer_dist", 1, best_val_acc=0.910, val_acc=0.91, best_epoch=79, epoch_s=158.0),
        outcome("gpipe", 1),
        outcome("pipedream", 1),
        outcome("layer_dist", 2, best_val_acc=0.905, val_acc=0.90, best_epoch=70, epoch_s=154.0),
        outcome("gpipe", 2),
        outcome("pipedream", 2),
    ]


def test_the_markdown_to_the_letter(tmp_path):
    text = write(tmp_path, three_methods())
    assert text == GOLDEN.read_text()
    assert " | ".join(COLUMNS[:11]) == RECORD
    assert (tmp_path / "table.md").read_text() == text


def test_the_csv_holds_plain_numbers(tmp_path):
    write(tmp_path, three_methods())
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:11] == list(COLUMNS[:11])
    assert (rows[0]["last_acc"], rows[0]["last_dev"], rows[0]["bytes_epoch"]) == ("90", "1", "")
    assert rows[0]["acc"] == "91"
    assert rows[0]["eachtime"] == "156"
    assert rows[1]["speedup"] == "2"
    assert rows[1]["acc_dev"] == rows[2]["acc"] == ""
    assert (rows[2]["finished"], rows[2]["runs"]) == ("0", "3")
    with (tmp_path / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [run["run"] for run in runs][:3] == [
        "vgg16-layer_dist-seed0",
        "vgg16-gpipe-seed0",
        "vgg16-pipedream-seed0",
    ]
    assert [run["state"] for run in runs][:3] == ["done", "done", "failed"]
    assert runs[1]["best_val_acc_percent"] == "90.4"


def test_nothing_is_faster_than_a_first_row_that_failed():
    rows = make_rows([outcome("layer_dist", 0), outcome("gpipe", 0, **DONE)])
    assert [row.speedup for row in rows] == [None, None]


def test_unlike_conditions_are_said(tmp_path):
    a = outcome("layer_dist", 0, **DONE)
    b = outcome("gpipe", 0, **DONE, model="mlp", data="digits", lr=0.1)
    text = write(tmp_path, [a, b])
    assert "Not alike in all runs: model (vgg16: vgg16; mlp).\n" in text
    assert "Not alike in all runs: data (vgg16: cifar10; digits).\n" in text
    assert "Not alike in all runs: lr (vgg16: 0.01; 0.1).\n" in text
    assert "n = 1 seed (0)." in text
    assert "One run has no deviation." in text


def test_runs_of_other_machines_revisions_or_numerics_are_not_averaged_in_silence():
    here = {"date": "2026-01-01", "machine": "A, 2 cores", "torch": "2.12", "pipetrain": "0123456789"}
    there = here | {"date": "2026-02-01", "machine": "B, 8 cores", "pipetrain": "abcdef0123"}
    a, b = (outcome("gpipe", seed, **DONE, threads=1, precision="fp32") for seed in (0, 1))
    assert remarks([replace(a, made=here), replace(b, made=here | {"date": "2026-02-01"})]) == []
    assert remarks([replace(a, made=here), replace(b, made=there)]) == [
        "Not alike in all runs: machine (vgg16: A, 2 cores; B, 8 cores).",
        "Not alike in all runs: pipetrain revision (vgg16: 0123456789; abcdef0123).",
    ]
    assert remarks([a, outcome("gpipe", 1, **DONE, threads=4)]) == [
        "Not alike in all runs: threads (vgg16: 1; 4).",
        "Not alike in all runs: precision (vgg16: fp32; unknown).",
    ]


@pytest.mark.parametrize("failed", [0, 1])
def test_a_failed_row_is_of_the_model_of_the_others_where_only_an_override_names_it(failed):
    outcomes = [outcome(method, 0, **DONE) for method in ("layer_dist", "gpipe", "fbp")]
    outcomes[failed] = outcome(outcomes[failed].spec.method.name, 0)
    unnamed = [replace(each, spec=replace(each.spec, model=None)) for each in outcomes]
    assert [row.model for row in make_rows(unnamed)] == ["vgg16"] * 3
    assert make_rows([unnamed[failed]])[0].model == ""


def test_bytes_and_codecs_where_the_runs_say_them(tmp_path):
    plain = outcome("fbp", 0, **DONE, bytes_per_epoch=1.64e9, codec_s_per_epoch=0.0)
    small = outcome("fbp + int8", 0, **DONE, bytes_per_epoch=0.41e9, codec_s_per_epoch=1.5)
    old = outcome("gpipe", 0, **DONE)
    lines = [line.split(" | ") for line in write(tmp_path, [plain, small, old]).splitlines()[2:5]]
    assert [[cell.strip() for cell in line[16:19]] for line in lines] == [
        ["1.64 GB", "1.000", "0.00"],
        ["410 MB", "0.250", "1.50"],
        ["-", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (3.07e6, "3.07 MB"), (999.6e6, "1 GB"), (2e3, "2 kB")]
)
def test_bytes_are_written_to_three_places(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (8.26, "8.3s"),
        (9.96, "10s"),
        (21.2, "21s"),
        (59.6, "1m00s"),
        (156, "2m36s"),
        (3725, "1h02m"),
    ],
)
def test_durations_are_written_as_in_the_record(seconds, text):
    assert duration(seconds) == text
