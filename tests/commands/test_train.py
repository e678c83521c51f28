"""`python -m pipetrain` as a person starts it, in processes: what it prints, leaves and ends with."""

from __future__ import annotations

import csv
import json
import logging
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from pipetrain.commands.cli import compose
from pipetrain.commands.rank0_jobs import discard_folder, given_folder, run_job
from pipetrain.commands.start import Start
from pipetrain.commands.train import run_command
from pipetrain.errors import ConfigError
from pipetrain.records.recorder import Recorder
from pipetrain.runtime.comm.collectives import World
from pipetrain.schedule import chrome
from pipetrain.signals import Signals
from tests.support.processes import TWO as TORCHRUN
from tests.support.processes import Ended, finished, lines_of

pytestmark = pytest.mark.processes

TWO = [*TORCHRUN, "-m", "pipetrain"]
LAUNCHED = ["-m", "pipetrain.commands.launcher"]  # two ranks too, where there is no GPU
SMALL = ["model=mlp", "data=digits", "batch_size=128", "device=cpu"]
FEW = [*SMALL, "data.train_limit=256", "epochs=1"]
EPOCH = re.compile(
    r"epoch (\d)/(\d): train loss [\d.]+, acc [\d.]+ %; val loss [\d.]+, acc ([\d.]+) %; "
    r"\d+ samples/s, [\d.]+ s"
)


def the_only_folder(where: Path) -> Path:
    (folder,) = where.iterdir()
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# A run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Ended, Path]:
    """A run of two processes, two epochs; and the folder that it was started from."""
    folder = tmp_path_factory.mktemp("run")
    words = [*SMALL, "schedule=pipedream", "microbatches=2", "epochs=2", "seed=3", "trace=true"]
    return finished(folder, [*LAUNCHED, *words]), folder


def test_a_run_ends_well_and_says_a_line_an_epoch_and_the_table(run):
    ended, where = run
    assert ended.status == 0, ended.out
    lines = lines_of(ended.out)
    assert lines[0] == (
        "pipetrain: mlp on digits (1437 train, 360 test samples), schedule pipedream, 2 x cpu"
    )
    epochs = [match for line in lines if (match := EPOCH.fullmatch(line))]
    assert [match.group(1, 2) for match in epochs] == [("1", "2"), ("2", "2")]
    header = lines.index("epoch  train loss  train acc  val loss  val acc  samples/s  seconds")
    assert [line.split()[:1] for line in lines[header + 1 : header + 4]] == [["1"], ["2"], []]
    folder = the_only_folder(where / "runs")
    assert lines[-2:] == [f"run folder: {folder}", f"look at it: tensorboard --logdir {folder.parent}"]
    said = [line for line in lines if line]
    assert len(said) == len(set(said))  # the other rank says nothing: no line comes twice
    assert f"val acc {epochs[-1][3]} %" in ended.out


def test_a_run_leaves_one_folder_with_all_of_it(run):
    _, where = run
    assert [path.name for path in where.iterdir()] == ["runs"]
    folder = the_only_folder(where / "runs")
    assert re.fullmatch(r"digits-mlp-pipedream-\d{8}-\d{6}-\d{6}", folder.name)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"metrics.csv", "summary.json", "plan.txt", "timeline.png", "trace.json"}
    composed = yaml.safe_load((folder / "config.yaml").read_text())
    assert (composed["seed"], composed["microbatches"], composed["run_dir"]) == (3, 2, str(folder))
    log = (folder / "pipetrain.log").read_text()
    for said in ("schedule pipedream, 2 x cpu", "epoch 2/2: ", "run folder: "):
        assert log.count(said) == 1
    plan = (folder / "plan.txt").read_text()
    assert plan.startswith("mlp, schedule pipedream: 2 stages on 2 ranks, batch 128 in 2 microbatches")
    assert "window of 12 batches" in plan


def test_a_run_s_figures_agree_with_each_other(run):
    """Of two microbatches a batch on two stages: stage 0 holds two, and is one update late."""
    folder = the_only_folder(run[1] / "runs")
    rows, summary = list(csv.DictReader((folder / "metrics.csv").open())), read(folder / "summary.json")
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert all(float(value) >= 0 for row in rows for value in row.values())
    assert float(rows[1]["elapsed_s"]) > float(rows[0]["elapsed_s"])
    about = {"model": "mlp", "data": "digits", "schedule": "pipedream", "stages": 2, "batch_size": 128}
    about |= {"microbatches": 2, "epochs": 2, "seed": 3, "updates": 2 * 12}
    assert summary.items() >= about.items()
    for name in ("val_acc", "val_loss"):
        assert summary[name] == pytest.approx(float(rows[1][name]), rel=1e-5)
    assert summary["best_val_acc"] == pytest.approx(max(float(row["val_acc"]) for row in rows), rel=1e-5)
    assert summary["val_acc"] > 0.3  # chance is 0.1
    assert round(360 * summary["val_acc"], 6) % 1 == 0  # a share of the whole test set
    # Each of the rank that takes longest: of two ranks they may add up to more.
    assert summary["total_s"] >= max(float(row[name]) for row in rows for name in ("epoch_s", "eval_s"))
    assert summary["epoch_s"] == pytest.approx(sum(float(row["epoch_s"]) for row in rows) / 2, rel=1e-4)
    assert summary["samples_per_s"] == pytest.approx(1437 / summary["epoch_s"], rel=1e-4)
    stages, events = summary["per_stage"], read(folder / "trace.json")["traceEvents"]
    assert chrome.read(folder / "trace.json")[0]["partition"] == summary["partition"]
    for name, wanted in [
        ("params", [393_344, 67_338]),
        ("peak_in_flight", [2, 1]),
        ("peak_versions", [2, 1]),
        ("max_staleness", [1, 0]),
        ("bytes_sent", [2 * 1437 * 128 * 4] * 2),
    ]:
        assert [stage[name] for stage in stages] == wanted, name
    for stage in stages:
        assert 0 < stage["busy_fraction"] <= 1
        assert stage["bubble"] == pytest.approx(1 - stage["busy_fraction"])
        assert stage["stage_time_s"] == pytest.approx(stage["busy_fraction"] * summary["epoch_s"] / 12)
        assert 0 <= stage["wait"] <= stage["bubble"]  # what a rank waits it does not compute
        assert 0 <= stage["predicted_wait"] <= stage["predicted_bubble"] < 1
        spans = [e for e in events if e["ph"] == "X" and e["cat"] == "compute" and e["pid"] == stage["rank"]]
        assert len(spans) == 2 * 12 * (2 * 2 + 2)  # epochs, batches; F and B of two microbatches, an update
        assert len({(e["name"], e["args"]["window"]) for e in spans}) == len(spans)
        computed = sum(e["dur"] for e in spans) / 1e6
        # Nearly: a trace's times are stretched to rank 0's clock, by what a busy machine makes of its drift.
        assert computed == pytest.approx(stage["busy_fraction"] * 2 * summary["epoch_s"], rel=0.02)


# By measured times, one run after another


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> tuple[Ended, Path]:
    """A sweep of two runs of two processes, which are cut by times, and one that is refused; its folder."""
    folder = tmp_path_factory.mktemp("swept")
    words = [*FEW, "batch_size=64", "partition=profile", "seed=1,x,2", "run_dir=swept", "--multirun"]
    return finished(folder, [*LAUNCHED, *words]), folder


def test_multirun_is_one_run_after_another_each_in_one_folder_and_ranks_profile_together(swept):
    ended, where = swept
    assert ended.status == 2, ended.out
    summaries = [read(where / "swept" / name / "summary.json") for name in ("0", "2")]
    assert [(summary["seed"], summary["updates"]) for summary in summaries] == [(1, 4), (2, 4)]
    assert summaries[0]["val_loss"] != summaries[1]["val_loss"]
    assert [path.name for path in where.iterdir()] == ["swept"]
    lines = lines_of(ended.out)
    *_, head, first_run, _, second_run, refused, last = lines
    assert head.startswith(
        "run  seed  val loss  val acc  best val loss  best val acc  best epoch  epoch s  bubble"
    )
    assert [row.split()[:2] for row in (first_run, second_run)] == [["0", "1"], ["2", "2"]]
    assert refused == "run 1: seed=x must be a whole number of at least 0"
    assert last == f"all figures in {where}/swept/sweep.csv"
    assert sum(line.startswith("epoch 1/1: ") for line in lines) == 2
    first = lines.index("pipetrain: profiling 6 layers, 16 samples at a time")
    assert re.fullmatch(r"profiled in [\d.]+ s", lines[first + 1])
    assert lines[first + 2].startswith("partition  cut before layers  slowest stage, ms a batch  ")
    names = [line.split()[0] for line in lines[first + 3 : first + 7]]
    assert names == ["profile", "even", "params", "flops"]
    profile = read(where / "swept" / "0" / "profile.json")
    assert (profile["machine"]["ranks"], profile["layers"][0]["name"]) == (2, "hidden1")
    assert "slowest stage, ms a batch" in (where / "swept" / "0" / "plan.txt").read_text()


def test_codecs_learn_the_digits_and_the_records_say_what_they_saved(swept, tmp_path):
    """Cut by a profile from a file, which rank 0 alone reads."""
    file = shutil.copy(swept[1] / "swept" / "0" / "profile.json", tmp_path)
    words = ["model=mlp", "data=digits", "device=cpu", "epochs=3", "run_dir=here", "trace.windows=2"]
    words += [f"partition.profile={file}", "codec.forward=int8", "codec.backward=topk"]
    ended, folder = finished(tmp_path, [*TWO, *words]), tmp_path / "here"
    assert ended.status == 0, ended.out
    summary = read(folder / "summary.json")
    assert summary["partition"] == read(swept[1] / "swept" / "0" / "summary.json")["partition"]
    assert (folder / "profile.json").read_text() == Path(file).read_text()
    assert (summary["codec_forward"], summary["codec_backward"]) == ("int8", "topk")
    assert summary["val_acc"] > 0.7  # chance is 0.1
    stages = summary["per_stage"]
    assert [stage["raw_bytes"] for stage in stages] == [3 * 1437 * 128 * 4] * 2
    assert summary["bytes_per_epoch"] == sum(stage["bytes_sent"] for stage in stages) / 3
    assert summary["codec_s_per_epoch"] == sum(stage["codec_s"] for stage in stages) / 3 > 0
    assert [stage["ratio"] for stage in stages] == pytest.approx([4, 4 / 0.06], rel=0.05)
    plan = (folder / "plan.txt").read_text()
    assert "codec forward int8, backward topk\n" in plan
    assert re.search(r"float32\[16, 128\] +8,192 +2,052 +126 ", plan)
    traced = read(folder / "trace.json")
    assert traced["otherData"]["codec_backward"] == "topk"
    sent = [e["args"] for e in traced["traceEvents"] if e.get("cat") == "send"]
    assert {(args["op"], args["bytes"]) for args in sent} == {("SEND_F", 2052), ("SEND_B", 126)}
    assert all(args["codec_ms"] > 0 for args in sent)


def test_cfg_job_prints_the_configuration_once_and_leaves_nothing(tmp_path):
    ended = finished(tmp_path, [*TWO, "--cfg", "job", "batch_size=128", "schedule=gpipe"])
    assert ended.status == 0, ended.out
    assert yaml.safe_load(ended.out)["schedule"]["_target_"] == "pipetrain.schedule.programs.gpipe"
    assert ended.out.count("batch_size: 128") == 1
    assert list(tmp_path.iterdir()) == []


# In this process


def train_here(monkeypatch, folder: Path, *words: str) -> None:
    """Train in this process, as rank 0 of one, which starts quicker than another."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none", f"run_dir={folder}/run"]
    monkeypatch.setattr("sys.argv", ["pipetrain", "threads=1", *quiet, *words])
    try:
        before = given_folder(sys.argv[1:])
        start = Start(World(), words, Signals(0))
        compose("config", lambda cfg: run_job(cfg, start), lambda error: bool(discard_folder(*before)))
    finally:
        GlobalHydra.instance().clear()


def test_a_word_may_refer_to_an_option_beside_it_where_another_data_set_is_taken(monkeypatch, tmp_path):
    words = ["data.source.url=http://127.0.0.1:9/", f"data.root={tmp_path}", "logger=[]"]
    few = [word for word in FEW if word != "data=digits"]
    train_here(monkeypatch, tmp_path, *few, *words, "checkpoint.keep=${.every}")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["data"] == "digits"


def test_sigterm_ends_a_sweep_after_the_run_that_it_stops(monkeypatch, tmp_path):
    monkeypatch.setattr(Recorder, "tick", lambda *_: signal.raise_signal(signal.SIGTERM))
    train_here(monkeypatch, tmp_path, *SMALL, "epochs=9", "logger=[]", "seed=1,2", "--multirun")
    (checkpoint,) = (tmp_path / "run" / "0" / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("update-")) < 9 * 12
    assert not (tmp_path / "run" / "1").exists()


def test_a_sweep_goes_on_after_a_run_that_is_refused_and_says_so_at_its_end(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none", "logger=[]", "threads=1", "run_dir=all"]
    monkeypatch.setattr("sys.argv", ["pipetrain", *FEW, *quiet, "microbatches=999,4,2", "--multirun"])
    assert run_command(World(), Signals(0)) == 2
    GlobalHydra.instance().clear()
    why = "batch_size=128 cannot be cut into microbatches=999: choose fewer, or a larger batch_size"
    assert f"\nrun 0: {why}\nall figures in {tmp_path}/all/sweep.csv\n" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "all" / "sweep.csv").open()))
    assert [(row["run"], row["microbatches"], row["why"]) for row in rows] == [
        ("0", "999", why),
        ("1", "4", ""),
        ("2", "2", ""),
    ]
    assert sorted(path.name for path in (tmp_path / "all").glob("[0-9]")) == ["1", "2"]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("stages=40", "stages=40 needs 40 processes and there are 1"),
        ("partition.profile=none.json", "partition.profile=none.json cannot be read: No such file"),
        ("memory_limit=1e-3", "memory_limit=0.001 is too small: rank 0 is predicted to hold 0.00"),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_one_sentence_and_leaves_no_folder(
    monkeypatch, tmp_path, word, says
):
    with pytest.raises(ConfigError) as error:
        train_here(monkeypatch, tmp_path, "data=digits", "model=mlp", word)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_one_process_trains_alone_ends_what_it_left_and_goes_on(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="pipetrain")
    folder = tmp_path / "run"

    def train(*more: str) -> list[str]:
        caplog.clear()
        train_here(monkeypatch, tmp_path, *FEW, "lr_schedule=constant", "warmup=0", *more)
        return [line for record in caplog.records for line in record.getMessage().splitlines()]

    assert any("1 x cpu" in line for line in train())
    summary = read(folder / "summary.json")
    assert (summary["stages"], summary["partition"], summary["updates"]) == (1, [], 2)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (said,) = train("resume=auto")  # as where a rank is killed at its very end
    assert said.endswith("run holds this run, finished: nothing is left to do")
    metrics = (folder / "metrics.csv").read_text()
    (folder / "summary.json").unlink()  # as where it was killed between its checkpoint and its end
    train("resume=auto")
    assert (folder / "metrics.csv").read_text() == metrics
    again = read(folder / "summary.json")
    for one in (again, summary):  # what is measured while a window runs, and none did
        one["memory_bytes"] = None
        one["per_stage"] = [
            {**stage, "memory_bytes": None, "allocated_bytes": None} for stage in one["per_stage"]
        ]
    assert again == summary
    lines = train("resume=auto", "epochs=2")
    assert [match[1] for line in lines if (match := EPOCH.fullmatch(line))] == ["2"]
    rows = (folder / "metrics.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["1", "2"]
