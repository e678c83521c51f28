"""Experiment trackers: a run's values in Weights & Biases and MLflow, beside the files in its folder.

A tracker gets the values of an epoch at a time, in a thread, so that a slow or lost server neither delays nor
stops the training: what it did not take is sent again with the next epoch. A resumed run continues the
tracker's run, whose identifier is kept in the run's folder, and sends only what is not there yet.

The libraries are optional, and are imported on rank 0 only, if chosen.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from omegaconf import DictConfig, OmegaConf

from pipetrain.errors import ConfigError
from pipetrain.records.files import Files

TENSORBOARD = "tensorboard"  # its file is the recorder's
LOGGERS = "loggers.json"
FINISH_S = 30.0  # for the last values to arrive when a run ends
MODES = (None, "online", "offline")
UPDATES_AT_ONCE = 250  # MLflow takes at most 1000 values in one request

log = logging.getLogger("pipetrain")


class Points(NamedTuple):
    """The values of one epoch (counted from 1), and of its updates, by their numbers."""

    epoch: int
    ended: float  # in seconds since 1970
    values: Mapping[str, float]
    updates: Mapping[int, Mapping[str, float]]


class Logger(Protocol):
    """A run in a tracker. Its methods may raise any error of the tracker's library."""

    id: str

    def log(self, points: Points) -> None:
        """Send the points that the tracker does not have yet."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """End the run; without a summary it has failed or was stopped."""


class Wandb:
    """A run of Weights & Biases. Its steps are updates; an epoch's values are at the epoch's last update.

    An offline run is a file that cannot be continued: a resumed run writes it anew, from the first epoch.
    """

    def __init__(self, options: Mapping[str, Any], folder: Path, config: dict[str, Any], id: str) -> None:
        import wandb

        self.id = id or secrets.token_hex(8)
        earlier = list(folder.glob(f"wandb/offline-run-*-{self.id}"))
        self._run = wandb.init(
            **{key: options[key] for key in ("project", "entity", "mode")},
            name=folder.name,
            id=self.id,
            resume="allow",
            dir=folder,
            config=config,
            settings=wandb.Settings(silent=True, console="off", finish_timeout=FINISH_S),
        )
        if self._run.offline:
            for left in earlier:
                shutil.rmtree(left, ignore_errors=True)
        else:
            log.info("pipetrain: the run in Weights & Biases: %s", self._run.url)
        self._named: set[str] = set()

    def log(self, points: Points) -> None:
        for name in points.values.keys() - self._named:
            self._run.define_metric(name, step_metric="epoch")
            self._named.add(name)
        rows = {update: dict(values) for update, values in points.updates.items()}
        rows[max(rows)].update(points.values, epoch=points.epoch)
        for update, row in rows.items():
            if update >= self._run.starting_step:  # a resumed run online has the earlier ones
                self._run.log(row, step=update, commit=True)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._run.summary.update(dict(summary or {}))
        self._run.finish(exit_code=int(summary is None))


class MLflow:
    """A run of MLflow. An epoch's values have the epoch as their step, an update's values the update."""

    def __init__(self, options: Mapping[str, Any], folder: Path, config: dict[str, Any], id: str) -> None:
        # MLflow would try for minutes before it raises an error.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(options["uri"])
        self.id = id or self._create(options["experiment"], folder.name)
        self._client.update_run(self.id, status="RUNNING")
        known = self._client.get_run(self.id).data.params  # which cannot be changed
        params = [Param(key, str(value)) for key, value in _flat(config) if key not in known]
        self._client.log_batch(self.id, params=params)
        self._sent: tuple[int, int] | None = None  # the last epoch and the last update; None: ask for them

    def _create(self, name: str, run: str) -> str:
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        return str(self._client.create_run(experiment, run_name=run).info.run_id)

    def log(self, points: Points) -> None:
        epoch, update = self._sent or self._last(points)
        self._sent = None  # unless all of it arrives
        new = [(number, values) for number, values in points.updates.items() if number > update]
        for start in range(0, len(new), UPDATES_AT_ONCE):
            self._send(dict(new[start : start + UPDATES_AT_ONCE]), points.ended)
        if points.epoch > epoch:
            self._send({points.epoch: points.values}, points.ended)
        self._sent = max(epoch, points.epoch), max(update, *points.updates)

    def _last(self, points: Points) -> tuple[int, int]:
        """Return the last epoch and the last update that the server has."""
        names = [next(iter(values)) for values in (points.values, *points.updates.values())][:2]
        steps = [[metric.step for metric in self._client.get_metric_history(self.id, name)] for name in names]
        epoch, update = (max(known, default=0) for known in steps)
        return epoch, update

    def _send(self, steps: Mapping[int, Mapping[str, float]], moment: float) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(1000 * moment), step)
            for step, values in steps.items()
            for name, value in values.items()
        ]
        self._client.log_batch(self.id, metrics=metrics)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        for key, value in (summary or {}).items():
            if isinstance(value, float):
                self._client.log_metric(self.id, f"result/{key}", value)
        self._client.set_terminated(self.id, "KILLED" if summary is None else "FINISHED")


LIBRARIES: dict[str, Callable[[Mapping[str, Any], Path, dict[str, Any], str], Logger]] = {
    "wandb": Wandb,
    "mlflow": MLflow,
}


class Loggers:
    """The trackers of a run, by name. A failure of one is a warning."""

    def __init__(self) -> None:
        self.started: dict[str, Logger] = {}
        self._due: dict[str, list[Points]] = {}
        self._failing: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "loggers")
        self._ended = False

    def add(self, name: str, logger: Logger) -> None:
        self.started[name] = logger
        self._due[name] = []

    def log(self, points: Points) -> None:
        """Send an epoch's points, and earlier ones that were not taken, without waiting."""
        if self.started:
            self._thread.submit(self._log, points)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Send what is missing and end the trackers' runs, once; waits 2 * FINISH_S at most."""
        if self._ended or not self.started:
            return
        self._ended = True
        try:
            self._thread.submit(self._finish, summary).result(2 * FINISH_S)
        except TimeoutError:
            log.warning("pipetrain: %s did not take the last values in time", ", ".join(self.started))
        self._thread.shutdown(wait=False)

    def _log(self, points: Points) -> None:
        for name, due in self._due.items():
            due.append(points)
            self._send(name)

    def _send(self, name: str) -> None:
        due = self._due[name]
        try:
            while due:
                self.started[name].log(due[0])
                del due[0]
        except Exception as error:
            if name not in self._failing:
                log.warning(
                    "pipetrain: logger=%s fails: %s; training goes on, and the values are sent again later",
                    *(name, _why(error)),
                )
            self._failing.add(name)
        else:
            self._failing.discard(name)

    def _finish(self, summary: Mapping[str, Any] | None) -> None:
        for name, logger in self.started.items():
            self._send(name)
            try:
                logger.finish(summary)
            except Exception as error:
                self._failing.add(name)
                log.warning("pipetrain: logger=%s could not end its run: %s", name, _why(error))
            if self._due[name]:
                log.warning("pipetrain: logger=%s lacks epoch %d and later", name, self._due[name][0].epoch)


def chosen(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    """Return the options of the chosen trackers, by name."""
    options: Any = OmegaConf.to_container(cfg.logger, resolve=True)
    return {name: options[name] for name in LIBRARIES if name in options}


def check_loggers(cfg: DictConfig) -> None:
    """Refuse trackers that cannot work: not installed, or not logged in. Raises ConfigError."""
    for name, options in chosen(cfg).items():
        if find_spec(name) is None:
            raise ConfigError(
                f"logger={name} is not installed: pip install pipetrain[{name}], or leave it out"
            )
        if name == "wandb":
            _check_wandb(options["mode"])


def _check_wandb(mode: str | None) -> None:
    if mode not in MODES:
        raise ConfigError(f"logger.wandb.mode={mode} must be online, offline or null")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    if (mode or os.environ.get("WANDB_MODE", "online")) == "online" and not wandb.login(prompt=False):
        raise ConfigError(
            "logger=wandb is not logged in: run `wandb login`, set WANDB_API_KEY, or give "
            "logger.wandb.mode=offline"
        )


@contextmanager
def start_loggers(cfg: DictConfig, folder: Path, run: str, files: Files) -> Iterator[Loggers]:
    """Start the chosen trackers' runs, or continue those of `run` in the run's folder; end them on leaving.

    Raises ConfigError if one cannot start.
    """
    loggers, known = Loggers(), _known(folder / LOGGERS, run)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    try:
        for name, options in chosen(cfg).items():
            try:
                loggers.add(name, LIBRARIES[name](options, folder, config, known.get(name, "")))
            except Exception as error:
                raise ConfigError(
                    f"logger={name} cannot start: {_why(error)}; see logger.{name} in the configuration, or "
                    f"leave it out"
                ) from error
        if loggers.started:
            ids = {name: logger.id for name, logger in loggers.started.items()}
            files.text(folder / LOGGERS, json.dumps({"run": run, "ids": {**known, **ids}}) + "\n")
        yield loggers
    finally:
        loggers.finish(None)


def _known(path: Path, run: str) -> dict[str, str]:
    """Return the identifiers of a run's trackers; none if the file is of another run, or not readable."""
    try:
        content = json.loads(path.read_text())
        return {str(name): str(id) for name, id in content["ids"].items()} if content["run"] == run else {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _why(error: Exception) -> str:
    """Return the beginning of an error's message on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
