"""What a run leaves behind, from figures made by hand."""

from __future__ import annotations

import csv
import json
import logging
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipetrain.cli import contained
from pipetrain.errors import NotRecorded
from pipetrain.records import recorder as module
from pipetrain.records.about import About
from pipetrain.records.files import Files
from pipetrain.records.history import Machine
from pipetrain.records.loggers import Loggers, Points
from pipetrain.records.recorder import Recorder
from pipetrain.records.tracer import Trace
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import Op
from pipetrain.schedule.draw import as_png
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import one_f_one_b
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Costs, StageStats
from tests.support.cases import config, prepared
from tests.support.disk import full_disk
from tests.support.figures import figures
from tests.support.traces import as_measured

MACHINE = Machine("2 x cpu", threads=1, allocator="the system's allocator")

# What the issue of the trainer promises of summary.json.
PROMISED = {"model", "data", "schedule", "stages", "partition", "batch_size", "microbatches", "buffer_size"}
PROMISED |= {
    "epochs",
    "seed",
    "val_acc",
    "best_val_acc",
    "best_epoch",
    "val_loss",
    "samples_per_s",
    "epoch_s",
}
PROMISED |= {"total_s", "updates", "per_stage"}
PROMISED |= {"codec_forward", "codec_backward", "bytes_per_epoch", "codec_s_per_epoch"}
PER_STAGE = {"params", "peak_in_flight", "peak_versions", "max_staleness", "busy_fraction", "bytes_sent"}
PER_STAGE |= {"bubble", "stage_time_s", "wait", "skipped_updates"}
PER_STAGE |= {"raw_bytes", "ratio", "codec_s"}
PER_STAGE |= {"predicted_bubble", "predicted_stage_time_s", "predicted_wait"}


PICTURE = as_png(simulate(lower(one_f_one_b(2, 1, 2)), 2))


@pytest.fixture(autouse=True)
def one_picture(monkeypatch):
    """Draw once for all tests here: what is drawn is no matter of theirs."""
    monkeypatch.setattr(module, "as_png", lambda *drawn: PICTURE)


@pytest.fixture
def made(tmp_path) -> tuple[Recorder, About, Path]:
    folder = tmp_path / "deep" / "run"
    words = ["data=digits", "model._target_=tests.support.models.with_norm", "schedule=pipedream"]
    words += ["microbatches=2", "batch_size=12", "epochs=3", "partition=[4]", "seed=5", "window=2"]
    cfg = contained(config(words), folder)
    about = prepared(cfg, "pipedream", 2, 44).about
    recorder = Recorder(folder, cfg, about, MACHINE, Files())
    recorder.begin()
    return recorder, about, folder


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return all points, (step, value), those of a stage by their name in the trackers."""
    found = {}
    for where in (folder, *sorted(folder.glob("stage*"))):
        seen = events(where)
        for tag in seen.Tags()["scalars"]:
            name = tag if where == folder else f"{tag.removeprefix('stages/')}/{where.name}"
            found[name] = [(point.step, point.value) for point in seen.Scalars(tag)]
    return found


@pytest.mark.parametrize(
    ("room", "says"), [(None, None), (2**40, "each rank fits into its GPU: of 1024 GiB")]
)
def test_the_head_says_whether_a_gpu_has_room(made, tmp_path, caplog, room, says):
    _, run, _ = made
    caplog.set_level(logging.INFO)
    cfg = contained(config(["data=digits"]), tmp_path)
    Recorder(tmp_path, cfg, run, replace(MACHINE, room=room), Files()).begin()
    said = [record.getMessage() for record in caplog.records if "GPU" in record.getMessage()]
    assert [line.startswith(str(says)) for line in said] == [True] * (room is not None)


def test_a_row_an_epoch_is_there_at_once(made):
    recorder, _, folder = made
    recorder.epoch(figures(1))
    recorder.epoch(figures(2, correct=7))
    header, first, second = csv.reader((folder / "metrics.csv").read_text().splitlines())
    assert header[:5] == ["epoch", "train_loss", "train_acc", "val_loss", "val_acc"]
    assert header[5:] == ["lr", "samples_per_s", "epoch_s", "eval_s", "elapsed_s"]
    one, two = (dict(zip(header, map(float, row), strict=True)) for row in (first, second))
    for row in (one, two):
        assert row.pop("elapsed_s") == 3 * row["epoch"]
    assert list(one.values()) == [1, 2.0, 0.25, 3.0, 0.5, 0.1, 20.0, 2.0, 0.5]
    assert (two["epoch"], two["train_loss"], two["train_acc"], two["val_acc"]) == (2, 1.0, 0.5, 0.7)
    recorder.close()


def test_the_summary_is_of_the_last_and_of_the_best_epoch(made):
    recorder, run, folder = made
    for epoch, correct in ((1, 5), (2, 9), (3, 6)):
        recorder.epoch(figures(epoch, correct, train_s=float(epoch)))
    recorder.close()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= PROMISED
    assert (summary["model"], summary["data"], summary["schedule"]) == ("with_norm", "tiny", "pipedream")
    assert (summary["stages"], summary["partition"], summary["seed"], summary["device"]) == (
        *(2, [4], 5, "2 x cpu"),
    )
    assert (summary["batch_size"], summary["microbatches"], summary["buffer_size"]) == (12, 2, 2)
    assert (summary["val_acc"], summary["best_val_acc"], summary["best_epoch"]) == (0.6, 0.9, 2)
    assert (summary["epochs"], summary["updates"]) == (3, 3 * 4)
    assert (summary["val_loss"], summary["train_acc"]) == (3.0, 0.75)
    assert summary["samples_per_s"] == 120 / 6
    assert summary["epoch_s"] == 6 / 3
    assert summary["total_s"] >= 0
    assert (summary["train_samples"], summary["test_samples"]) == (44, 11)
    stages = summary["per_stage"]
    assert all(stage.keys() >= PER_STAGE for stage in stages)
    assert [stage["layers"] for stage in stages] == [4, 6]
    assert sum(stage["params"] for stage in stages) == sum(layer.params for layer in run.plan.layers)
    assert [stage["peak_in_flight"] for stage in stages] == [2, 1]
    assert [stage["peak_versions"] for stage in stages] == [2, 1]
    assert [stage["max_staleness"] for stage in stages] == [1, 0]
    assert [stage["bytes_sent"] for stage in stages] == [3000, 1500]
    assert [(stage["raw_bytes"], stage["ratio"], stage["codec_s"]) for stage in stages] == [
        (6000, 2.0, 0.75),
        (1500, 1.0, 0.0),
    ]
    assert (summary["codec_forward"], summary["codec_backward"]) == ("identity", "identity")
    assert (summary["bytes_per_epoch"], summary["codec_s_per_epoch"]) == (1500, 0.25)
    assert [stage["busy_fraction"] for stage in stages] == [4.5 / 6, 1.5 / 6]
    assert [stage["bubble"] for stage in stages] == [1.5 / 6, 4.5 / 6]
    assert [stage["stage_time_s"] for stage in stages] == pytest.approx([4.5 / 12, 1.5 / 12])  # an update
    assert [stage["wait"] for stage in stages] == pytest.approx([1.2 / 6, 3.6 / 6])
    said = run.plan.stage_times(run.plan.timeline())
    assert [stage["predicted_bubble"] for stage in stages] == [times.bubble for times in said]
    assert [stage["predicted_wait"] for stage in stages] == [times.wait for times in said]
    assert [stage["predicted_stage_time_s"] for stage in stages] == [None, None]


def test_the_first_of_equally_good_epochs_is_the_best(made):
    recorder, _, folder = made
    for epoch, correct in ((1, 5), (2, 9), (3, 9)):
        recorder.epoch(figures(epoch, correct))
    recorder.close()
    assert json.loads((folder / "summary.json").read_text())["best_epoch"] == 2


def test_tensorboard_has_the_run(made):
    recorder, run, folder = made
    for epoch in (1, 2):
        recorder.epoch(figures(epoch))
    recorder.close()
    seen = events(folder)
    tags = seen.Tags()
    wanted = {"loss/train": [2.0, 1.0], "loss/val": [3.0, 3.0], "accuracy/train": [0.25, 0.5]}
    wanted |= {
        "accuracy/val": [0.5, 0.5],
        "speed/learning_rate": [0.1, 0.05],
        "speed/samples_per_s": [20, 20],
    }
    wanted |= {"bubble/stage0": [0.25, 0.25], "bubble/stage1": [0.75, 0.75]}
    wanted |= {"staleness/stage0": [1, 1], "staleness/stage1": [0, 0]}
    wanted |= {"wait/stage0": [0.2, 0.2], "wait/stage1": [0.6, 0.6]}
    wanted |= {"sent_mib/stage0": [1000 / 2**20] * 2, "sent_mib/stage1": [500 / 2**20] * 2}  # of an epoch
    wanted |= {"codec_s/stage0": [0.25] * 2, "codec_s/stage1": [0.0] * 2}
    wanted |= {"stage_time/stage0": [1.5 / 4] * 2, "stage_time/stage1": [0.5 / 4] * 2}  # of an update
    for stage, times in enumerate(run.plan.stage_times(run.plan.timeline())):
        wanted |= {f"bubble_predicted/stage{stage}": [times.bubble] * 2}
        wanted |= {f"wait_predicted/stage{stage}": [times.wait] * 2}
    points = scalars(folder)
    for tag, values in wanted.items():
        assert [step for step, _ in points[tag]] == [1, 2], tag
        assert [value for _, value in points[tag]] == pytest.approx(values), tag
    assert "stage_time_predicted/stage0" not in points  # nobody knows what an action costs
    assert "bubble/stage0" not in tags["scalars"]  # all stages share one chart, stages/bubble
    assert "timeline" in tags["images"]
    (image,) = seen.Images("timeline")
    assert image.width > image.height > 50
    texts = [tag for tag in tags["tensors"] if tag.startswith(("config", "data"))]
    assert len(texts) == 2
    shown = seen.Tensors(next(tag for tag in texts if tag.startswith("config")))[0]
    assert b"with_norm" in shown.tensor_proto.string_val[0]
    assert any("hparams" in tag for tag in seen.summary_metadata)
    assert {tag for tag in tags["scalars"] if tag.startswith("result/")} >= {"result/val_acc"}


def test_the_losses_of_updates_are_a_table_and_a_curve(made):
    recorder, _, folder = made
    recorder.epoch(figures(1))
    recorder.epoch(figures(2))
    rows = (folder / "updates.csv").read_text().splitlines()
    assert rows == ["update,train_loss,lr", "2,2.5,0.2", "4,1.5,0.1", "6,1.25,0.1", "8,0.75,0.05"]
    curves = scalars(folder)
    assert curves["loss/update"] == [(2, 2.5), (4, 1.5), (6, 1.25), (8, 0.75)]
    assert curves["lr/update"] == [
        (step, pytest.approx(lr)) for step, lr in ((2, 0.2), (4, 0.1), (6, 0.1), (8, 0.05))
    ]


def test_trackers_get_what_tensorboard_has_and_a_resumed_run_sends_its_history_too(made, tmp_path):
    _, run, folder = made
    cfg = contained(config(["data=digits", "logger=wandb"]), tmp_path / "again")
    loggers = _Listening()
    recorder = Recorder(tmp_path / "again", cfg, run, MACHINE, Files(), loggers)
    for each in (recorder, made[0]):
        each.begin([figures(1)])
        each.epoch(figures(2))
        each.close()
    shown = {
        tag: points for tag, points in scalars(folder).items() if not tag.startswith(("result/", "_hparams"))
    }
    for tag, points in shown.items():
        sent = [
            (step, values[tag])
            for epoch in loggers.points
            for step, values in ({epoch.epoch: epoch.values} | dict(epoch.updates)).items()
            if tag in values
        ]
        assert sorted(sent) == [(step, pytest.approx(value)) for step, value in points], tag
    assert loggers.ended == [json.loads((tmp_path / "again" / "summary.json").read_text())]
    assert not list((tmp_path / "again").glob("events*"))  # logger=wandb alone leaves TensorBoard out


class _Listening(Loggers):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[Points] = []
        self.ended: list[object] = []

    def log(self, points: Points) -> None:
        self.points.append(points)

    def finish(self, summary: object) -> None:
        self.ended.append(summary)


def test_how_late_gradients_were_is_a_bar_for_each_number(made):
    recorder, _, folder = made
    stages = {0: StageStats(4, staleness={1: 3, 3: 2**40}), 1: StageStats(4)}
    recorder.epoch(replace(figures(1), stages=stages))
    recorder.close()
    of_first, of_last = (
        events(folder / f"stage{stage}").Histograms("stages/staleness_distribution")[0].histogram_value
        for stage in (0, 1)
    )
    assert (of_first.bucket_limit, of_first.bucket) == ([0.5, 1.5, 2.5, 3.5], [0, 3, 0, 2**40])
    assert (of_first.min, of_first.max, of_first.num, of_first.sum) == (1, 3, 2**40 + 3, 3 * 2**40 + 3)
    assert (of_last.bucket_limit, of_last.bucket) == ([0.5], [1])


def test_epochs_of_another_pipeline_say_nothing_of_these_stages(tmp_path):
    """One that was trained on two stages, and one on three."""
    words = ["data=digits", "model._target_=tests.support.models.with_norm", "schedule=1f1b", "epochs=2"]
    cfg = contained(config([*words, "microbatches=3", "batch_size=12"]), tmp_path)
    recorder = Recorder(tmp_path, cfg, prepared(cfg, "1f1b", 3, 44).about, MACHINE, Files())
    recorder.begin([replace(figures(1), stages={})])
    now = figures(2)
    recorder.epoch(replace(now, stages={**now.stages, 2: now.stages[1]}))
    recorder.close()
    seen = events(tmp_path)
    assert [scalar.step for scalar in seen.Scalars("accuracy/val")] == [1, 2]
    assert [step for step, _ in scalars(tmp_path)["bubble/stage2"]] == [2]
    assert len(json.loads((tmp_path / "summary.json").read_text())["per_stage"]) == 3


def test_the_folder_says_what_ran_before_the_first_epoch(made):
    recorder, _, folder = made
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["run_dir"] == str(folder)
    assert written["model"]["_target_"] == "tests.support.models.with_norm"
    assert written["epochs"] == 3
    assert "${" not in (folder / "config.yaml").read_text()  # it stands by itself
    assert matplotlib.image.imread(folder / "timeline.png").shape[1] > 100
    recorder.epoch(figures(1))
    recorder.close()


def test_a_run_is_shown_under_its_name():
    assert module._tensorboard(Path("runs/a")) == "tensorboard --logdir runs"
    assert module._tensorboard(Path("elsewhere/a")) == "tensorboard --logdir_spec a:elsewhere/a"


def test_the_log_has_the_data_set_a_line_an_epoch_and_where_to_look(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="pipetrain")
    cfg = contained(config(["data=digits", "model=mlp", "epochs=2"]), tmp_path)
    run = prepared(cfg, "1f1b", 2, 128, 64).about
    run = replace(run, data=replace(run.data, note="what was asked for is not there"))
    recorder = Recorder(tmp_path, cfg, run, MACHINE, Files())
    recorder.begin()
    recorder.epoch(figures(1))
    recorder.epoch(figures(2, correct=9))
    recorder.close()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "pipetrain: mlp on tiny (128 train, 64 test samples), schedule 1f1b, 2 x cpu"
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert len(epochs) == 2
    assert epochs[1].startswith("epoch 2/2: train loss 1.0000, acc 50.00 %; val loss 3.0000, acc 90.00 %; ")
    assert "20 samples/s, 2.5 s" in epochs[1]
    assert "what was asked for is not there" in lines
    assert lines[-1] == f"look at it: tensorboard --logdir_spec {tmp_path.name}:{tmp_path}"
    assert lines[-2] == f"run folder: {tmp_path}"
    assert (
        json.loads((tmp_path / "summary.json").read_text())["data_note"] == "what was asked for is not there"
    )


# Stages, measured against predicted


def with_costs(run: About) -> About:
    costs = Costs({(s, op): n for s in (0, 1) for op, n in ((Op.F, 0.01), (Op.B, 0.02))})
    return replace(run, plan=replace(run.plan, costs=costs))


def test_a_stage_s_seconds_are_predicted_where_the_costs_are_known(made, tmp_path):
    _, run, _ = made
    cfg = contained(config(["data=digits"]), tmp_path)
    recorder = Recorder(tmp_path, cfg, with_costs(run), MACHINE, Files())
    recorder.begin()
    recorder.epoch(figures(1))
    recorder.close()
    stages = json.loads((tmp_path / "summary.json").read_text())["per_stage"]
    assert [stage["predicted_stage_time_s"] for stage in stages] == pytest.approx([0.06, 0.06])
    assert scalars(tmp_path)["stage_time_predicted/stage1"] == [(1, pytest.approx(0.06))]


def test_the_end_of_a_run_says_each_stage_s_times(made, caplog):
    recorder, _, _ = made
    caplog.set_level(logging.INFO, logger="pipetrain")
    recorder.epoch(figures(1))
    recorder.close()
    (said,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("stage  bubble")]
    assert [line.split()[:2] for line in said.splitlines()[1:3]] == [["0", "25.0%"], ["1", "75.0%"]]


# The trace


@pytest.mark.parametrize("cut", ["", "where the run was stopped"])
def test_a_trace_is_written_and_said_once(made, caplog, cut):
    recorder, run, folder = made
    caplog.set_level(logging.INFO, logger="pipetrain")
    program = run.plan.window.program
    costs = Costs({(s, op): 0.01 for s in (0, 1) for op in (Op.F, Op.B)})
    recorder.trace(Trace(as_measured(program, costs), cut, 1e-5))
    (said,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("trace of")]
    assert said == (
        f"trace of 1 window in {folder}/trace.json"
        + (f"; it ends {cut}" if cut else "")
        + "; open it at https://ui.perfetto.dev"
    )
    about, (window,) = chrome.read(folder / "trace.json")
    assert about["partition"] == [4]
    assert [row.actions for row in window.timeline.rows] == program
    recorder.epoch(figures(1))
    recorder.close()


# A full disk


def warned(caplog) -> list[str]:
    """Name the files of which it was said that they cannot be written."""
    said = re.compile(r"pipetrain: \S+/(\S+) cannot be written: File too large; training goes on, and it is ")
    return [found[1] for record in caplog.records if (found := said.match(record.getMessage()))]


def test_a_stop_whose_checkpoint_was_lost_says_so_and_keeps_the_records(twin, tmp_path):
    twin.begin()
    twin.epoch(figures(1))
    with pytest.raises(NotRecorded, match="ended, and the checkpoint of update 7 was NOT saved, so what"):
        twin.stop(not_saved=7)
    assert len((tmp_path / "again" / "metrics.csv").read_text().splitlines()) == 2


@pytest.fixture
def twin(made, tmp_path) -> Recorder:
    """Another recorder of the same run, as a resumed one has, whose folder is tmp_path/again."""
    _, run, _ = made
    again = Recorder(tmp_path / "again", contained(config([]), tmp_path / "again"), run, MACHINE, Files())
    again.begin()
    return again


@pytest.mark.parametrize("full", [{1}, {2, 3}, {1, 2, 3}, {4}])
def test_what_a_full_disk_took_is_written_when_there_is_room(made, twin, tmp_path, caplog, full):
    recorder, _, folder = made
    written = 0
    for epoch in (1, 2, 3, 4):
        twin.epoch(figures(epoch))
        with full_disk() if epoch in full else nullcontext():
            recorder.epoch(figures(epoch))
        rows = list(csv.reader((folder / "metrics.csv").read_text().splitlines()))
        assert all(len(row) == 10 for row in rows)  # none of them is a half
        written = written if epoch in full else epoch
        assert len(rows) == 1 + written
    twin.close()
    recorder.close()
    for name in ("metrics.csv", "updates.csv", "summary.json"):
        assert (folder / name).read_text() == (tmp_path / "again" / name).read_text()
    assert scalars(folder) == scalars(tmp_path / "again")
    assert [step for step, _ in scalars(folder)["loss/train"]] == [1, 2, 3, 4]
    tags = events(folder).Tags()
    assert tags["images"] == ["timeline"]
    assert [name.split(".")[0] for name in warned(caplog)] == ["metrics", "updates", "events"]  # each once


def test_a_disk_that_is_full_at_the_start_is_no_end_and_all_is_there_later(tmp_path, caplog):
    cfg = contained(config(["data=digits", "model=mlp"]), tmp_path)
    run = prepared(cfg, "1f1b", 2, 128, 64).about
    with full_disk():
        recorder = Recorder(tmp_path, cfg, run, MACHINE, Files())
        recorder.begin()
        recorder.epoch(figures(1))
    names = ["config.yaml", "timeline.png", "metrics.csv", "updates.csv", recorder._events.path.name]
    assert warned(caplog) == names
    assert {path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()} <= {0}
    recorder.epoch(figures(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "stage0", "stage1"])
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["run_dir"] == str(tmp_path)
    assert matplotlib.image.imread(tmp_path / "timeline.png").shape[1] > 100
    assert [step for step, _ in scalars(tmp_path)["loss/train"]] == [1, 2]
    recorder.close()


def test_what_there_was_no_room_for_is_tried_a_last_time_when_a_run_ends_or_stops(made, twin, tmp_path):
    recorder, _, folder = made
    for each in (recorder, twin):
        with full_disk():
            each.epoch(figures(1))
    recorder.close()
    twin.stop(not_saved=None)
    for where in (folder, tmp_path / "again"):
        assert len((where / "metrics.csv").read_text().splitlines()) == 2
        assert [step for step, _ in scalars(where)["loss/train"]] == [1]


def test_a_disk_that_takes_half_a_record_leaves_none_spoilt(made, caplog):
    recorder, _, folder = made
    recorder.epoch(figures(1))
    size = recorder._events.path.stat().st_size
    with full_disk(room=size + 100):
        recorder.epoch(figures(2))
    assert warned(caplog) == [recorder._events.path.name]
    recorder.epoch(figures(3))
    assert [step for step, _ in scalars(folder)["bubble/stage1"]] == [1, 2, 3]


def test_a_trace_and_a_policy_s_programs_are_kept_until_there_is_room(made, caplog):
    recorder, run, folder = made
    caplog.set_level(logging.INFO, logger="pipetrain")
    costs = Costs({(s, op): 0.01 for s in (0, 1) for op in (Op.F, Op.B)})
    windows = as_measured(run.plan.window.program, costs)
    with full_disk():
        recorder.programs(1, [run.plan.window.program])
        recorder.epoch(figures(1))
        recorder.trace(Trace(windows, True, 1e-5))
    assert not {"trace.json", "ran.txt"} & {path.name for path in folder.iterdir()}
    recorder.epoch(figures(2))
    assert chrome.read(folder / "trace.json")[0]["partition"] == [4]
    assert (folder / "ran.txt").read_text().startswith("# epoch 1, window 1 of 1\n")
    said = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("trace of 1 window in") for line in said) == 1
    assert sorted(warned(caplog))[1:] == ["metrics.csv", "ran.txt", "trace.json", "updates.csv"]


def test_a_folder_that_was_removed_is_made_again_with_all_rows_and_points(made):
    recorder, _, folder = made
    recorder.epoch(figures(1))
    shutil.rmtree(folder)
    recorder.epoch(figures(2))
    recorder.close()
    assert len((folder / "metrics.csv").read_text().splitlines()) == 3
    assert [step for step, _ in scalars(folder)["loss/train"]] == [1, 2]


@pytest.mark.parametrize("name", ["summary.json", "metrics.csv"])
def test_a_run_whose_records_cannot_be_written_is_not_taken_for_a_finished_one(made, twin, name):
    recorder, _, folder = made
    recorder.epoch(figures(1))
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(NotRecorded) as error:
        recorder.close()
    assert str(error.value) == (
        f"the run has finished, but {name} cannot be written: Is a directory; make room and start it again "
        f"with run_dir={folder} resume=auto"
    )
    assert not (folder / "summary.json").is_file()


def test_a_disk_that_is_full_at_the_end_leaves_no_summary_and_a_resumed_run_writes_it(made, twin, tmp_path):
    recorder, _, folder = made
    with full_disk():
        recorder.epoch(figures(1))
        with pytest.raises(
            NotRecorded, match=r"but metrics.csv, updates.csv, events\S+ cannot be written: File too large; m"
        ):
            recorder.close()
    assert not (folder / "summary.json").exists()
    twin.begin([figures(1)])
    twin.close()
    assert json.loads((tmp_path / "again" / "summary.json").read_text())["epochs"] == 1
    assert [step for step, _ in scalars(tmp_path / "again")["loss/train"]] == [1]
