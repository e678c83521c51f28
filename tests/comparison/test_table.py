"""The tables to the letter, what is said of failures and of what is not alike; and the verdict."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from comparison.figures import ACCURACY, LOSS, Metric, duration, metric_of, spread
from comparison.runs import Outcome
from comparison.table import FILES, make_rows, remarks, tables, write
from comparison.verdict import noise, verdict
from tests.comparison.support import METRICS, failed, outcome, staged

GOLDEN = Path(__file__).with_name("golden_table.md")
PPL = Metric("ppl", higher=False, percent=False)
V = staged({"rank": 0, "bubble": 0.5}, {"rank": 1, "bubble": 0.25}, {"rank": 1, "bubble": 0.25})
LATE = {"mean_staleness": 0.5, "max_staleness": 1, "peak_versions": 2}
RUNS = [
    outcome("layer_dist", 0, 0.90, 0.89, epoch_s=156.0, **V),
    outcome("gpipe", 0, 0.904, 0.90, epoch_s=78.0, bytes_per_epoch=0.41e9, codec_s_per_epoch=1.5),
    failed("pipedream"),
    outcome("layer_dist", 1, 0.88, 0.91, epoch_s=158.0, **staged({"rank": 0, "bubble": 0.6} | LATE)),
    failed("gpipe", 1),
]


def test_the_tables_to_the_letter(tmp_path):
    rows = make_rows(RUNS)
    assert write(tmp_path, tables(rows), rows) == GOLDEN.read_text()
    assert (tmp_path / "table.md").read_text() == GOLDEN.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {*FILES}
    with (tmp_path / "runs.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [run["fullest_rank_mib"] for run in found] == ["2", "1", "", "", ""]
    assert [(run["run"], run["state"], run["best_val_acc"]) for run in found] == [
        ("vgg16-layer_dist-seed0", "done", "0.9"),
        ("vgg16-layer_dist-seed1", "done", "0.91"),
        ("vgg16-gpipe-seed0", "done", "0.904"),
        ("vgg16-gpipe-seed1", "failed", ""),
        ("vgg16-pipedream-seed0", "failed", ""),
    ]


def to_target(row: dict[str, str]) -> list[str]:
    return [row[key] for key in ("target", "epochs", "seconds", "speedup")]


def test_the_time_to_a_target_is_of_the_first_epoch_that_reaches_it():
    """An epoch of these takes 10 s, and the target is what all reach or what is asked for."""
    runs = [outcome("a", 0, 0.5, 0.8, 0.9), outcome("b", 0, 0.81, 0.7), outcome("b", 1, 0.2, 0.3, 0.4, 0.95)]
    rows = make_rows(runs)
    for target, a, b in (
        (None, ["81.00", "3.0", "30.00", "1.00x"], ["81.00", "2.5 ± 2.1", "25.00 ± 21.21", "1.20x"]),
        (85, ["85.00", "3.0", "30.00", "1.00x"], ["85.00", "-", "1 of 2", "-"]),
        (99, ["99.00", "-", "0 of 1", "-"], ["99.00", "-", "0 of 2", "-"]),
    ):
        table = tables(rows, target)[-1]
        assert [to_target(dict(zip(table.head, line, strict=True))) for line in table.lines] == [a, b]
    # A lower perplexity is a better one, and of one that is no number nothing is known.
    rows = make_rows([outcome(name, 0, *of, metric="ppl") for name, of in (("a", (9, 8, 5)), ("b", (7, 6)))])
    table = tables(rows)[-1]
    assert [line[2:6] for line in table.lines] == [
        ["6.00", "3.0", "30.00", "1.00x"],
        ["6.00", "2.0", "20.00", "1.50x"],
    ]
    rows = make_rows([outcome("a", 0, 0.5), outcome("b", 0, nan)])
    assert [line[2:6] for line in tables(rows)[-1].lines] == [["-"] * 4] * 2


def test_latex_has_the_same_cells_and_prints_every_sign(tmp_path):
    rows = make_rows([outcome(r"50 % & $\frac_{1}^2$ ~#", 0, 0.9), failed("b")])
    results = tables(rows)
    write(tmp_path, results, rows, latex=True)
    text = (tmp_path / "table.tex").read_text()
    odd = r"50 \% \& \$\textbackslash{}frac\_\{1\}\textasciicircum{}2\$ \textasciitilde{}\#"
    assert text.count(odd) == 3
    assert [text.count(word) for word in (r"\begin{table}", r"\end{table}", r"\toprule", r"\midrule")] == [
        3
    ] * 4
    assert r"deviation. last\_acc: test accuracy in \% after" in text
    lines = [line.removesuffix(r" \\").split(" & ") for line in text.splitlines() if line.startswith("b & ")]
    assert lines == [list(table.lines[1]) for table in results]
    columns = [len(one) for one in re.findall(r"\\begin\{tabular\}\{([lr]+)\}", text)]
    assert columns == [len(table.head) for table in results]


def test_another_metric_takes_the_place_of_accuracy_and_a_failed_row_stands_beside_it():
    runs = [
        outcome("1f1b", 0, 11.0, 12.345, metric="ppl"),
        outcome("1f1b", 1, 13.0, 10.5, 12.545, metric="ppl"),
    ]
    unnamed = [replace(run, spec=replace(run.spec, model=None)) for run in (failed("layer_dist"), *runs)]
    published, trusted, _ = tables(make_rows(unnamed))
    lines = [
        dict(zip(table.head, line, strict=True)) for table in (published, trusted) for line in table.lines
    ]
    assert [line["model"] for line in lines] == ["vgg16"] * 4  # an override alone named it
    assert [lines[0]["ppl"], lines[2]["last_ppl"]] == ["failed"] * 2
    assert (lines[1]["epoch"], lines[1]["ppl"], lines[3]["last_ppl"]) == ("2", "10.50", "12.45 ± 0.14")
    assert lines[3]["speedup"] == "-"  # nothing is faster than a first row that failed
    assert "its test perplexity (lower is better)." in published.notes[0]


def test_runs_of_other_settings_machines_or_revisions_are_not_averaged_in_silence():
    here = {"date": "2026-01-01", "machine": "A, 2 cores", "torch": "2.12", "pipetrain": "0123456789"}
    there = here | {"date": "2026-02-01", "machine": "B, 8 cores", "pipetrain": "abcdef0123"}
    a = replace(outcome("gpipe", 0, 0.9, threads=1, precision="fp32"), machine=here)
    b = replace(outcome("gpipe", 1, 0.9, threads=4, lr=0.1), machine=there)
    assert remarks(make_rows([a, replace(a, machine=here | {"date": "2026-02-01"})])) == []
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


def test_the_metric_is_the_first_one_and_how_figures_are_written():
    assert metric_of([{"metrics": [METRICS["ppl"], METRICS["acc"]]}, {}]) == PPL
    assert (metric_of([]), metric_of([{"metrics": []}])) == (ACCURACY, LOSS)
    assert max([3.0, nan, 2.0, inf], key=PPL.worth) == 2.0
    assert [PPL.number(value) for value in (12.3456, 0.0042137, 0.0, inf)] == [
        "12.35",
        "0.004214",
        "0.00",
        "inf",
    ]
    assert (ACCURACY.value({"val_acc": 0.86}, "val"), ACCURACY.text(86.0), PPL.text(86.0)) == (
        86,
        "86.00 %",
        "86.00",
    )
    written = [duration(seconds) for seconds in (0.04, 8.26, 9.96, 21.2, 59.6, 156, 3725)]
    assert written == ["0.0s", "8.3s", "10s", "21s", "1m00s", "2m36s", "1h02m"]
    assert [spread(each) for each in ([], [1.0], [1.0, 3.0], [1.0, inf])] == [
        "-",
        "1.00",
        "2.00 ± 1.41",
        "inf ± nan",
    ]


# The verdict


def runs(method: str, seconds: float | list[float], *finals: float, metric: str = "acc") -> list[Outcome]:
    each = seconds if isinstance(seconds, list) else [seconds] * len(finals)
    pairs = enumerate(zip(each, finals, strict=True))
    return [outcome(method, seed, final, metric=metric, epoch_s=s) for seed, (s, final) in pairs]


FEW = "too few seeds to say what of it is noise"
FIRST = "vgg16 on cifar10: by a an epoch of training takes"
SAID = {
    "faster and worse, and slower and better": (
        [*runs("a", 15, 0.90, 0.901), *runs("c", 20, 0.95, 0.951), *runs("b", 10, 0.80, 0.801)],
        f"{FIRST} 15 s, and the last one leaves accuracy (higher is better) at 90.05 %.",
        f"b is 1.50 times as fast (10 s: {FEW}); accuracy is 80.05 %, 10.00 points below (more than the "
        "noise of ±0.44 at 95 %).",
        f"c is 0.75 times as fast (20 s: {FEW}); accuracy is 95.05 %, 5.00 points above (more than the "
        "noise of ±0.44 at 95 %).",
    ),
    # The pair of an earlier comparison, of two seeds each, which was called 1.64 times as fast.
    "a speed is noise as long as its interval holds zero": (
        [*runs("a", [1.39, 1.71], 0.9, 0.9), *runs("b", [0.75, 1.13], 0.9, 0.9)],
        f"{FIRST} 1.55 s, and the last one leaves accuracy (higher is better) at 90.00 %.",
        "b is 1.65 times as fast (0.94 s: within the noise of ±1.1 s at 95 %); accuracy is 90.00 %, the same "
        f"({FEW}).",
    ),
    "of what is no number nothing is said": (
        [*runs("a", 20, 12.3, 12.5, metric="ppl"), *runs("b", 10, 12.8, nan, metric="ppl")],
        f"{FIRST} 20 s, and the last one leaves perplexity (lower is better) at 12.40.",
        f"b is 2.00 times as fast (10 s: {FEW}); perplexity is nan.",
    ),
    "without the first row": (
        [failed("a"), *runs("b", 10, 0.9)],
        "vgg16: no run of a finished, so there is nothing to measure others by.",
    ),
}


@pytest.mark.parametrize(("outcomes", "said"), [(each, said) for each, *said in SAID.values()], ids=SAID)
def test_a_verdict(outcomes, said):
    assert verdict(make_rows(outcomes), 0, 0, 6) == said


def test_what_failed_or_is_missing_is_said_and_what_ran_beside():
    busy = [replace(one, others=1.53) for one in runs("fbp", 10, 0.9, 0.9)]
    assert verdict(make_rows([*runs("gpipe", 10, 0.9), *busy]), 1, 2, 6)[-3:] == [
        "1 of 6 runs failed, so what stands here is of the others.",
        "The comparison is not finished: 2 of 6 runs are not made yet.",
        "Other programs ran beside 2 of 3 runs and make their times uncertain: they kept 1.5 cores busy at "
        "most, during vgg16 fbp seed 0.",
    ]


def row(deviation: float, n: int) -> list[float]:
    """The accuracies of n seeds that have this sample deviation, in percent."""
    half = deviation * ((n - 1) / (2 * (n // 2))) ** 0.5
    return [50 - half] * (n // 2) + [50.0] * (n % 2) + [50 + half] * (n // 2)


def test_welch_s_interval():
    # Equal deviations and numbers: n1 + n2 - 2 degrees of freedom. From a printed table of Student's t.
    three = row(1.0, 3)
    assert noise(three, three) == pytest.approx(2.776 * (2 / 3) ** 0.5, rel=1e-3)
    assert noise(row(1.0, 2), row(0.0, 5)) == pytest.approx(12.706 * 0.5**0.5, rel=1e-3)
    assert noise(three, three, compared=5) == pytest.approx(4.604 * (2 / 3) ** 0.5, rel=1e-3)
    assert noise(row(0.0, 3), row(0.0, 3)) is None
    assert noise(three, [50.0]) is None
