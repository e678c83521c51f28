"""Experiment trackers: a run's values in Weights & Biases and MLflow, in addition to the files in its folder.

A tracker gets an epoch's values in a thread, so a slow or lost server neither delays nor stops the training:
what failed is sent again with the next epoch. A resumed run continues the tracker's run, which is found by
the run's unique name, and sends only what is missing there.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipetrain.checkpoint.epoch_record import EpochRecord
from pipetrain.config.choices import chosen
from pipetrain.errors import ConfigError, one_line
from pipetrain.records.history import Epoch

FINISH_S = 30.0  # for the last values to arrive when a run ends

Loggers = Mapping[str, Mapping[str, Any]]
"""The options of each logger, by its name."""

log = logging.getLogger("pipetrain")


class Wandb:
    """A run `id` of Weights & Biases. Its steps are updates; an epoch's values are at its last update.

    An offline run is a file that cannot be continued: a resumed run writes it again, from the first epoch.
    """

    def __init__(self, options: Mapping[str, Any], folder: Path, config: dict[str, Any], id: str) -> None:
        import wandb

        earlier = list(folder.glob(f"wandb/offline-run-*-{id}"))
        self._run = wandb.init(
            **{key: options[key] for key in ("project", "entity", "mode")},
            name=folder.name,
            id=id,
            resume="allow",
            dir=folder,
            config=config,
            settings=wandb.Settings(silent=True, console="off", finish_timeout=FINISH_S),
        )
        for left in earlier if self._run.offline else ():
            shutil.rmtree(left, ignore_errors=True)
        log.info("pipetrain: the run in Weights & Biases: %s", self._run.url or "offline")

    def log(self, record: EpochRecord, values: Mapping[str, float]) -> None:
        for name in values:
            self._run.define_metric(name, step_metric="epoch")
        rows = {update: dict(of_update) for update, of_update in record.update_values.items()}
        rows[max(rows)].update(values, epoch=record.epoch)
        for update, row in rows.items():
            if update >= self._run.starting_step:  # a resumed run online has the earlier ones
                self._run.log(row, step=update, commit=True)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._run.summary.update(dict(summary or {}))
        self._run.finish(exit_code=int(summary is None))


class MLflow:
    """A run of MLflow with the tag `id`. Steps are epochs, or updates for an update's values."""

    def __init__(self, options: Mapping[str, Any], folder: Path, config: dict[str, Any], id: str) -> None:
        # MLflow would try for minutes before it raises an error.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = client = MlflowClient(options["uri"])
        existing = client.get_experiment_by_name(options["experiment"])
        experiment = existing.experiment_id if existing else client.create_experiment(options["experiment"])
        runs = client.search_runs([experiment], f"tags.pipetrain = '{id}'")
        tags = {"pipetrain": id}
        run = runs[0] if runs else client.create_run(experiment, tags=tags, run_name=folder.name)
        self._id = str(run.info.run_id)
        client.update_run(self._id, status="RUNNING")
        params = [Param(key, str(value)) for key, value in _flat(config)]  # these cannot be changed
        client.log_batch(self._id, params=[p for p in params if p.key not in run.data.params])

    def log(self, record: EpochRecord, values: Mapping[str, float]) -> None:
        new = record.update_values.keys() - self._steps("loss/update")
        steps = {update: record.update_values[update] for update in sorted(new)}
        self._send(steps, record)
        if record.epoch not in self._steps("loss/train"):
            self._send({record.epoch: values}, record)

    def _steps(self, name: str) -> set[int]:
        return {metric.step for metric in self._client.get_metric_history(self._id, name)}

    def _send(self, steps: Mapping[int, Mapping[str, float]], record: EpochRecord) -> None:
        from mlflow.entities import Metric

        at = int(1000 * record.ended)
        metrics = [
            Metric(name, value, at, step) for step, values in steps.items() for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        for key, value in (summary or {}).items():
            if isinstance(value, float):
                self._client.log_metric(self._id, f"result/{key}", value)
        self._client.set_terminated(self._id, "KILLED" if summary is None else "FINISHED")


LIBRARIES: dict[str, Any] = {"wandb": Wandb, "mlflow": MLflow}


class Trackers:
    """The runs in the chosen trackers: new ones, or those of `run` in this folder, which continue.

    Raises ConfigError if one cannot start; a later failure is a warning, once.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, run: str) -> None:
        self._started: dict[str, Any] = {}
        self._epochs: Counter[str] = Counter()  # sent, by tracker
        self._warned: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "trackers")
        id = sha256(f"{run} {folder}".encode()).hexdigest()[:16]
        for name, options in _chosen(config["logger"]):
            try:
                self._started[name] = LIBRARIES[name](options, folder, config, id)
            except Exception as error:
                self.close()
                raise ConfigError(
                    f"logger={name} cannot start: {one_line(error)[:300]}; see logger.{name} in the "
                    f"configuration, or leave it out"
                ) from error

    def write(self, epochs: Sequence[Epoch]) -> None:
        """Send the epochs that each tracker does not have, without waiting."""
        for name, tracker in self._started.items():
            self._thread.submit(self._try, name, partial(self._send, name, tracker, [*epochs]))

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """End the trackers' runs, once; without a summary they have failed or were stopped."""
        started, self._started = self._started, {}
        for name, tracker in started.items():
            self._thread.submit(self._try, name, partial(tracker.finish, summary))
        if started and wait([self._thread.submit(int)], 2 * FINISH_S).not_done:
            log.warning("pipetrain: %s did not take the last values in time", ", ".join(started))
        self._thread.shutdown(wait=False)

    def _send(self, name: str, tracker: Any, epochs: Sequence[Epoch]) -> None:
        for epoch in epochs[self._epochs[name] :]:
            tracker.log(*epoch)
            self._epochs[name] += 1

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if name not in self._warned:
                says = "training goes on, and the values are sent again with the next epoch"
                log.warning("pipetrain: logger=%s fails: %s; %s", name, one_line(error)[:300], says)
            self._warned.add(name)


def _chosen(loggers: Loggers) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, loggers[name]) for name in LIBRARIES if name in loggers]


def read_loggers(loggers: Sequence[str] | Loggers) -> dict[str, dict[str, Any]]:
    """Return the options of loggers, given by names of conf/logger or by name. Raises ConfigError."""
    loggers = [loggers] if isinstance(loggers, str) else loggers
    options = loggers.values() if isinstance(loggers, Mapping) else [{}]
    if not isinstance(loggers, Iterable) or not all(isinstance(option, Mapping) for option in options):
        raise ConfigError(f"loggers={loggers} must be names, or options by name")
    named = loggers if isinstance(loggers, Mapping) else {}
    return {name: chosen("loggers", "logger", name)[name] | named.get(name, {}) for name in loggers}


def check_loggers(loggers: Loggers) -> None:
    """Refuse trackers that cannot work: not installed, or not logged in. Raises ConfigError."""
    for name, options in _chosen(loggers):
        if find_spec(name) is None:
            raise ConfigError(
                f"logger={name} is not installed: pip install pipetrain[{name}], or leave it out"
            )
        if name == "wandb" and (options["mode"] or os.environ.get("WANDB_MODE", "online")) == "online":
            os.environ.setdefault("WANDB_SILENT", "true")
            import wandb

            if not wandb.login(prompt=False):
                raise ConfigError(
                    "logger=wandb is not logged in: run `wandb login`, set WANDB_API_KEY, or give "
                    "logger.wandb.mode=offline"
                )


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
