"""pipetrain in processes of its own, started as a person starts it, and killed with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

from tests.support.deadlines import DEADLINE_S

CHECKOUT = Path(__file__).parents[2]
MARK = "PIPETRAIN_TEST_MARK"
SMALL = ["model=mlp", "data=digits", "data.train_limit=384", "data.test_limit=64", "batch_size=64"]
SMALL += ["device=cpu", "threads=1"]
FAULTY = ["model._target_=tests.support.models.faulty", "partition=[2]"]
TORCHRUN, LAUNCHER = "torch.distributed.run", "pipetrain.launcher"


class Started(subprocess.Popen[str]):
    """A process that, with all it starts, can be found by its mark."""

    mark = ""


@contextmanager
def started(
    folder: Path, words: Sequence[str], *, restarts: int = 0, ranks: int = 2, launcher: str = TORCHRUN
) -> Iterator[Started]:
    """Start some ranks under torchrun, or one without; whatever is left of them at the end is killed."""
    alone = ranks == 1 and not restarts
    before = ["--standalone", f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
    command = [*([] if alone else ["-m", launcher, *before]), "-m", "pipetrain", *SMALL, *words]
    with running(folder, command, {"CUDA_VISIBLE_DEVICES": ""}) as process:
        yield process


@contextmanager
def running(
    folder: Path, words: Sequence[str], variables: Mapping[str, str], deadline_s: float = DEADLINE_S
) -> Iterator[Started]:
    """Run Python with these words; whatever is left of it, and of what it started, at the end is killed."""
    mark = uuid.uuid4().hex
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT), MARK: mark, **variables}
    process = Started(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    process.mark = mark
    deadline = Timer(deadline_s, kill, (mark,))  # whoever reads what it says then comes to an end
    deadline.start()
    try:
        yield process
    finally:
        deadline.cancel()
        kill(mark)
        process.wait()


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
    out, _ = process.communicate()
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


def await_epoch(process: Started, epoch: int) -> str:
    """Read what is said until an epoch is done."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(f"epoch {epoch}/"):
            return "".join(seen)
    raise AssertionError("".join(seen))


def await_line(process: Started, word: str) -> str:
    """Read what is said until a line with a word."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if word in line:
            return line
    raise AssertionError("".join(seen))
