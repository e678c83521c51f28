"""A Pipeline from its making to its end, and others before and after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipetrain import Pipeline
from tests.support.deadlines import DEADLINE_S


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator, dtype=torch.float64), torch.arange(8) % 3


def pipe_of(model: nn.Module, schedule: str = "1f1b") -> Pipeline:
    return Pipeline(
        model,
        cross_entropy,
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        schedule,
        microbatches=2,
        device="cpu",
        threads=1,
    )


PROGRAM = """
import os
import torch
from tests.users.test_life import batch, pipe_of, small

for schedule in ("1f1b", "gpipe"):
    with pipe_of(small(), schedule) as pipe:
        pipe.step(*batch())
        print(f"rank {pipe.rank} {schedule} {pipe.updates}\\n", end="")
pipe = pipe_of(small())
pipe.step(*batch())
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for thread in map(int, os.listdir("/proc/self/task")):
    if thread != os.getpid():  # all others run when the main one does not
        os.sched_setaffinity(thread, os.sched_getaffinity(0))
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
pipe.evaluate([batch()])
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_torchrun_runs_a_program_to_its_end_with_a_pipeline_that_is_open_or_none(tmp_path: Path) -> None:
    """A thread of gloo that dropped a tensor while Python ended aborted the process."""
    script = tmp_path / "mine.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert said == [f"rank {rank} {schedule} 1" for rank in (0, 1) for schedule in ("1f1b", "gpipe")]


def made_and_closed(times: int) -> list[tuple[int, int]]:
    """Return the descriptors and threads of this process after each of so many Pipelines."""
    counts = []
    for _ in range(times):
        pipe = pipe_of(small())
        list(pipe.train([batch()]))
        pipe.evaluate([batch()])
        pipe.close()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux lists")
def test_a_pipeline_that_is_closed_leaves_no_descriptors_and_no_threads(ranks) -> None:
    for counts in ranks(made_and_closed, 6):
        assert max(counts[2:]) <= counts[1], counts
