"""Every fault that can be caused, caused: in processes of their own, at a random step, under a deadline."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipetrain.checkpoint.files import CHECKPOINTS, Manifest, newest_first

CHECKOUT = Path(__file__).parents[1]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
MARK = "PIPETRAIN_TEST_MARK"
SMALL = ["model=mlp", "data=digits", "data.train_limit=384", "data.test_limit=64", "batch_size=64"]
SMALL += ["device=cpu", "threads=1"]
FAULTY = ["model._target_=tests.support.models.faulty", "partition=[2]"]


class Started(subprocess.Popen[str]):
    """A process that, with all it starts, can be found by its mark."""

    mark = ""


@contextmanager
def started(folder: Path, words: Sequence[str], *, restarts: int = 0) -> Iterator[Started]:
    """Start two ranks under torchrun; whatever is left of them at the end is killed."""
    mark = uuid.uuid4().hex
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(CHECKOUT), MARK: mark}
    process = Started(
        [sys.executable, *TORCHRUN, f"--max-restarts={restarts}", "-m", "pipetrain", *SMALL, *words],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    process.mark = mark
    try:
        yield process
    finally:
        # A stopped process would outlive its torchrun.
        for pid in living(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


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


def ended(process: Started, deadline: float = 60) -> str:
    """Wait for the end, and return what was said."""
    out, _ = process.communicate(timeout=deadline)
    return out


def said(out: str) -> str:
    return "\n".join(line for line in out.splitlines() if line.startswith("pipetrain: "))


RANDOM = random.Random(0)
WHAT = {
    "SIGKILL": r"rank {peer} lost rank {rank} at the \w+ of microbatch \d+: .*; stage {peer} was at",
    "exit": r"rank {peer} lost rank {rank} at the \w+ of microbatch \d+: .*; stage {peer} was at",
    "error": r"rank {rank}, stage {rank}, action {rank}F\d+@\d+: ValueError: this layer had enough",
    "memory": r"rank {rank}, stage {rank}, action {rank}F\d+@\d+: RuntimeError: .*memory",
}


@pytest.mark.parametrize(("kind", "rank"), [("SIGKILL", 0), ("exit", 1), ("error", 0), ("memory", 1)])
def test_a_rank_that_fails_ends_all_and_is_named_and_a_whole_checkpoint_is_left(kind, rank, tmp_path):
    at = RANDOM.randint(50, 95)  # 24 microbatches an epoch
    words = [*FAULTY, f"+model.kind={kind}", f"+model.rank={rank}", f"+model.at={at}", "epochs=4"]
    with started(tmp_path, [*words, "run_dir=run"]) as process:
        out = ended(process)
        assert process.returncode != 0
        assert living(process.mark) == {}
    assert re.search(WHAT[kind].format(rank=rank, peer=1 - rank), said(out)), out
    _, manifest = next(newest_first(tmp_path / "run" / CHECKPOINTS))
    assert isinstance(manifest, Manifest)
    assert manifest.position.epoch in ((at - 1) // 24, (at - 1) // 24 - 1)  # the last may be on its way


def test_a_rank_that_stands_still_is_waited_for_no_longer_than_the_timeout(tmp_path):
    rank = 1
    words = [*FAULTY, "+model.kind=SIGSTOP", f"+model.rank={rank}", "+model.at=30", "timeout=3"]
    with started(tmp_path, [*words, "run_dir=run"]) as process:
        lines = []
        for line in process.stdout:  # torchrun itself waits for the stopped one much longer
            lines.append(line)
            if "waited 3 s" in line:
                break
        assert re.search(rf"rank {1 - rank} waited 3 s for .*; stage {1 - rank} was at", "".join(lines)), (
            lines
        )


# Signals, and coming back


def weights(run: Path) -> dict[str, object]:
    """The weights of a run's newest checkpoint."""
    folder, manifest = next(newest_first(run / CHECKPOINTS))
    assert isinstance(manifest, Manifest), manifest
    return {k: t for name in manifest.parts for k, t in load_file(folder / name).items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


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


LONG = ["epochs=12", "schedule=pipedream", "window=2", "checkpoint.every=3", "checkpoint.unit=updates"]


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("unharmed")
    with started(folder, [*LONG, "run_dir=run"]) as process:
        out = ended(process)
        assert process.returncode == 0, out
    return folder / "run"


@pytest.mark.parametrize(("rank", "after"), [(0, 3), (1, 7)])
def test_killed_under_torchrun_it_comes_back_and_ends_the_same(rank, after, unharmed, tmp_path):
    with started(tmp_path, [*LONG, "run_dir=run", "resume=auto"], restarts=3) as process:
        await_epoch(process, after)
        os.kill(rank_of(process, rank), signal.SIGKILL)
        out = ended(process)
        assert process.returncode == 0, out
    assert "going on from" in out
    assert same(weights(tmp_path / "run"), weights(unharmed))
    rows = [(run / "metrics.csv").read_text().splitlines() for run in (tmp_path / "run", unharmed)]
    mine, theirs = ([line.split(",")[:6] for line in row] for row in rows)
    assert mine == theirs


def test_a_stop_saves_and_ends_well_and_the_run_goes_on_later(unharmed, tmp_path):
    with started(tmp_path, [*LONG, "run_dir=run"]) as process:
        await_epoch(process, 2)
        os.kill(process.pid, signal.SIGTERM)  # torchrun's, which passes it on to every rank
        out = ended(process)
    assert "got SIGTERM: saving at the end of this window, then stopping" in out
    assert "go on with: run_dir=" in out
    assert not (tmp_path / "run" / "summary.json").exists()
    with started(tmp_path, [*LONG, "run_dir=run", "resume=auto"]) as process:
        out = ended(process)
        assert process.returncode == 0, out
    assert same(weights(tmp_path / "run"), weights(unharmed))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epochs"] == 12


def test_asked_to_save_it_saves_and_goes_on(tmp_path):
    with started(tmp_path, ["epochs=12", "checkpoint.every=null", "run_dir=run"]) as process:
        await_epoch(process, 2)
        os.kill(rank_of(process, 1), signal.SIGUSR1)
        end = time.monotonic() + 20
        while not list((tmp_path / "run").glob(f"{CHECKPOINTS}/update-*/manifest.json")):
            assert time.monotonic() < end
            time.sleep(0.05)
        out = ended(process)
        assert process.returncode == 0, out
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_run_that_was_left_is_not_written_over(tmp_path):
    with started(tmp_path, [*LONG, "run_dir=run"]) as process:
        await_epoch(process, 2)
    with started(tmp_path, [*LONG, "run_dir=run"]) as process:
        out = ended(process)
        assert process.returncode != 0
    assert "holds the checkpoints of a run that did not finish; go on with resume=auto" in said(out)
    with started(tmp_path, [*LONG, "run_dir=run", "resume=auto", "seed=1"]) as process:
        assert "it has seed=0, and this run has seed=1" in said(ended(process))
