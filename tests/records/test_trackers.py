"""Trackers: what Weights & Biases and MLflow have of a run, read from their offline modes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

import pytest

from pipetrain.checkpoint.epoch_record import EpochRecord
from pipetrain.commands.cli import as_mapping
from pipetrain.errors import ConfigError
from pipetrain.records import trackers as module
from pipetrain.records.history import Epoch
from pipetrain.records.trackers import Trackers, check_loggers, read_loggers
from tests.support import DEADLINE_S
from tests.support.cases import config
from tests.support.run_files import figures

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


def epochs(*numbers: int) -> list[Epoch]:
    """Epochs of four updates each, of which the 2nd and the 4th are recorded."""
    return [Epoch(figures(n), {"loss/train": 2.0 / n, "bubble/stage0": 0.25}) for n in numbers]


def started(name: str, folder: Path, run: str = "a") -> Any:
    """Start a tracker as `logger=NAME` does; to be used in a with statement."""
    pytest.importorskip(name, reason=f"pip install pipetrain[{name}]")
    words = {
        "wandb": ["logger.wandb.mode=offline"],
        "mlflow": [f"logger.mlflow.uri=file://{folder.parent}/mlruns"],
    }
    folder.mkdir(exist_ok=True)
    return closing(Trackers(configured(f"logger={name}", *words[name]), folder, run))


def configured(*words: str) -> dict[str, Any]:
    return as_mapping(config([*words, "run_dir=here", "model=mlp", "data=digits"]))


def recorded(name: str, folder: Path) -> tuple[Values, dict[str, Any], dict[str, Any], str]:
    """Return what the tracker has of a folder's run: values, configuration, results and status."""
    return {"wandb": _of_wandb, "mlflow": _of_mlflow}[name](folder)


def _of_mlflow(folder: Path) -> tuple[Values, dict[str, Any], dict[str, Any], str]:
    from mlflow import MlflowClient

    client = MlflowClient(f"file://{folder.parent}/mlruns")
    (experiment,) = client.search_experiments(filter_string="name = 'pipetrain'")
    (run,) = client.search_runs([experiment.experiment_id])
    values = {
        key: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }
    results = {key.removeprefix("result/"): values.pop(key)[0][1] for key in [*values] if "result/" in key}
    return values, run.data.params, results, run.info.status


def _of_wandb(folder: Path) -> tuple[Values, dict[str, Any], dict[str, Any], str]:
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
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


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_has_values_configuration_and_results_of_a_run_that_was_resumed(name, tmp_path):
    """The first start was killed after epoch 2, and its checkpoint is that of epoch 1: no point is doubled.

    A run of another name in the same folder is another one for the tracker.
    """
    folder = tmp_path / "run"
    with started(name, folder) as trackers:
        trackers.write(epochs(1, 2))
    assert recorded(name, folder)[3] == "KILLED"
    with started(name, folder) as trackers:
        trackers.write(epochs(1))
        trackers.write(epochs(1, 2, 3))
        trackers.close({"val_acc": 0.5, "model": "mlp"})
    values, read, results, status = recorded(name, folder)  # there is one run alone
    assert [step for step, _ in values["loss/update"]] == [2, 4, 6, 8, 10, 12]
    assert values["lr/update"][:4] == [(2, 0.2), (4, 0.1), (6, 0.1), (8, 0.05)]
    assert values["loss/train"] == [(1, 2.0), (2, 1.0), (3, pytest.approx(2 / 3))]
    assert values["bubble/stage0"] == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert str(read["batch_size"]) == "64"
    assert "pipetrain.models.mlp" in (read.get("model._target_") or read["model"]["_target_"])
    assert (results["val_acc"], status) == (0.5, "FINISHED")
    with started(name, folder, "b"):
        pass
    with pytest.raises(ValueError, match="unpack"):  # two
        recorded(name, folder)


# Without a library: what is done with a tracker that fails


class Fake:
    """Takes what it is given, or fails, or waits."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.ended: list[object] = []
        self.fails = False
        self.waits: Callable[[], object] = lambda: None

    def log(self, record: EpochRecord, values: object) -> None:
        self.waits()
        if self.fails:
            raise OSError("no\n network")
        self.taken.append(record.epoch)

    def finish(self, summary: object) -> None:
        self.ended.append(summary)


@pytest.fixture
def fakes(monkeypatch) -> dict[str, Fake]:
    """Take the place of the libraries."""
    made = {name: Fake() for name in NAMES}
    libraries = {name: lambda *_, fake=fake: fake for name, fake in made.items()}
    monkeypatch.setattr(module, "LIBRARIES", libraries)
    return made


def both(folder: Path) -> Any:
    return closing(Trackers(configured("logger=[wandb,mlflow]"), folder, "a"))


def test_what_a_tracker_did_not_take_is_sent_again_and_the_other_has_it(fakes, tmp_path, caplog):
    one, other = fakes.values()
    with both(tmp_path) as trackers:
        one.fails = True
        trackers.write(epochs(1))
        trackers.write(epochs(1, 2))
        trackers._thread.submit(setattr, one, "fails", False)
        trackers.write(epochs(1, 2, 3))
        trackers.close({"val_acc": 1.0})
    assert one.taken == other.taken == [1, 2, 3]
    assert one.ended == other.ended == [{"val_acc": 1.0}]  # once
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("pipetrain: logger=wandb fails: no network; training goes on, and ")


def test_a_tracker_that_hangs_delays_neither_the_training_nor_the_end(fakes, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(module, "FINISH_S", 0.01)
    free = Event()
    fakes["mlflow"].waits = lambda: free.wait(DEADLINE_S)
    with both(tmp_path) as trackers:
        trackers.write(epochs(1))
        trackers.close({})
        assert not free.is_set()
    free.set()
    assert "wandb, mlflow did not take the last values in time" in caplog.text


def test_one_that_cannot_start_is_refused_and_the_others_are_ended(fakes, tmp_path, monkeypatch):
    monkeypatch.setitem(module.LIBRARIES, "mlflow", lambda *_: Path("/no\nwhere").read_text())
    with pytest.raises(ConfigError, match=r"logger=mlflow cannot start: \[Errno 2\] No such .*; see logger"):
        both(tmp_path)
    assert fakes["wandb"].ended == [None]


# Chosen, and refused before the start


def test_loggers_are_chosen_by_names_or_options_which_stay_what_they_are():
    assert read_loggers("mlflow") == {"mlflow": {"uri": None, "experiment": "pipetrain"}}
    chosen = read_loggers({"wandb": {"project": "${mine}"}, "tensorboard": {}})
    assert chosen == {"wandb": {"project": "${mine}", "entity": None, "mode": None}, "tensorboard": {}}
    for wrong, says in (("loggers=3 must be names", 3), ("loggers=nothing is unknown; choose", ["nothing"])):
        with pytest.raises(ConfigError, match=wrong):
            read_loggers(says)  # type: ignore[arg-type]


def test_what_is_not_installed_or_has_no_account_is_refused_with_its_remedy(monkeypatch):
    check_loggers(configured("logger=wandb", "logger.wandb.mode=offline")["logger"])
    with pytest.raises(ConfigError, match="logger=wandb is not logged in: run `wandb login`, set"):
        check_loggers(configured("logger=wandb")["logger"])
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logger=mlflow is not installed: pip install pipetrain\[mlflow\]"):
        check_loggers(configured("logger=mlflow")["logger"])
