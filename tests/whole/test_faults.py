"""Every fault that can be caused, caused: in processes of their own, at a random step, under a deadline."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipetrain.checkpoint.files import CHECKPOINTS
from tests.support.processes import (
    DEADLINE_S,
    FAULTY,
    LAUNCHER,
    Ended,
    await_epoch,
    await_line,
    checkpoints,
    ended,
    lines_of,
    rank_of,
    said,
    started,
)
from tests.support.run_files import full_disk

pytestmark = pytest.mark.processes

RANDOM = random.Random(0)
FAILURES = {  # of rank 0: of how many, and what is said
    "exit": (2, r"rank 1 lost rank 0 at the \w+ of microbatch \d+: .*; (stage 1 was at|nothing was done)"),
    "memory": (
        1,
        r"rank 0, stage 0, action 0F\d+@\d+: RuntimeError: .*memory.*; there are \S+ GiB, and rank 0 was "
        r"predicted to hold \S+: to hold less, choose more stages",
    ),
}
FAIL_AT = {kind: RANDOM.randint(50, 95) for kind in FAILURES}  # 24 microbatches an epoch


def test_a_rank_that_fails_ends_all_and_is_named_and_a_whole_checkpoint_is_left(tmp_path):
    """A run for each way to fail; all at once, because most of their time is the start."""
    with ExitStack() as stack:
        runs = {}
        for kind, (ranks, _) in FAILURES.items():
            (tmp_path / kind).mkdir()
            words = [FAULTY[0], f"+model.kind={kind}", "+model.rank=0", f"+model.at={FAIL_AT[kind]}"]
            words += ["partition=[2]"] if ranks == 2 else []
            words += ["epochs=4", "run_dir=run"]
            run = started(tmp_path / kind, words, ranks=ranks, launcher=LAUNCHER)
            runs[kind] = stack.enter_context(run)
        for kind, process in runs.items():
            end, done = Ended.of(process, tmp_path / kind / "run"), (FAIL_AT[kind] - 1) // 24
            assert end.status != 0
            assert end.living == 0
            assert "ChildFailedError" not in end.out
            assert re.search(FAILURES[kind][1], said(end.out)), end.out
            manifest, *_ = checkpoints(end.run).values()
            assert manifest.position.epoch in (done, done - 1)  # the last may be on its way


def test_a_rank_that_stands_still_is_waited_for_no_longer_than_the_timeout(tmp_path):
    words = [*FAULTY, "+model.kind=SIGSTOP", "+model.rank=1", "+model.at=30", "timeout=5", "run_dir=run"]
    with started(tmp_path, words) as process:
        said = await_line(process, "waited 5 s")  # torchrun itself waits for the stopped one much longer
    assert re.search("rank 0 waited 5 s for .*; stage 0 was at", said), said


# Signals, and coming back


def left(run: Path) -> tuple[dict[str, bytes], list[list[str]]]:
    """The weights of a run's newest checkpoint, and what is in metrics.csv but for times."""
    (name, manifest), *_ = checkpoints(run).items()
    parts = (load_file(run / CHECKPOINTS / name / part) for part in manifest.parts)
    weights = {key: tensor.numpy().tobytes() for part in parts for key, tensor in part.items()}
    return weights, [line.split(",")[:6] for line in (run / "metrics.csv").read_text().splitlines()]


EPOCHS = 12
LONG = [f"epochs={EPOCHS}", "schedule=pipedream", "window=2", "checkpoint.every=3", "checkpoint.unit=updates"]


def test_of_runs_at_the_same_time_one_that_is_killed_and_stopped_ends_as_one_that_nobody_disturbs(tmp_path):
    """Each rank is killed once, and comes back; then all are stopped, and go on later.

    Nobody has named its folder, and its name has the time in it.
    """
    unharmed = tmp_path / "unharmed"
    with (
        started(tmp_path, [*LONG, "resume=auto"], restarts=3) as process,
        started(tmp_path, [*LONG, f"run_dir={unharmed}"]) as other,
    ):
        for rank, epoch in enumerate((2, 4)):
            await_epoch(process, epoch)
            os.kill(rank_of(process, rank), signal.SIGKILL)
        seen = await_epoch(process, 5)
        os.kill(process.pid, signal.SIGTERM)  # torchrun's, which passes it on to every rank
        out = ended(process)
        assert "got SIGTERM: saving when the pipeline is drained, then stopping" in out
        assert "go on with: run_dir=" in out
        (disturbed,) = (tmp_path / "runs").iterdir()
        assert f"going on from {disturbed}" in seen
        assert not (disturbed / "summary.json").exists()
        with started(tmp_path, [*LONG, f"run_dir={disturbed}", "resume=auto"]) as goes_on:
            out = ended(goes_on)
            assert goes_on.returncode == 0, out
            assert "going on from" in out
        out = ended(other)
        assert other.returncode == 0, out
    assert left(disturbed) == left(unharmed)
    assert json.loads((disturbed / "summary.json").read_text())["epochs"] == EPOCHS


# One long run, with a slow stage, to which much happens


SLEEP_MS, SLOW_EPOCHS = 40, 6


def await_checkpoint(run: Path) -> list[str]:
    end = time.monotonic() + DEADLINE_S
    while not (found := [*checkpoints(run)]):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def listening(pids: Sequence[int]) -> list[str]:
    """The addresses that processes listen on."""
    found = []
    for pid in pids:
        groups = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())
        sockets = {link[8:-1] for link in groups if link.startswith("socket:[")}
        for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            for _, local, _, state, *_, inode in (line.split()[:10] for line in lines):
                if state == "0A" and inode in sockets:
                    words = re.findall("." * 8, local.partition(":")[0])  # each in the machine's byte order
                    packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
                    found.append(socket.inet_ntop(family, packed))
    return found


def test_one_long_run_is_shared_asked_to_save_and_denied_the_disk_and_its_slow_stage_is_named(tmp_path):
    """Somebody starts another run in its folder, asks it to save, fills its disk; it ends as it would have.

    It does not end before the other has: see `hold` in tests.support.models.
    """
    run, hold = tmp_path / "run", tmp_path / "hold"
    hold.touch()
    words = [*FAULTY, "+model.kind=sleep", "+model.rank=1", f"+model.at={SLEEP_MS}", "run_dir=run"]
    words += [f"epochs={SLOW_EPOCHS}", "checkpoint.every=null", f"timeout={DEADLINE_S:g}"]
    with started(tmp_path, words) as process, ExitStack() as stack:
        await_line(process, "records in")
        config = (run / "config.yaml").read_text()
        second = stack.enter_context(started(tmp_path, ["run_dir=run", "seed=1"], ranks=1))
        await_epoch(process, 1)
        ranks = [rank_of(process, rank) for rank in range(2)]
        addresses = listening(ranks)  # of the machine's loopback alone
        assert addresses
        assert set(addresses) <= {"127.0.0.1", "::1"}
        os.kill(ranks[1], signal.SIGUSR1)
        (asked,) = await_checkpoint(run)
        with full_disk(ranks[1], room=4096):
            os.kill(ranks[0], signal.SIGUSR1)
            warning = await_line(process, "NOT saved")
            assert [*checkpoints(run)] == [asked]
        (sentence,) = lines_of(ended(second))
        assert process.poll() is None
        hold.unlink()
        assert (run / "config.yaml").read_text() == config
        out = ended(process)
    assert second.returncode == 2
    in_use = r"pipetrain: run_dir=\S+/run is in use by a run that is going on; choose another"
    assert re.fullmatch(in_use, sentence)
    assert process.returncode == 0, out
    assert re.search(
        r"the checkpoint of update \d+ was NOT saved: rank 1 cannot write \S+/update-\d+\.partial: .*"
        r"File too large.*; training goes on, and the checkpoints before it are as they were",
        warning,
    )
    assert [*checkpoints(run)] == [asked]
    assert not list((run / CHECKPOINTS).glob("*.partial"))
    straggler = json.loads((run / "summary.json").read_text())["straggler"]
    assert straggler["batch_s"] > 4 * SLEEP_MS / 1000
    assert f"rank 1 is the straggler: {straggler['batch_s']:.4f} s a batch" in out


# A disk without room


@pytest.mark.parametrize("room", [2**19, 16])
def test_a_run_whose_last_checkpoint_was_lost_ends_not_well_and_is_not_finished(tmp_path, room):
    """Its records may have room, its weights have not: a run that has finished would never be trained again.

    Sixteen bytes are left, because PyTorch is not imported where no temporary file can be made.
    """
    words = ["epochs=1", "partition=profile", "run_dir=run"]
    with full_disk(room=room), started(tmp_path, words, ranks=1) as process:
        out = ended(process)
    assert process.returncode == 1
    assert "Traceback" not in out
    assert "epoch 1/1: " in out
    last = "pipetrain: ended, and the checkpoint of update 6 was NOT saved, so"
    assert out.splitlines()[-1].startswith(last)
    assert not (tmp_path / "run" / "summary.json").exists()
    lost = ["profile.json", "plan.txt", "config.yaml", "timeline.png", "metrics.csv", "pipetrain.log"]
    said = [out.count(f"/run/{name} cannot be written: File too large; training goes on") for name in lost]
    assert said == [int(room == 16)] * len(lost)
