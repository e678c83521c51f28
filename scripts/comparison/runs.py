"""The runs of a comparison: what each is, whether its folder already holds it, and how it is started.

Each run has a folder, `OUT/runs/NAME`, and its output beside it in `NAME.log`. `compare.json` in the folder
says by which overrides the run was started. A run is done when these are the same, its command did not fail,
and its records can be read. A done run is never started again and never overwritten: where it was made by
other overrides the comparison is refused, because what took hours should not be lost to a forgotten `--out`.
A run that was interrupted or failed is started over.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pipetrain
from comparison import machine
from comparison.methods import Method
from comparison.processes import run
from pipetrain.cli import quoted
from pipetrain.errors import ConfigError

NEEDED: tuple[str, ...] = (
    "model",
    "data",
    "schedule",
    "device",
    "lr",
    "batch_size",
    "data_workers",
    "buffer_size",
    "epochs",
)
NEEDED += ("updates", "val_acc", "best_val_acc", "best_epoch", "samples_per_s", "epoch_s", "total_s")
CURVES = ("epoch", "val_acc", "elapsed_s")
TORCHRUN_S_REPORT = re.compile(r"^E\d{4} .*torch/distributed/elastic/")


@dataclass(frozen=True, slots=True)
class Spec:
    """One run to be made."""

    method: Method
    seed: int
    model: str | None  # None: whatever the overrides say
    overrides: tuple[str, ...]
    nproc: int

    @property
    def name(self) -> str:
        """Name the run's folder."""
        return "-".join([*([self.model] if self.model else []), self.method.slug, f"seed{self.seed}"])

    @property
    def title(self) -> str:
        """Name the run to a reader."""
        return " ".join([*([self.model] if self.model else []), self.method.name, f"seed {self.seed}"])

    @property
    def arguments(self) -> list[str]:
        """Return all overrides but the folder."""
        model = [f"model={self.model}"] if self.model else []
        return [*self.overrides, *model, *self.method.overrides, f"seed={self.seed}"]

    @property
    def identity(self) -> dict[str, Any]:
        """Return what makes it the same run."""
        return {"overrides": self.arguments, "nproc": self.nproc}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run. A failed one has no summary and says why."""

    spec: Spec
    wall_s: float
    summary: dict[str, Any] | None = None
    curves: dict[str, list[float]] = field(default_factory=dict)  # columns of metrics.csv
    failure: str = ""
    kept: bool = False
    made: dict[str, str] = field(default_factory=dict)  # when, and on what

    @property
    def model(self) -> str:
        """Name the model, as far as it is known."""
        return str(self.summary["model"]) if self.summary else self.spec.model or ""


def columns(outcomes: Sequence[Outcome], key: str) -> list[list[float]]:
    """Return a column of metrics.csv of each run, up to the last epoch that all of them have.

    They differ where the recipe that says how many there are was changed between two runs.
    """
    epochs = min(len(outcome.curves[key]) for outcome in outcomes)
    return [outcome.curves[key][:epochs] for outcome in outcomes]


Command = Callable[[Spec, Path], list[str]]


def torchrun(spec: Spec, folder: Path) -> list[str]:
    """Return the command that a user would type."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={spec.nproc}",
    ]
    # No checkpoints, unless the overrides ask for them: what is compared is the training.
    words = ["checkpoint.every=null", *spec.arguments, f"run_dir={quoted(str(folder))}"]
    return [*launcher, "-m", "pipetrain", *words]


class Runs:
    """The folder of a comparison's runs."""

    def __init__(self, out: Path, command: Command = torchrun) -> None:
        self._folder = out.resolve() / "runs"
        self._command = command

    @contextmanager
    def claimed(self) -> Iterator[int]:
        """Hold the folder alone; gives the lock's descriptor. Raises ConfigError where another one holds it.

        A run that outlived its comparison (killed without a chance to end it) holds the lock too.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"another comparison is running in {self._folder.parent}") from error
            yield descriptor
        finally:
            os.close(descriptor)

    def check(self, specs: Sequence[Spec], fresh: bool) -> None:
        """Raise ConfigError where a folder holds something that must not be overwritten."""
        for spec in specs:
            folder = self._folder / spec.name
            if not folder.is_dir() or not any(folder.iterdir()):
                continue
            made_by = self._mark(spec)
            if made_by is None:
                raise ConfigError(f"{folder} was not made by a comparison; choose another --out")
            if not fresh and self._is_whole(spec) and not _same(made_by, spec):
                raise ConfigError(
                    f"{folder} was made by other overrides ({' '.join(made_by.get('overrides', []))}, "
                    f"{made_by.get('nproc')} processes); choose another --out, or start over with --fresh"
                )

    def kept(self, spec: Spec) -> Outcome | None:
        """Return the run if it is done."""
        mark = self._mark(spec)
        if mark is None or not _same(mark, spec) or not self._is_whole(spec):
            return None
        summary, curves = read_records(self._folder / spec.name)
        wall_s, made = mark.get("wall_s", summary["total_s"]), mark.get("made", {})
        return Outcome(spec, wall_s, summary, curves, kept=True, made=made)

    def start(self, spec: Spec, lock: int) -> Outcome:
        """Make the run, from nothing."""
        self.forget(spec)
        folder, log = self._folder / spec.name, self.log(spec)
        folder.mkdir()
        _write(folder, spec.identity)
        begin, made = time.perf_counter(), machine.describe()
        status = run(self._command(spec, folder), log, _environment(spec.nproc), keep_open=[lock])
        wall_s = time.perf_counter() - begin
        failure = f"status {status}" if status else ""
        if not failure:
            try:
                summary, curves = read_records(folder)
            except ValueError as error:
                failure = str(error)
        if failure:
            _write(folder, {**spec.identity, "failed": failure})
            return Outcome(spec, wall_s, failure=failure, made=made)
        _write(folder, {**spec.identity, "wall_s": round(wall_s, 1), "made": made})
        return Outcome(spec, wall_s, summary, curves, made=made)

    def forget(self, spec: Spec) -> None:
        """Remove a run and its output."""
        shutil.rmtree(self._folder / spec.name, ignore_errors=True)
        self.log(spec).unlink(missing_ok=True)

    def log(self, spec: Spec) -> Path:
        """Return where the run's output is."""
        return self._folder / f"{spec.name}.log"

    def last_words(self, spec: Spec, lines: int = 8) -> list[str]:
        """Return the last lines that the run itself said, without torchrun's report of its failure."""
        said = []
        for line in self.log(spec).read_text(errors="replace").splitlines():
            if TORCHRUN_S_REPORT.match(line):
                break
            if line.strip():
                said.append(line.rstrip())
        return said[-lines:]

    def _mark(self, spec: Spec) -> dict[str, Any] | None:
        try:
            mark = json.loads((self._folder / spec.name / "compare.json").read_text())
        except (OSError, ValueError):
            return None
        return mark if isinstance(mark, dict) else None

    def _is_whole(self, spec: Spec) -> bool:
        try:
            read_records(self._folder / spec.name)
        except ValueError:
            return False
        return "failed" not in (self._mark(spec) or {})


def read_records(folder: Path) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return a run's summary and the curves of its metrics. Raises ValueError where they are not whole."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        missing = [key for key in NEEDED if key not in summary]
        with (folder / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            raise ValueError("no epoch")
        curves = {key: [float(row[key]) for row in rows] for key in CURVES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it left no whole summary.json and metrics.csv: {error}") from error
    if missing:
        raise ValueError(f"its summary.json lacks {', '.join(missing)}")
    return summary, curves


def _same(mark: dict[str, Any], spec: Spec) -> bool:
    return all(mark.get(key) == value for key, value in spec.identity.items())


def _write(folder: Path, mark: dict[str, Any]) -> None:
    """Write compare.json whole or not at all."""
    new = folder / "compare.json.new"
    new.write_text(json.dumps(mark, indent=2) + "\n")
    new.replace(folder / "compare.json")


def _environment(nproc: int) -> dict[str, str]:
    """Return the run's environment: this pipetrain's code, and the cores shared between its processes."""
    code = str(Path(pipetrain.__file__).resolve().parents[1])
    threads = max(1, (os.cpu_count() or 1) // nproc)
    path = os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH"))))
    return {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
