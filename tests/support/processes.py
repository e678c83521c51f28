"""pipetrain in processes of its own, as a person starts it, and killed with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from pipetrain.checkpoint.files import CHECKPOINTS, Manifest, newest_first
from tests.support.deadlines import DEADLINE_S
from tests.support.warm import Program

CHECKOUT = Path(__file__).parents[2]
MARK = "PIPETRAIN_TEST_MARK"
SMALL = ["model=mlp", "data=digits", "data.train_limit=384", "data.test_limit=64", "batch_size=64"]
SMALL += ["device=cpu", "threads=1"]
FAULTY = ["model._target_=tests.support.models.faulty", "partition=[2]"]
TORCHRUN, LAUNCHER = "torch.distributed.run", "pipetrain.launcher"
TWO = ["-m", TORCHRUN, "--standalone", "--nproc_per_node=2"]


class Cold(subprocess.Popen[str]):
    """A Program in an interpreter that is started for it."""

    def __init__(self, words: Sequence[object], folder: Path, variables: Mapping[str, str]) -> None:
        command, pipe = [sys.executable, *map(str, words)], subprocess.PIPE
        out = {"stdout": pipe, "stderr": subprocess.STDOUT, "text": True}
        self.mark = ""
        super().__init__(command, cwd=folder, env=variables, start_new_session=True, **out)  # type: ignore[call-overload]


Started = Program | Cold


@contextmanager
def running(
    folder: Path,
    words: Sequence[object],
    variables: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
    cold: bool = False,
) -> Iterator[Started]:
    """Run Python with these words; whatever is left of it, and of what it started, at the end is killed."""
    mark = uuid.uuid4().hex
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT), "CUDA_VISIBLE_DEVICES": "", MARK: mark}
    process = (Cold if cold else Program)(words, folder, {**os.environ, **own, **(variables or {})})
    process.mark = mark
    deadline = Timer(deadline_s, kill, (mark,))  # whoever reads what it says then comes to an end
    deadline.start()
    try:
        yield process
    finally:
        deadline.cancel()
        kill(mark)
        process.wait()


@contextmanager
def started(
    folder: Path, words: Sequence[str], *, restarts: int = 0, ranks: int = 2, launcher: str = TORCHRUN
) -> Iterator[Started]:
    """Start some ranks under torchrun, or one without."""
    alone = ranks == 1 and not restarts
    before = ["--standalone", f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
    command = [*([] if alone else ["-m", launcher, *before]), "-m", "pipetrain", *SMALL, *words]
    with running(folder, command) as process:
        yield process


@dataclass(frozen=True)
class Ended:
    """What is left of a program: its status, what it said, how many of its processes still live, its run."""

    status: int
    out: str
    living: int
    run: Path

    @classmethod
    def of(cls, process: Started, run: Path, seen: str = "") -> Ended:
        """Wait for the end. `seen`: what was read before."""
        out = seen + ended(process)
        return cls(int(process.wait() or 0), out, len(living(process.mark)), run)

    @property
    def checkpoints(self) -> list[str]:
        return list(checkpoints(self.run))


def checkpoints(run: Path) -> dict[str, Manifest]:
    """The checkpoints of a run that are whole, the newest first."""
    found = newest_first(run / CHECKPOINTS)
    return {path.name: manifest for path, manifest in found if isinstance(manifest, Manifest)}


def finished(folder: Path, words: Sequence[object], **options: Any) -> Ended:
    """Run Python with these words to its end."""
    with running(folder, words, **options) as process:
        return Ended.of(process, folder / "run")


def kill(mark: str) -> None:
    """Kill all that has a mark: a stopped process would outlive its torchrun."""
    for pid in living(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def living(mark: str) -> dict[int, dict[str, str]]:
    """The processes that have inherited a mark, however they were started: pid -> environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            items = (path / "environ").read_text(errors="replace").split("\0")
        except OSError:
            continue
        if state != "Z" and f"{MARK}={mark}" in items:
            found[int(path.name)] = dict(item.split("=", 1) for item in items if "=" in item)
    return found


def ended(process: Started) -> str:
    """Wait for the end, and return what was said."""
    out = process.stdout.read()
    process.wait()
    return out


def lines_of(out: str) -> list[str]:
    """The lines of what was said, but for those that a busy machine adds."""
    return [line for line in out.splitlines() if not line.startswith("pipetrain: it takes time to ")]


def said(out: str) -> str:
    return "\n".join(line for line in lines_of(out) if line.startswith("pipetrain: "))


def rank_of(process: Started, rank: int) -> int:
    """The pid of a rank."""
    (pid,) = (pid for pid, variables in living(process.mark).items() if variables.get("RANK") == str(rank))
    return pid


def await_line(process: Started, start: str) -> str:
    """Read what is said until a line with a word; return that and all before it."""
    seen = ""
    for line in process.stdout:
        seen += line
        if start in line:
            return seen
    raise AssertionError(seen)


def await_epoch(process: Started, epoch: int) -> str:
    """Read what is said until an epoch is done."""
    return await_line(process, f"epoch {epoch}/")
