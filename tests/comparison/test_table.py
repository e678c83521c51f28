"""The table: its columns to the letter, its means and deviations, and what it says of failures."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison.request import Spec
from comparison.runs import Outcome
from comparison.table import make_rows, remarks, results, write
from tests.comparison.support import of_schedule

PUBLISHED = "method dataset model device lr batch_size data_worker buffer_size epoch acc eachtime"
GOLDEN = Path(__file__).with_name("golden_table.md")
DONE: dict[str, Any] = {"best_val_acc": 0.9, "val_acc": 0.9, "best_epoch": 1, "epoch_s": 5.0}
PPL: dict[str, Any] = {"metrics": [{"name": "ppl", "higher": False, "percent": False}], "best_epoch": 2}
ALIKE: dict[str, Any] = {"metrics": [{"name": "acc", "higher": True, "percent": True}], "model": "vgg16"}
ALIKE |= {"data": "cifar10", "device": "2 x 2080ti", "lr": 0.01, "batch_size": 64, "data_workers": 0}
ALIKE |= {"buffer_size": 2, "epochs": 90, "updates": 70380, "total_s": 1e4}


def outcome(schedule: str, seed: int, **summary: Any) -> Outcome:
    spec = Spec(of_schedule(schedule), seed, "vgg16", (), 2)
    return Outcome(spec, 1.0, ALIKE | summary) if summary else Outcome(spec, 1.0, failure="status 1")


def three_methods() -> list[Outcome]:
    done = {
        ("layer_dist", 0): (0.900, 0.89, 60, 156.0),
        ("layer_dist", 1): (0.910, 0.91, 79, 158.0),
        ("layer_dist", 2): (0.905, 0.90, 70, 154.0),
        ("gpipe", 0): (0.904, 0.90, 75, 78.0),
    }
    runs = [(method, seed) for seed in range(3) for method in ("layer_dist", "gpipe", "pipedream")]
    return [outcome(*run, **dict(zip(DONE, done[run], strict=True)) if run in done else {}) for run in runs]


def lines(outcomes: list[Outcome]) -> list[dict[str, str]]:
    table = results(make_rows(outcomes))
    return [dict(zip(table.head, line, strict=True)) for line in table.lines]


def test_the_markdown_to_the_letter(tmp_path):
    assert write(tmp_path, make_rows(three_methods())) == GOLDEN.read_text()
    assert (tmp_path / "table.md").read_text() == GOLDEN.read_text()
    assert list(results(make_rows(three_methods())).head)[:11] == PUBLISHED.split()
    with (tmp_path / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [run["run"] for run in runs][2:4] == ["vgg16-layer_dist-seed2", "vgg16-gpipe-seed0"]
    assert [run["state"] for run in runs][2:5] == ["done", "done", "failed"]
    assert runs[3]["best_val_acc"] == "0.904"


def test_another_metric_takes_the_place_of_accuracy_in_its_own_unit_and_direction():
    runs = [
        outcome("1f1b", 0, **PPL, epoch_s=5.0, val_ppl=12.345, best_val_ppl=11.0),
        outcome("1f1b", 1, **(PPL | {"best_epoch": 3}), epoch_s=5.0, val_ppl=12.545, best_val_ppl=10.5),
        outcome("gpipe", 0),
    ]
    line, failed = lines(runs)
    assert (line["epoch"], line["ppl"]) == ("3", "10.50")
    assert (line["last_ppl"], line["best_ppl"]) == ("12.45 ± 0.14", "10.75 ± 0.35")
    assert (failed["ppl"], failed["last_ppl"], failed["best_ppl"]) == ("failed", "failed", "-")
    said = "epoch and ppl: the best epoch of all seeds, counted from 1, and its test perplexity (lower is"
    assert said in results(make_rows(runs)).notes[0]


def test_nothing_is_faster_than_a_first_row_that_failed():
    assert not any(
        "speedup" in line for line in lines([outcome("layer_dist", 0), outcome("gpipe", 0, **DONE)])
    )


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
            "pipetrain (vgg16: 0123456789; abcdef0123)",
        )
    ]


def test_a_failed_row_is_of_the_model_of_the_others_where_only_an_override_names_it():
    outcomes = [outcome("layer_dist", 0), outcome("gpipe", 0, **DONE)]
    unnamed = [replace(each, spec=replace(each.spec, model=None)) for each in outcomes]
    assert [row.model for row in make_rows(unnamed)] == ["vgg16"] * 2
    assert make_rows(unnamed[:1])[0].model == ""


def test_bytes_and_codecs_where_the_runs_say_them():
    plain = outcome("fbp", 0, **DONE, bytes_per_epoch=1.64e9, codec_s_per_epoch=0.0)
    small = outcome("fbp + int8", 0, **DONE, bytes_per_epoch=0.41e9, codec_s_per_epoch=1.5)
    found = lines([plain, small, outcome("gpipe", 0, **DONE)])
    assert [[line[name] for name in ("bytes", "bytes_ratio", "codec_s")] for line in found] == [
        ["1.64 GB", "1.000", "0.00"],
        ["410 MB", "0.250", "1.50"],
        ["-", "-", "-"],
    ]
