"""The table: its columns to the letter, its means and deviations, and what it says of failures."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comparison import table
from comparison.figures import ACCURACY
from comparison.request import Spec
from comparison.runs import Outcome
from comparison.table import make_rows, remarks, write
from tests.comparison.support import of_schedule

PUBLISHED = "method dataset model device lr batch_size data_worker buffer_size epoch acc eachtime"
GOLDEN = Path(__file__).with_name("golden_table.md")
DONE: dict[str, Any] = {"best_val_acc": 0.9, "val_acc": 0.9, "best_epoch": 1, "epoch_s": 5.0}
PPL: dict[str, Any] = {"metrics": [{"name": "ppl", "higher": False, "percent": False}], "best_epoch": 2}


def outcome(schedule: str, seed: int, **summary: Any) -> Outcome:
    spec = Spec(of_schedule(schedule), seed, "vgg16", (), 2)
    if not summary:
        return Outcome(spec, 1.0, failure="status 1")
    alike = {"model": "vgg16", "data": "cifar10", "device": "2 x 2080ti", "lr": 0.01, "batch_size": 64}
    alike |= {
        "metrics": [{"name": "acc", "higher": True, "percent": True}],
        "data_workers": 0,
        "buffer_size": 2,
        "epochs": 90,
        "updates": 70380,
        "total_s": 1e4,
    }
    return Outcome(spec, 1.0, {**alike, "samples_per_s": 320.0, "test_samples": 10000, **summary})


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


def head(text: str) -> list[str]:
    return [cell.strip() for cell in text.splitlines()[0].strip("| ").split("|")]


def test_the_markdown_to_the_letter(tmp_path):
    assert write(tmp_path, make_rows(three_methods())) == GOLDEN.read_text()
    assert (tmp_path / "table.md").read_text() == GOLDEN.read_text()
    assert [column.head(ACCURACY) for column in table.PUBLISHED] == PUBLISHED.split()


def test_the_csv_holds_plain_numbers(tmp_path):
    write(tmp_path, make_rows(three_methods()))
    with (tmp_path / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [run["run"] for run in runs][2:4] == ["vgg16-layer_dist-seed2", "vgg16-gpipe-seed0"]
    assert [run["state"] for run in runs][2:5] == ["done", "done", "failed"]
    assert runs[3]["best_val_acc"] == "0.904"


def test_another_metric_takes_the_place_of_accuracy_in_its_own_unit_and_direction(tmp_path):
    rows = make_rows(
        [
            outcome("1f1b", 0, **PPL, epoch_s=5.0, val_ppl=12.345, best_val_ppl=11.0),
            outcome("1f1b", 1, **(PPL | {"best_epoch": 3}), epoch_s=5.0, val_ppl=12.545, best_val_ppl=10.5),
            outcome("gpipe", 0),
        ]
    )
    text = write(tmp_path, rows)
    assert head(text) == [word.replace("acc", "ppl") for word in head(GOLDEN.read_text())]
    line, failed = (
        dict(zip(head(text), map(str.strip, cells.split("|")[1:]), strict=False))
        for cells in text.splitlines()[2:4]
    )
    assert (line["epoch"], line["ppl"]) == ("3", "10.50")
    assert (line["last_ppl"], line["best_ppl"]) == ("12.45 ± 0.14", "10.75 ± 0.35")
    assert (failed["ppl"], failed["last_ppl"], failed["best_ppl"]) == ("failed", "failed", "-")
    assert (
        "epoch and ppl: the best epoch of all seeds, counted from 1, and its test perplexity (lower is"
        in text
    )
    with (tmp_path / "runs.csv").open() as file:
        assert next(csv.DictReader(file))["val_ppl"] == "12.345"


def test_an_infinite_perplexity_does_not_stop_the_table(tmp_path):
    values = [(10.0, 9.0), (float("inf"), float("nan"))]
    runs = [
        outcome("gpipe", seed, **PPL, epoch_s=1.0, val_ppl=last, best_val_ppl=best)
        for seed, (last, best) in enumerate(values)
    ]
    text = write(tmp_path, make_rows(runs))
    assert "| inf ± nan |" in text
    assert "|     2 | 9.000 |" in text


def test_nothing_is_faster_than_a_first_row_that_failed():
    rows = make_rows([outcome("layer_dist", 0), outcome("gpipe", 0, **DONE)])
    assert [row.speedup() for row in rows] == [None, None]


def test_runs_of_other_settings_machines_or_revisions_are_not_averaged_in_silence():
    here = {"date": "2026-01-01", "machine": "A, 2 cores", "torch": "2.12", "pipetrain": "0123456789"}
    there = here | {"date": "2026-02-01", "machine": "B, 8 cores", "pipetrain": "abcdef0123"}
    a = replace(outcome("gpipe", 0, **DONE, threads=1, precision="fp32"), made=here)
    b = replace(outcome("gpipe", 1, **DONE, threads=4, lr=0.1), made=there)
    assert remarks(make_rows([a, replace(a, made=here | {"date": "2026-02-01"})])) == []
    assert remarks(make_rows([a, b])) == [
        f"Not alike in all runs: {what}."
        for what in (
            "lr (vgg16: 0.01; 0.1)",
            "threads (vgg16: 1; 4)",
            "precision (vgg16: fp32; unknown)",
            "machine (vgg16: A, 2 cores; B, 8 cores)",
            "pipetrain revision (vgg16: 0123456789; abcdef0123)",
        )
    ]


def test_other_load_is_said():
    runs = [replace(outcome("gpipe", seed, **DONE), other_load=load) for seed, load in enumerate((0.1, 1.42))]
    assert remarks(make_rows(runs)) == [
        "Other programs ran beside 1 of 2 runs and make their times uncertain: they kept 1.4 cores busy at "
        "most, during vgg16 gpipe seed 1."
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
    text = write(tmp_path, make_rows([plain, small, old]))
    lines = [line.split(" | ") for line in text.splitlines()[2:5]]
    assert head(text)[16:19] == ["bytes", "bytes_ratio", "codec_s"]
    assert [[cell.strip() for cell in line[16:19]] for line in lines] == [
        ["1.64 GB", "1.000", "0.00"],
        ["410 MB", "0.250", "1.50"],
        ["-", "-", "-"],
    ]
