"""Trackers: what Weights & Biases and MLflow have of a run, read from their offline modes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

import pytest

from pipetrain.errors import ConfigError
from pipetrain.records import loggers as module
from pipetrain.records.files import Files
from pipetrain.records.loggers import Points, check_loggers, start_loggers
from tests.support.cases import config
from tests.support.deadlines import DEADLINE_S

NAMES = ["wandb", "mlflow"]
Values = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No server, no account, and MLflow's store of plain files, which is made in no time."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "NETRC"):
        monkeypatch.delenv(name, raising=False)


def points(epoch: int, loss: float = 1.0) -> Points:
    """Four updates an epoch, of which the 2nd and the 4th are recorded."""
    updates = {4 * epoch - left: {"loss/update": loss + left, "lr/update": 0.1} for left in (2, 0)}
    return Points(epoch, 1_000_000.0 + epoch, {"loss/train": loss, "bubble/stage0": 0.25}, updates)


def started(name: str, folder: Path, run: str = "a") -> Any:
    """Start a tracker as `logger=NAME` does; to be used in a with statement."""
    pytest.importorskip(name, reason=f"pip install pipetrain[{name}]")
    words = {
        "wandb": ["logger.wandb.mode=offline"],
        "mlflow": [f"logger.mlflow.uri=file://{folder.parent}/mlruns"],
    }
    folder.mkdir(exist_ok=True)
    return start_loggers(configured(f"logger={name}", *words[name]), folder, run, _Written())


def configured(*words: str) -> Any:
    return config([*words, "run_dir=here", "model=mlp", "data=digits"])


class _Written(Files):
    """Writes at once."""

    def text(self, path: Path, text: str) -> None:
        path.write_text(text)


def recorded(name: str, folder: Path) -> tuple[Values, dict[str, Any], dict[str, Any], str]:
    """Return what the tracker has of a folder's run: values, configuration, results and status."""
    id = json.loads((folder / "loggers.json").read_text())["ids"][name]
    return {"wandb": _of_wandb, "mlflow": _of_mlflow}[name](folder, id)


def _of_mlflow(folder: Path, id: str) -> tuple[Values, dict[str, Any], dict[str, Any], str]:
    from mlflow import MlflowClient

    client = MlflowClient(f"file://{folder.parent}/mlruns")
    run = client.get_run(id)
    values = {
        key: [(metric.step, metric.value) for metric in client.get_metric_history(id, key)]
        for key in run.data.metrics
    }
    results = {key.removeprefix("result/"): values.pop(key)[0][1] for key in [*values] if "result/" in key}
    return values, run.data.params, results, run.info.status


def _of_wandb(folder: Path, id: str) -> tuple[Values, dict[str, Any], dict[str, Any], str]:
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert path.name == f"run-{id}.wandb"
    end = monotonic() + DEADLINE_S  # wandb's own process may still write when the run has been finished
    while not any(record.HasField("exit") for record in _records(path)) and monotonic() < end:
        sleep(0.02)
    values: Values = defaultdict(list)
    read, results, status = {}, {}, "running"
    for record in _records(path):
        if record.HasField("run"):
            read = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        results |= {item.key: json.loads(item.value_json) for item in record.summary.update if item.key}
        if record.HasField("exit"):
            status = "KILLED" if record.exit.exit_code else "FINISHED"
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for key in row.keys() - {"epoch", "_step", "_timestamp", "_runtime"}:
            step = row["_step"] if key.endswith("/update") else row["epoch"]
            values[key].append((step, row[key]))
    return values, read, results, status


def _records(path: Path) -> Iterator[Any]:
    """Read a log of LevelDB's format: blocks of 32 KiB of pieces, each after 7 bytes of header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, last = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6] in (1, 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if last:
            yield Record.FromString(record)
            record = b""


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_has_the_values_the_configuration_and_the_results(name, tmp_path):
    with started(name, tmp_path / "run") as loggers:
        for epoch in (1, 2):
            loggers.log(points(epoch, loss=1 / epoch))
        loggers.finish({"val_acc": 0.5, "model": "mlp"})
    values, read, results, status = recorded(name, tmp_path / "run")
    assert values == {
        "loss/train": [(1, 1.0), (2, 0.5)],
        "bubble/stage0": [(1, 0.25), (2, 0.25)],
        "loss/update": [(2, 3.0), (4, 1.0), (6, 2.5), (8, 0.5)],
        "lr/update": [(step, 0.1) for step in (2, 4, 6, 8)],
    }
    assert str(read["batch_size"]) == "64"
    assert "pipetrain.models.mlp" in (read.get("model._target_") or read["model"]["_target_"])
    assert results["val_acc"] == 0.5
    assert status == "FINISHED"


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_continues_the_tracker_s_run_and_doubles_no_point(name, tmp_path):
    """The first start was killed after epoch 2, and its checkpoint is that of epoch 1."""
    folder = tmp_path / "run"
    with started(name, folder) as loggers:
        loggers.log(points(1))
        loggers.log(points(2))
    first = (folder / "loggers.json").read_text()
    assert recorded(name, folder)[3] == "KILLED"
    with started(name, folder) as loggers:
        for epoch in (1, 2, 3):
            loggers.log(points(epoch))
        loggers.finish({})
    assert (folder / "loggers.json").read_text() == first
    values, _, _, status = recorded(name, folder)
    assert [step for step, _ in values["loss/train"]] == [1, 2, 3]
    assert [step for step, _ in values["loss/update"]] == [2, 4, 6, 8, 10, 12]
    assert status == "FINISHED"


@pytest.mark.parametrize("name", NAMES)
def test_another_run_in_the_same_folder_is_another_one_for_the_tracker(name, tmp_path):
    ids = []
    for run in ("a", "b"):
        with started(name, tmp_path / "run", run):
            ids.append(json.loads((tmp_path / "run" / "loggers.json").read_text())["ids"][name])
    assert ids[0] != ids[1]


def test_mlflow_gets_more_values_than_it_takes_at_once(tmp_path):
    many = points(1)._replace(updates={n: {"loss/update": 1.0, "lr/update": 0.1} for n in range(1, 1202)})
    with started("mlflow", tmp_path / "run") as loggers:
        loggers.log(many)
    assert len(recorded("mlflow", tmp_path / "run")[0]["lr/update"]) == 1201


def test_mlflow_s_default_store_is_a_file(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="pip install pipetrain[mlflow]")
    pytest.importorskip("sqlalchemy", reason="pip install pipetrain[mlflow]")
    monkeypatch.chdir(tmp_path)
    with start_loggers(configured("logger=mlflow"), tmp_path, "a", _Written()) as loggers:
        loggers.log(points(1))
    assert (tmp_path / "mlflow.db").stat().st_size > 0


# Without a library: what is done with a tracker that fails


class Fake:
    """Takes what it is given, or fails, or waits."""

    id = "fake"

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.ended: list[object] = []
        self.fails = False
        self.waits: Callable[[], object] = lambda: None

    def log(self, points: Points) -> None:
        self.waits()
        if self.fails:
            raise OSError("no\n network")
        self.taken.append(points.epoch)

    def finish(self, summary: object) -> None:
        self.ended.append(summary)


@pytest.fixture
def fakes(monkeypatch) -> dict[str, Fake]:
    """Take the place of the libraries."""
    made = {name: Fake() for name in NAMES}
    monkeypatch.setattr(
        module, "LIBRARIES", {name: lambda *_, fake=fake: fake for name, fake in made.items()}
    )
    return made


def both(folder: Path) -> Any:
    return start_loggers(configured("logger=[wandb,mlflow]"), folder, "a", Files())


def test_what_a_tracker_did_not_take_is_sent_again_and_the_other_has_it(fakes, tmp_path, caplog):
    one, other = fakes.values()
    with both(tmp_path) as loggers:
        one.fails = True
        loggers.log(points(1))
        loggers.log(points(2))
        loggers._thread.submit(setattr, one, "fails", False)
        loggers.log(points(3))
        loggers.finish({})
    assert one.taken == other.taken == [1, 2, 3]
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == (
        "pipetrain: logger=wandb fails: no network; training goes on, and the values are sent again later"
    )


def test_values_that_never_arrive_are_named_at_the_end(fakes, tmp_path, caplog):
    fakes["mlflow"].fails = True
    with both(tmp_path) as loggers:
        loggers.log(points(1))
        loggers.finish({})
    assert [record.getMessage() for record in caplog.records][1:] == [
        "pipetrain: logger=mlflow lacks epoch 1 and later"
    ]
    assert fakes["wandb"].taken == [1]


def test_a_tracker_that_hangs_delays_neither_the_training_nor_the_end(fakes, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(module, "FINISH_S", 0.01)
    free = Event()
    fakes["mlflow"].waits = lambda: free.wait(DEADLINE_S)
    with both(tmp_path) as loggers:
        loggers.log(points(1))
        loggers.finish({})
        assert not free.is_set()
        assert fakes["mlflow"].taken == []
    free.set()
    assert "wandb, mlflow did not take the last values in time" in caplog.text


def test_trackers_are_ended_once_whatever_happens(fakes, tmp_path):
    with pytest.raises(KeyboardInterrupt), both(tmp_path):
        raise KeyboardInterrupt
    with both(tmp_path) as loggers:
        loggers.finish({"val_acc": 1.0})
    assert fakes["wandb"].ended == fakes["mlflow"].ended == [None, {"val_acc": 1.0}]


def test_one_that_cannot_start_is_refused_and_the_others_are_ended(fakes, tmp_path, monkeypatch):
    def refuse(*_: object) -> Fake:
        raise OSError("connection\nrefused")

    monkeypatch.setitem(module.LIBRARIES, "mlflow", refuse)
    with pytest.raises(ConfigError) as error, both(tmp_path):
        pass
    assert str(error.value) == (
        "logger=mlflow cannot start: connection refused; see logger.mlflow in the configuration, or leave "
        "it out"
    )
    assert fakes["wandb"].ended == [None]


def test_without_trackers_there_is_no_thread_and_no_file(tmp_path):
    with start_loggers(configured(), tmp_path, "a", _Written()) as loggers:
        loggers.log(points(1))
    assert not loggers._thread._threads
    assert list(tmp_path.iterdir()) == []


# Refused before the start


@pytest.mark.parametrize("name", NAMES)
def test_a_library_that_is_not_installed_is_named_with_its_remedy(name, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        check_loggers(configured(f"logger={name}"))
    assert str(error.value) == (
        f"logger={name} is not installed: pip install pipetrain[{name}], or leave it out"
    )


def test_wandb_without_an_account_is_refused_and_offline_needs_none(monkeypatch):
    pytest.importorskip("wandb", reason="pip install pipetrain[wandb]")
    with pytest.raises(ConfigError, match="logger=wandb is not logged in: run `wandb login`, set"):
        check_loggers(configured("logger=wandb"))
    check_loggers(configured("logger=wandb", "logger.wandb.mode=offline"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_loggers(configured("logger=wandb"))


def test_another_mode_of_wandb_is_refused(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: True)
    with pytest.raises(ConfigError, match=r"logger\.wandb\.mode=off must be online, offline or null"):
        check_loggers(configured("logger=wandb", "logger.wandb.mode=off"))


@pytest.mark.parametrize("text", ["", "[]", '{"run": "a"}', '{"run": "a", "ids": 3}'])
def test_a_file_of_identifiers_that_is_none_begins_anew(text, fakes, tmp_path):
    (tmp_path / "loggers.json").write_text(text)
    with both(tmp_path) as loggers:
        assert loggers.started.keys() == {"wandb", "mlflow"}
