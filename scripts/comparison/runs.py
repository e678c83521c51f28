"""The runs of a comparison: whether a folder holds one, how it is started, and on what.

Each run has a folder, `OUT/runs/NAME`, and its output beside it in `NAME.log`. `compare.json` in the folder
says by which overrides the run was started. A run is done when these are the same, its command did not fail,
and its records can be read. A done run is never started again and never overwritten: where it was made by
other overrides the comparison is refused, because what took hours should not be lost to a forgotten `--out`.
A run that was interrupted or failed is started over.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

from comparison.figures import metric_of
from comparison.processes import PIPETRAIN, run
from comparison.request import Spec
from pipetrain.commands.cli import quoted
from pipetrain.errors import ConfigError

Summary = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run. A failed one has no summary and says why.

    `curves`: columns of metrics.csv. `made`: when, and on what. `others`: the cores that other programs kept
    busy meanwhile, in the mean.
    """

    spec: Spec
    wall_s: float
    summary: Summary | None = None
    curves: dict[str, list[float]] = field(default_factory=dict)
    failure: str = ""
    kept: bool = False
    machine: dict[str, str] = field(default_factory=dict)  # and the date
    others: float = 0.0


def words(spec: Spec, folder: Path) -> list[str]:
    """Return the run's command line, after `pipetrain`."""
    # No checkpoints, unless the overrides ask for them: what is compared is the training.
    own = [f"--nproc_per_node={spec.nproc}", "checkpoint.every=null"]
    return [*own, *spec.arguments, f"run_dir={quoted(str(folder))}"]


@contextmanager
def claim(folder: Path) -> Iterator[int]:
    """Make a folder, and hold it alone; give the lock's descriptor.

    Raises ConfigError where another one holds it, or it cannot be made. A run that outlived its comparison
    (killed without a chance to end it) holds the descriptor, and with it the lock, too.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}; choose another --out") from error
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    except BlockingIOError as error:
        raise ConfigError(f"another comparison is running in {folder}") from error
    finally:
        os.close(descriptor)


class Runs:
    """The folder of a comparison's runs. `command`: what starts one; the tests give another."""

    def __init__(self, out: Path, command: Sequence[str] = PIPETRAIN) -> None:
        self.folder = out.resolve() / "runs"
        self._command = command

    def check(self, specs: Sequence[Spec], fresh: bool) -> None:
        """Raise ConfigError where a folder holds something that must not be overwritten."""
        for spec in specs:
            folder, mark = self.folder / spec.name, self._mark(spec)
            if mark is None and folder.is_dir() and any(folder.iterdir()):
                raise ConfigError(f"{folder} was not made by a comparison; choose another --out")
            if mark and not fresh and "made" in mark and not _is_same(mark, spec):
                raise ConfigError(
                    f"{folder} was made by other overrides ({' '.join(mark['overrides'])}, "
                    f"{mark['nproc']} processes); choose another --out, or start over with --fresh"
                )

    def kept(self, spec: Spec) -> Outcome | None:
        """Return the run if it is done."""
        mark = self._mark(spec)
        if mark is None or "made" not in mark or not _is_same(mark, spec):
            return None
        with suppress(ValueError):
            summary, curves = read_records(self.folder / spec.name)
            return Outcome(spec, mark["wall_s"], summary, curves, "", True, mark["made"], mark["others"])
        return None

    def start(self, spec: Spec, lock: int) -> Outcome:
        """Make the run, from nothing."""
        self.forget(spec)
        folder = self.folder / spec.name
        folder.mkdir()
        asked = {"overrides": spec.arguments, "nproc": spec.nproc}
        _write(folder, asked)
        machine, others_s, begin = describe_machine(), _others_s(), time.perf_counter()
        status = run([*self._command, *words(spec, folder)], spec.nproc, self.log(spec), [lock])
        seconds = time.perf_counter() - begin
        wall_s, others = round(seconds, 1), round(max(0.0, _others_s() - others_s) / seconds, 2)
        try:
            if status:
                raise ValueError(f"status {status}")
            summary, curves = read_records(folder)
        except ValueError as error:
            return Outcome(spec, wall_s, failure=str(error), machine=machine)
        _write(folder, {**asked, "wall_s": wall_s, "made": machine, "others": others})
        return Outcome(spec, wall_s, summary, curves, machine=machine, others=others)

    def forget(self, spec: Spec) -> None:
        """Remove a run and its output."""
        shutil.rmtree(self.folder / spec.name, ignore_errors=True)
        self.log(spec).unlink(missing_ok=True)

    def log(self, spec: Spec) -> Path:
        """Return where the run's output is."""
        return self.folder / f"{spec.name}.log"

    def last_words(self, spec: Spec, lines: int = 8) -> list[str]:
        """Return the last lines that the run said."""
        said = self.log(spec).read_text(errors="replace").splitlines()
        return [line.rstrip() for line in said if line.strip()][-lines:]

    def _mark(self, spec: Spec) -> dict[str, Any] | None:
        """Return what compare.json says, None where there is none."""
        with suppress(OSError, ValueError):
            mark: dict[str, Any] = json.loads((self.folder / spec.name / "compare.json").read_text())
            return mark
        return None


def _is_same(mark: dict[str, Any], spec: Spec) -> bool:
    return (mark["overrides"], mark["nproc"]) == (spec.arguments, spec.nproc)


def _write(folder: Path, mark: dict[str, Any]) -> None:
    """Write compare.json whole or not at all."""
    new = folder / "compare.json.new"
    new.write_text(json.dumps(mark, indent=2) + "\n")
    new.replace(folder / "compare.json")


def read_records(folder: Path) -> tuple[Summary, dict[str, list[float]]]:
    """Return a run's summary, and its loss and metric by epoch. Raises ValueError if they are not whole."""
    try:
        summary: Summary = json.loads((folder / "summary.json").read_text())
        metric = metric_of([summary])
        metric.value(summary, "best_val")
        with (folder / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        keys = ("epoch", "val_loss", f"val_{metric.name}", "elapsed_s")
        return summary, {key: [float(row[key]) for row in rows] for key in keys}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it left no whole summary.json and metrics.csv: {error}") from error


def others_now(seconds: float = 0.3) -> float:
    """Return how many cores other programs keep busy, while we wait for some seconds; 0 but on Linux."""
    before = _others_s()
    time.sleep(seconds)
    return max(0.0, _others_s() - before) / seconds


def _others_s() -> float:
    """Return the seconds that others than our ended processes kept cores busy so far; 0 but on Linux."""
    if not Path("/proc/stat").exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal, *_ = Path("/proc/stat").read_text().split()[1:]
    ours = os.times()
    busy = sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")
    return busy - ours.children_user - ours.children_system


def describe_machine() -> dict[str, str]:
    """Return the date, and what the machine and its software are called; without importing torch."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    root = Path(__file__).resolve().parents[2]
    return {
        "date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        "machine": f"{name[1] if name else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "pipetrain": revision(root)
        or f"of the commit whose pipetrain/ is tree {git_tree(root / 'pipetrain')}",
    }


def revision(root: Path) -> str:
    """Return the commit of a checkout, with -dirty if its code is another; "" if it is none of git's.

    What a comparison writes into docs/ is no code.
    """

    def git(*words: str) -> str:
        command = ["git", *words]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    with suppress(OSError):
        if commit := git("rev-parse", "--short=10", "HEAD"):
            return commit + "-dirty" * bool(
                git("status", "--porcelain", "--", "pipetrain", "scripts", "conf")
            )
    return ""


def git_tree(folder: Path) -> str:
    """Return git's name of what a folder holds, where there is no git: `git rev-parse COMMIT:pipetrain`."""
    entries = []
    for path in folder.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            entries.append((f"{path.name}/", f"40000 {path.name}", git_tree(path)))
        elif path.is_file():
            mode = "100755" if os.access(path, os.X_OK) else "100644"
            entries.append((path.name, f"{mode} {path.name}", _git_name("blob", path.read_bytes())))
    return _git_name(
        "tree", b"".join(f"{of}\0".encode() + bytes.fromhex(one) for _, of, one in sorted(entries))
    )


def _git_name(kind: str, content: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content).hexdigest()
