"""What a run leaves behind, from figures made by hand."""

from __future__ import annotations

import csv
import json
import logging
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import matplotlib.image
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipetrain.commands.cli import as_mapping, contained
from pipetrain.errors import NotRecorded
from pipetrain.records import recorder as module
from pipetrain.records.recorder import Recorder
from pipetrain.records.run_folder import RunFolder
from pipetrain.records.tracer import Trace
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import Op
from pipetrain.schedule.lower import lower
from pipetrain.schedule.plot import as_png
from pipetrain.schedule.programs import one_f_one_b
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Costs, StageStats
from tests.support.cases import config, options_of, prepared
from tests.support.run_files import as_measured, figures, full_disk

PICTURE = as_png(simulate(lower(one_f_one_b(2, 1, 2)), 2))
WORDS = ["data=digits", "model._target_=tests.support.models.with_norm", "schedule=pipedream", "epochs=3"]
WORDS += ["microbatches=2", "batch_size=12", "partition=[4]", "seed=5", "window=2"]
ABOUT = replace(prepared(options_of([*WORDS, "run_dir=here"]), "pipedream", 2, 44).about, device="2 x cpu")
PROGRAM = ABOUT.plan.window.program
COSTS = Costs({(s, op): n for s in (0, 1) for op, n in ((Op.F, 0.01), (Op.B, 0.02))})


@pytest.fixture(autouse=True)
def one_picture(monkeypatch):
    """Draw once for all tests here: what is drawn is no matter of theirs."""
    monkeypatch.setattr(module, "as_png", lambda *drawn: PICTURE)


def begun(folder: Path | None, *words: str, about: Any = ABOUT, done=()) -> Recorder:
    made = Recorder(about)
    if folder is not None:
        run = as_mapping(contained(config([*WORDS, *words]), folder))
        made = Recorder(about, RunFolder(folder, "a run", None, run))
    made.begin(done)
    return made


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "deep" / "run"


@pytest.fixture
def recorder(folder) -> Recorder:
    return begun(folder)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return all points, (step, value), those of a stage by their name in the trackers."""
    found = {}
    for where in (folder, *sorted(folder.glob("stage*"))):
        seen = EventAccumulator(str(where)).Reload()
        for tag in seen.Tags()["scalars"]:
            name = tag if where == folder else f"{tag.removeprefix('stages/')}/{where.name}"
            found[name] = [(point.step, point.value) for point in seen.Scalars(tag)]
    return found


def rows(file: Path) -> list[list[str]]:
    return list(csv.reader(file.read_text().splitlines()))


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "pipetrain"]


def test_a_resumed_run_of_three_epochs_in_its_files_in_tensorboard_and_in_the_log(
    folder, caplog, monkeypatch
):
    caplog.set_level(logging.INFO, logger="pipetrain")
    data, trackers = replace(ABOUT.data, note="what was asked for is not there"), Mock()
    monkeypatch.setattr(module, "Trackers", Mock(return_value=trackers))
    about = replace(ABOUT, data=data, room=2**40, plan=replace(ABOUT.plan, costs=COSTS))
    recorder = begun(folder, about=about, done=[figures(1)])
    assert len(rows(folder / "metrics.csv")) == 2
    recorder.epoch(figures(2, correct=9))
    recorder.epoch(figures(3, correct=9, train_s=4.0))
    recorder.trace(Trace(as_measured(PROGRAM, COSTS), "where the run was stopped", 1e-5))
    recorder.close()

    header, first, second, _ = rows(folder / "metrics.csv")
    names = "epoch,train_loss,train_acc,val_loss,val_acc,lr,samples_per_s,epoch_s,eval_s,elapsed_s"
    assert ",".join(header) == names
    assert list(map(float, first)) == [1, 2.0, 0.25, 3.0, 0.5, 0.1, 20.0, 2.0, 0.5, 3.0]
    assert list(map(float, second)) == [2, 1.0, 0.5, 3.0, 0.9, 0.05, 20.0, 2.0, 0.5, 6.0]
    wanted = ["update,train_loss,lr", "2,2.5,0.2", "4,1.5,0.1", "6,1.25,0.1", "8,0.75,0.05"]
    assert [",".join(row) for row in rows(folder / "updates.csv")][:5] == wanted
    written = (folder / "config.yaml").read_text()
    assert "${" not in written  # it stands by itself
    assert (yaml.safe_load(written)["run_dir"], yaml.safe_load(written)["epochs"]) == (str(folder), 3)
    assert matplotlib.image.imread(folder / "timeline.png").shape[1] > 100
    traced, (window,) = chrome.read(folder / "trace.json")
    assert traced["partition"] == [4]
    assert [row.actions for row in window.timeline.rows] == PROGRAM

    summary = json.loads((folder / "summary.json").read_text())
    totals = {"model": "with_norm", "schedule": "pipedream", "partition": [4], "device": "2 x cpu"}
    totals |= {"val_acc": 0.9, "best_val_acc": 0.9, "best_epoch": 2, "epochs": 3, "updates": 12}
    totals |= {"samples_per_s": 15.0, "epoch_s": 8 / 3, "train_samples": 44, "test_samples": 11}
    totals |= {"bytes_per_epoch": 1500, "codec_s_per_epoch": 0.25, "total_s": 9.0, "data_note": data.note}
    assert {key: summary[key] for key in totals} == totals
    planned = about.plan.stage_times()
    of_stages: dict[str, Any] = {"layers": [4, 6], "peak_in_flight": [2, 1], "peak_versions": [2, 1]}
    of_stages |= {"max_staleness": [1, 0], "bytes_sent": [3000, 1500], "raw_bytes": [6000, 1500]}
    of_stages |= {"ratio": [2.0, 1.0], "codec_s": [0.75, 0.0], "busy_fraction": [4.5 / 8, 1.5 / 8]}
    of_stages |= {"bubble": [3.5 / 8, 6.5 / 8], "stage_time_s": [4.5 / 12, 1.5 / 12]}  # an update
    of_stages |= {"wait": pytest.approx([1.2 / 8, 3.6 / 8]), "skipped_updates": [0, 0]}
    of_stages |= {"predicted_bubble": [times.bubble for times in planned]}
    of_stages |= {"predicted_stage_time_s": pytest.approx([0.06, 0.06])}
    stages = summary["per_stage"]
    assert {key: [stage[key] for stage in stages] for key in of_stages} == of_stages
    assert sum(stage["params"] for stage in stages) == sum(layer.params for layer in ABOUT.plan.layers)

    points = scalars(folder)
    charted = {"loss/train": [2.0, 1.0], "accuracy/val": [0.5, 0.9]}
    of_stage = {"bubble": (0.25, 0.75), "staleness": (1, 0), "wait": (0.2, 0.6), "codec_s": (0.25, 0.0)}
    of_stage |= {"sent_mib": (1000 / 2**20, 500 / 2**20), "stage_time": (1.5 / 4, 0.5 / 4)}  # an update
    of_stage |= {"bubble_predicted": tuple(times.bubble for times in planned)}
    of_stage |= {"stage_time_predicted": (0.06, 0.06)}
    charted |= {f"{name}/stage{n}": [v] * 2 for name, of in of_stage.items() for n, v in enumerate(of)}
    for tag, values in charted.items():
        assert points[tag][:2] == [(n, pytest.approx(value)) for n, value in enumerate(values, 1)], tag
    assert points["loss/update"][:4] == [(2, 2.5), (4, 1.5), (6, 1.25), (8, 0.75)]
    assert points["lr/update"][:4] == [
        (n, pytest.approx(x)) for n, x in ((2, 0.2), (4, 0.1), (6, 0.1), (8, 0.05))
    ]
    assert [tag for tag in points if "rate" in tag or "lr" in tag] == ["lr/update"]
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()
    assert "bubble/stage0" not in tags["scalars"]  # all stages share one chart, stages/bubble
    assert {tag for tag in tags["scalars"] if tag.startswith("result/")} >= {"result/val_acc"}
    assert any("hparams" in tag for tag in events.summary_metadata)
    (image,) = events.Images("timeline")
    assert image.width > image.height > 50
    (text,) = (tag for tag in tags["tensors"] if tag.startswith("config"))
    assert b"with_norm" in events.Tensors(text)[0].tensor_proto.string_val[0]
    trackers.write.assert_called_with(recorder._history.epochs)  # from which TensorBoard's values are too
    trackers.close.assert_called_once_with(summary)

    lines = said(caplog)
    assert lines[0] == "pipetrain: with_norm on tiny (44 train, 11 test samples), schedule pipedream, 2 x cpu"
    assert lines[1].startswith("2 stages, cut before layers [4]; batch 12 in 2 microbatches; bubble ")
    assert lines[3] == f"3 epochs, 12 updates, seed 5; records in {folder}"
    assert "the 1024 GiB of its GPU" in lines[4]
    told = "epoch 2/3: train loss 1.0000, acc 50.00 %; val loss 3.0000, acc 90.00 %; 20 samples/s, 2.5 s"
    assert told in lines
    told = f"trace of 1 window in {folder}/trace.json; it ends where the run was stopped; open it at https"
    assert [line.startswith(told) for line in lines if line.startswith("trace of")] == [True]
    assert lines[-6].startswith("rank 1 neither computes nor waits in 36.3% of the time, which is a bubble")
    assert lines[-5].startswith("rank 0 is the straggler: 0.3750 s a batch, 1.50 times the mean of all ranks")
    assert lines[-4] == "with_norm on tiny: val acc 90.00 % (best 90.00 %, epoch 2) in 9 s"
    assert lines[-3:-1] == [data.note, f"run folder: {folder}"]
    assert lines[-1] == f"look at it: tensorboard --logdir_spec {folder.name}:{folder}"


def test_the_loggers_may_leave_tensorboard_out_and_nobody_knows_what_an_action_costs(folder):
    recorder = begun(folder, "logger=[]", done=[figures(1)])
    recorder.close()
    assert not list(folder.glob("**/events*"))
    summary = json.loads((folder / "summary.json").read_text())
    assert [stage["predicted_stage_time_s"] for stage in summary["per_stage"]] == [None] * 2


def test_of_several_ranks_of_a_stage_each_is_in_its_chart_and_the_log_names_them(folder, caplog):
    caplog.set_level(logging.INFO, logger="pipetrain")
    words = [*WORDS, "run_dir=here", "replicas=[2,1]"]
    about = prepared(options_of(words), "pipedream", 3, 44).about
    recorder = begun(folder, about=about)
    did = [{0: StageStats(4, 1.0)}, {0: StageStats(4, 2.0)}, {1: StageStats(4, 0.5)}]
    stages = {0: StageStats(4, 1.5), 1: StageStats(4, 0.5, 1.5)}
    recorder.epoch(replace(figures(1), stages=stages), ranks=did)
    recorder.close()
    points = scalars(folder)
    assert [points[f"stage_time/stage0{of}"] for of in ("", "-rank0", "-rank1")] == [
        [(1, time)] for time in (0.375, 0.25, 0.5)
    ]
    lines = said(caplog)
    assert lines[1].startswith("2 stages on ranks 0-1.2, cut before layers [4]; ")
    (launches,) = (line for line in lines if "neither computes nor waits" in line)
    assert launches.startswith("a rank of stage 0 neither computes nor waits in 25.0% of the time, ")
    assert " backwards, of 1.9e+02 ms, " in launches  # each rank has one of two microbatches
    assert any(line.startswith("rank 1 is the straggler: 0.5000 s a batch") for line in lines)


# A full disk


def warned(caplog) -> list[str]:
    """Name the files of which it was said that they cannot be written."""
    told = re.compile(r"pipetrain: \S+/(\S+) cannot be written: File too large; training goes on, and it is ")
    return [found[1] for line in said(caplog) if (found := told.match(line))]


def test_what_a_full_disk_took_is_written_when_there_is_room(recorder, folder, caplog):
    twin = begun(folder.with_name("twin"))
    for epoch in (1, 2, 3, 4):
        twin.epoch(figures(epoch))
        with full_disk() if epoch in (2, 3) else nullcontext():
            recorder.epoch(figures(epoch))
        assert len(rows(folder / "metrics.csv")) == (2 if epoch in (2, 3) else epoch + 1)
    for each in (recorder, twin):
        each.close()
    for name in ("metrics.csv", "updates.csv", "summary.json"):
        assert (folder / name).read_text() == (folder.with_name("twin") / name).read_text()
    assert scalars(folder) == scalars(folder.with_name("twin"))
    assert warned(caplog) == ["metrics.csv", "updates.csv", "events"]  # each once


def test_a_disk_that_is_full_at_the_start_is_no_end_and_all_is_there_later(folder, caplog):
    with full_disk():
        recorder = begun(folder)
        recorder.programs(1, [PROGRAM])
        recorder.epoch(figures(1))
        recorder.trace(Trace(as_measured(PROGRAM, COSTS), "", 1e-5))
    lost = [
        "config.yaml",
        "timeline.png",
        "plan.txt",
        "events",
        "ran.txt",
        "metrics.csv",
        "updates.csv",
        "trace.json",
    ]
    assert warned(caplog) == lost
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    recorder.epoch(figures(2))
    assert {path.name for path in folder.iterdir()} >= {*lost} - {"events"}
    assert (folder / "ran.txt").read_text().startswith("# epoch 1, window 1 of 1\n")
    assert [step for step, _ in scalars(folder)["loss/train"]] == [1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_events_that_a_disk_took_half_of_are_begun_anew(recorder, folder, caplog, monkeypatch):
    """It had room when that was tried, and then none."""
    from pipetrain.records import tensorboard

    recorder.epoch(figures(1))
    monkeypatch.setattr(tensorboard, "ROOM", 1)
    (file,) = folder.glob("events*")
    with full_disk(room=file.stat().st_size + 100):
        recorder.epoch(figures(2))
    assert warned(caplog) == ["events"]
    recorder.epoch(figures(3))
    for tag in ("bubble/stage1", "loss/train"):
        assert [step for step, _ in scalars(folder)[tag]] == [1, 2, 3]


def test_a_run_that_stops_or_whose_records_cannot_be_written_is_not_taken_for_a_finished_one(
    recorder, folder, caplog
):
    caplog.set_level(logging.INFO, logger="pipetrain")
    with full_disk():
        recorder.epoch(figures(1))
    with pytest.raises(NotRecorded, match="ended, and the checkpoint of update 7 was NOT saved, so what"):
        recorder.stop(not_saved=7)
    assert len(rows(folder / "metrics.csv")) == 2  # a last try
    recorder.stop(not_saved=None)
    assert said(caplog)[-1] == f"stopped after a checkpoint; go on with: run_dir={folder} resume=auto"
    (folder / "metrics.csv").unlink()
    (folder / "metrics.csv").mkdir()
    with pytest.raises(NotRecorded, match=r"but metrics\.csv cannot be written: Is a dir.*; make room and"):
        recorder.close()
    assert not (folder / "summary.json").exists()


def test_without_a_folder_a_training_is_shown_and_nothing_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, logger="pipetrain")
    recorder = begun(None)
    recorder.programs(1, [PROGRAM])
    recorder.epoch(figures(1))
    recorder.trace(Trace(as_measured(PROGRAM, COSTS), "", 1e-5))
    recorder.close()
    assert said(caplog)[3] == "3 epochs, 12 updates, seed 5"
    assert said(caplog)[-1].startswith("with_norm on tiny: val acc 50.00 %")
    assert list(tmp_path.iterdir()) == []
