"""The recipes that are no example of Python: a notebook, a job of Slurm, an image of Docker."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import sys
import time
from configparser import ConfigParser
from contextlib import ExitStack, chdir, suppress
from pathlib import Path

import pytest

from tests.support import DEADLINE_S
from tests.support.processes import CHECKOUT, SMALL, TORCHRUN, Ended, await_epoch, finished, running

DOCS = CHECKOUT / "docs"
JOB = DOCS / "examples" / "train.sbatch"
PRETENDED = {
    "srun": """shift
for SLURM_NODEID in 0 1; do
    export SLURM_NODEID
    "$@" &
    echo $! >>pids
done
wait -n; first=$?; wait -n; exit $((first | $?))""",
    "scancel": 'kill -s "${1#--signal=}" $(cat pids)',
    "scontrol": 'case $1 in show) echo 127.0.0.1 ;; requeue) echo "$2" >>requeued ;; esac',
    "torchrun": """trap 'touch stopped$SLURM_NODEID' TERM
printf '%s\\n' "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@" >said$SLURM_NODEID
mv said$SLURM_NODEID started$SLURM_NODEID
until [ -e status$SLURM_NODEID ] || [ $SECONDS -gt 900 ]; do sleep 0.05; done
exit $(cat status$SLURM_NODEID)""",
}
"""Of Slurm, for a job of two nodes that are this machine; torchrun is forked by the tests' server."""


@pytest.mark.processes
def test_a_notebook_s_cells(tmp_path, capsys):
    page = (DOCS / "recipes.md").read_text()
    (name,) = re.findall(r"`%%writefile (\S+)`", page)
    (command,) = re.findall(r"^!torchrun (.*)$", page, re.MULTILINE)
    (reads,) = re.findall(r"```py\n(import csv.*?)```", page, re.DOTALL)
    shutil.copy(DOCS / "examples" / name, tmp_path)
    done = finished(tmp_path, ["-m", TORCHRUN, "--standalone", *shlex.split(command)])
    assert done.status == 0, done.out
    with chdir(tmp_path):
        exec(reads, {})
    assert f"all test samples {float(capsys.readouterr().out):.4f}" in done.out


def job_with_a_free_port() -> int:
    """Return a job's number, of which the file's port is free."""
    for job in range(os.getpid() % 10_000, 10_000):
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", 20_000 + job))
            return job
    raise AssertionError("no port is free")


def appeared(path: Path) -> str:
    """Wait for a file, and return what is in it."""
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.processes
def test_a_job_of_slurm_saves_before_its_time_limit_and_is_queued_again(tmp_path):
    for name, script in PRETENDED.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_JOB_ID": str(job_with_a_free_port()), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "here"}
    words = ["run_dir=run", "epochs=1000", *SMALL]
    command = [f"import os; os.execvp('bash', ['bash', {str(JOB)!r}, *{words!r}])"]
    with running(tmp_path, ["-c", *command], {**job, "PATH": path}) as process, ExitStack() as stack:
        nodes = []
        for node in range(2):
            timeout, *said = appeared(tmp_path / f"started{node}").splitlines()
            variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": timeout}
            nodes.append(stack.enter_context(running(tmp_path, ["-m", TORCHRUN, *said], variables)))
        await_epoch(nodes[0], 2)
        process.send_signal(signal.SIGTERM)
        for node, torchrun in enumerate(nodes):
            appeared(tmp_path / f"stopped{node}")
            torchrun.send_signal(signal.SIGTERM)
        ends = [Ended.of(torchrun, tmp_path / "run") for torchrun in nodes]
        for node, end in enumerate(ends):
            (tmp_path / f"status{node}.new").write_text(str(end.status))
            (tmp_path / f"status{node}.new").rename(tmp_path / f"status{node}")
        done = Ended.of(process, tmp_path / "run")
    assert (tmp_path / "requeued").read_text() == job["SLURM_JOB_ID"] + "\n", done.out
    assert done.checkpoints, ends
    assert [end.living for end in (*ends, done)] == [0] * 3


def test_the_page_shows_the_job_s_command():
    (shown,) = re.findall(r"```bash\n(srun.*?)```", (DOCS / "clusters.md").read_text(), re.DOTALL)
    assert shown in JOB.read_text()


def test_the_image_of_docker_has_what_its_files_say():
    """Docker itself is not run."""
    lines = [line.split() for line in (CHECKOUT / "Dockerfile").read_text().splitlines()]
    copied = [source for word, *sources in lines if word == "COPY" for source in sources[:-1]]
    assert [name for name in copied if not (CHECKOUT / name).exists()] == []
    setup = ConfigParser()
    setup.read(CHECKOUT / "setup.cfg")
    needed = [
        *setup["metadata"]["license_files"].split(),
        "README.md",
        "setup.cfg",
        "pyproject.toml",
        "constraints.txt",
    ]
    assert {*needed, "pipetrain", "conf"} == set(copied)
    (install,) = re.findall(r"^pip install .*?(?=  #)", (CHECKOUT / "README.md").read_text(), re.MULTILINE)
    assert ["RUN", *install.split()] in lines
    assert lines[-1] == ["ENTRYPOINT", '["pipetrain"]']
    assert "pipetrain = pipetrain.commands.launcher:main" in setup["options.entry_points"]["console_scripts"]
    assert ["USER", "trainer"] in lines
