"""The runs of a comparison: what each is, whether its folder holds it, how it is started, and on what.

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
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from comparison.experiment import Method
from comparison.metric import Metric, metric_of
from comparison.processes import Workers
from pipetrain.cli import quoted
from pipetrain.errors import ConfigError

Summary = dict[str, Any]

NEEDED = "model data schedule device lr batch_size data_workers buffer_size epochs updates"
NEEDED += " best_epoch samples_per_s epoch_s total_s"  # and the metric of the last and of the best epoch


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
        """The name of the run's folder."""
        return "-".join(filter(None, [self.model, self.method.slug, f"seed{self.seed}"]))

    @property
    def title(self) -> str:
        """The run's name to a reader."""
        return " ".join(filter(None, [self.model, self.method.name, f"seed {self.seed}"]))

    @property
    def arguments(self) -> list[str]:
        """All overrides but the folder."""
        model = [f"model={self.model}"] if self.model else []
        return [*self.overrides, *model, *self.method.overrides, f"seed={self.seed}"]

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it the same run."""
        return {"overrides": self.arguments, "nproc": self.nproc}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run. A failed one has no summary and says why."""

    spec: Spec
    wall_s: float
    summary: Summary | None = None
    curves: dict[str, list[float]] = field(default_factory=dict)  # columns of metrics.csv
    failure: str = ""
    kept: bool = False
    made: dict[str, str] = field(default_factory=dict)  # when, and on what
    other_load: float | None = None  # cores that other programs kept busy meanwhile, in the mean

    @property
    def model(self) -> str:
        """The model, as far as it is known."""
        return str(self.summary["model"]) if self.summary else self.spec.model or ""


def words(spec: Spec, folder: Path) -> list[str]:
    """Return the run's command line, after `torchrun -m pipetrain`."""
    # No checkpoints, unless the overrides ask for them: what is compared is the training.
    return ["checkpoint.every=null", *spec.arguments, f"run_dir={quoted(str(folder))}"]


class Runs:
    """The folder of a comparison's runs."""

    def __init__(self, out: Path, workers: Workers) -> None:
        self._folder = out.resolve() / "runs"
        self._workers = workers

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
            mark, outcome = self._found(spec)
            if mark is None:
                raise ConfigError(f"{folder} was not made by a comparison; choose another --out")
            if not fresh and outcome and not _is_same(mark, spec):
                raise ConfigError(
                    f"{folder} was made by other overrides ({' '.join(mark.get('overrides', []))}, "
                    f"{mark.get('nproc')} processes); choose another --out, or start over with --fresh"
                )

    def metric(self, specs: Sequence[Spec]) -> Metric:
        """Return the metric of the runs that are done, also by other overrides."""
        found = (self._found(spec)[1] for spec in specs)
        return metric_of([outcome.summary for outcome in found if outcome and outcome.summary])

    def kept(self, spec: Spec) -> Outcome | None:
        """Return the run if it is done."""
        mark, outcome = self._found(spec)
        return outcome if mark and _is_same(mark, spec) else None

    def start(self, spec: Spec, lock: int) -> Outcome:
        """Make the run, from nothing."""
        self.forget(spec)
        folder = self._folder / spec.name
        folder.mkdir()
        _write(folder, spec.identity)
        made, busy_s, begin = describe_machine(), _busy_s(), time.perf_counter()
        status, ours_s = self._workers.run(words(spec, folder), spec.nproc, self.log(spec), keep_open=[lock])
        wall_s = time.perf_counter() - begin
        other = min(max(0.0, _busy_s() - busy_s - ours_s) / wall_s, float(os.cpu_count() or 1))
        try:
            if status:
                raise ValueError(f"status {status}")
            summary, curves = read_records(folder)
        except ValueError as error:
            _write(folder, {**spec.identity, "failed": str(error)})
            return Outcome(spec, wall_s, failure=str(error), made=made)
        _write(
            folder, {**spec.identity, "wall_s": round(wall_s, 1), "other_load": round(other, 2), "made": made}
        )
        return Outcome(spec, wall_s, summary, curves, made=made, other_load=other)

    def forget(self, spec: Spec) -> None:
        """Remove a run and its output."""
        shutil.rmtree(self._folder / spec.name, ignore_errors=True)
        self.log(spec).unlink(missing_ok=True)

    def log(self, spec: Spec) -> Path:
        """Return where the run's output is."""
        return self._folder / f"{spec.name}.log"

    def last_words(self, spec: Spec, lines: int = 8) -> list[str]:
        """Return the last lines that the run said."""
        said = self.log(spec).read_text(errors="replace").splitlines()
        return [line.rstrip() for line in said if line.strip()][-lines:]

    def _found(self, spec: Spec) -> tuple[dict[str, Any] | None, Outcome | None]:
        """Return what compare.json says, None where there is none, and the run if it finished."""
        folder = self._folder / spec.name
        try:
            mark = json.loads((folder / "compare.json").read_text())
        except (OSError, ValueError):
            return None, None
        try:
            summary, curves = read_records(folder)
        except ValueError:
            return mark, None
        wall_s, made = mark.get("wall_s", summary["total_s"]), mark.get("made", {})
        done = Outcome(spec, wall_s, summary, curves, "", True, made, mark.get("other_load"))
        return mark, None if "failed" in mark else done


def read_records(folder: Path) -> tuple[Summary, dict[str, list[float]]]:
    """Return a run's summary and the curve of its metric. Raises ValueError where they are not whole."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        metric = f"val_{metric_of([summary]).name}"
        missing = [key for key in (*NEEDED.split(), metric, f"best_{metric}") if key not in summary]
        with (folder / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            raise ValueError("no epoch")
        curves = {key: [float(row[key]) for row in rows] for key in ("epoch", metric, "elapsed_s")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it left no whole summary.json and metrics.csv: {error}") from error
    if missing:
        raise ValueError(f"its summary.json lacks {', '.join(missing)}")
    return summary, curves


def _is_same(mark: dict[str, Any], spec: Spec) -> bool:
    return all(mark.get(key) == value for key, value in spec.identity.items())


def _write(folder: Path, mark: dict[str, Any]) -> None:
    """Write compare.json whole or not at all."""
    new = folder / "compare.json.new"
    new.write_text(json.dumps(mark, indent=2) + "\n")
    new.replace(folder / "compare.json")


def _busy_s() -> float:
    """Return the seconds that all cores together were busy until now; 0 where /proc does not say."""
    try:
        user, nice, system, _, _, irq, softirq, steal, *_ = Path("/proc/stat").read_text().split()[1:]
    except (OSError, ValueError):
        return 0.0
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")


def describe_machine() -> dict[str, str]:
    """Return the date, and what the machine and its software are called; without importing torch."""
    return {"date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}", **_lasting()}


@cache
def _lasting() -> dict[str, str]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return {
        "machine": f"{name[1] if name else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "pipetrain": _revision(),
    }


def _revision() -> str:
    """Return the checkout's commit."""
    root, words = Path(__file__).resolve().parents[2], "describe --always --dirty --abbrev=10 --exclude=*"
    command = ["git", "--git-dir", str(root / ".git"), "--work-tree", str(root), *words.split()]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or "unknown"
    return "unknown"
