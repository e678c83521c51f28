"""The shell scripts, with a python3 that installs and trains nothing: what they start, when they set up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import DEADLINE_S

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SCRIPTS = ["launch.sh", ".ci/run", *(f"scripts/{name}.sh" for name in ("environment", "test", "compare"))]
CONFIG = ["setup.cfg", "pyproject.toml", "constraints.txt"]

# It has its packages where a file `packages` lies beside it, and notes every call but those for asking.
PYTHON = """#!/bin/bash
here=$(dirname "$0")
case "$*" in
    "-P -c "*) [[ -e $here/packages ]] && exit 0 || exit 1 ;;
    "-c "*ensurepip*) exit "${NO_ENSUREPIP:-0}" ;;
    "-c from importlinter"*) ;;
    "-c "*) exit 0 ;;
    --version) echo "Python 3.11.2"; exit 0 ;;
esac
echo "OMP=$OMP_NUM_THREADS $*" >>"$NOTES"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip "*) [[ ${PIP-} == hang ]] && sleep 60; [[ ${PIP-} != fail ]] && touch "$here/packages" ;;
esac
[[ "$*" != *"${FAIL:-never}"* ]] || exit 7
"""


class Checkout:
    """A copy of the scripts and what they read, and a folder of programs."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.bin = folder / "bin"
        self.notes = folder / "notes"
        self.elsewhere = folder / "elsewhere"
        for name in [*SCRIPTS, *CONFIG]:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.bin.mkdir()
        self.elsewhere.mkdir()
        self.program("python3", PYTHON)
        self.environment = {"PATH": f"{self.bin}:{os.environ['PATH']}", "NOTES": str(self.notes)}

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def installed(self) -> Checkout:
        (self.bin / "packages").touch()
        return self

    def run(self, script: str | Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command, environment = [self.root / script, *arguments], {**self.environment, **more}
        given = {"cwd": self.elsewhere, "env": environment, "capture_output": True, "text": True}
        return subprocess.run(command, **given, timeout=DEADLINE_S, check=False)  # type: ignore[call-overload,no-any-return]

    def calls(self) -> list[str]:
        """Give what the python was called for since the last time it was asked."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        self.notes.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


VENV = "OMP= -m venv {root}/.venv"
RUN = "OMP= -m pip install -q -c constraints.txt -e ."
TEST = "OMP= -m pip install -q -c constraints.txt -e .[test]"
TRAIN = "OMP= -m pipetrain.commands.launcher epochs=1"
IMPORTS = "OMP=1 -c from importlinter.cli import lint_imports_command as lint; lint() --no-logo --no-cache"
LINT = ["OMP=1 -m ruff check .", "OMP=1 -m ruff format --check .", "OMP=1 -m mypy", IMPORTS]
PYTEST = "OMP=1 -m pytest -n 3 --dist worksteal"


@pytest.fixture
def start(checkout) -> Callable[..., list[str]]:
    def start(script: str = "launch.sh", status: int = 0, **environment: str) -> list[str]:
        done = checkout.run(script, "epochs=1", **environment)
        assert done.returncode == status, done.stderr
        return [call.replace(str(checkout.root), "{root}") for call in checkout.calls()]

    return start


def test_arguments_and_status_pass_through_a_link_in_another_folder_and_the_checkout_s_code_runs(
    checkout, tmp_path
):
    link = tmp_path / "link"
    link.symlink_to(checkout.installed().root / "launch.sh")
    words = ["run_dir='a b'", "data.root=$HOME", "*"]
    done = checkout.run(link, *words, FAIL="pipetrain.commands.launcher")
    assert done.returncode == 7
    assert checkout.calls() == ["OMP= -m pipetrain.commands.launcher run_dir='a b' data.root=$HOME *"]
    checkout.program("python3", '#!/bin/bash\necho "$PYTHONPATH" >"$NOTES"\n')
    checkout.run("launch.sh", PYTHONPATH="/mine")
    assert checkout.calls() == [f"{checkout.root}:/mine"]


def test_each_set_up_is_made_once_and_again_for_changed_requirements(checkout, start):
    assert start() == [VENV, RUN, TRAIN]
    assert start() == [TRAIN]
    assert start("scripts/test.sh") == [TEST, *LINT, f"{PYTEST} epochs=1"]
    assert start("scripts/test.sh") == [*LINT, f"{PYTEST} epochs=1"]
    assert start() == [TRAIN]
    with (checkout.root / CONFIG[0]).open("a") as file:
        file.write("# changed\n")
    assert start() == [RUN, TRAIN]
    assert start("scripts/test.sh")[0] == TEST
    assert start() == [TRAIN]


def test_a_failed_or_broken_set_up_is_started_over(checkout, start):
    assert start(status=1, PIP="fail") == [VENV, RUN]
    assert start() == [VENV, RUN, TRAIN]
    (checkout.root / ".venv/bin/packages").unlink()
    assert start() == [VENV, RUN, TRAIN]
    assert start("scripts/test.sh", status=1, FAIL="pip install") == [TEST]
    assert start() == [VENV, RUN, TRAIN]


def test_a_killed_set_up_is_started_over_and_two_starts_set_up_once(checkout):
    environment = {**checkout.environment, "PIP": "hang"}
    process = subprocess.Popen([checkout.root / "launch.sh"], env=environment, start_new_session=True)
    deadline = time.monotonic() + DEADLINE_S
    while not (checkout.notes.exists() and "pip install" in checkout.notes.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    checkout.calls()
    command, environment = [checkout.root / "launch.sh", "epochs=1"], checkout.environment
    both = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(DEADLINE_S) for process in both] == [0, 0]
    calls = checkout.calls()
    assert [calls.count(call) for call in (VENV.format(root=checkout.root), RUN, TRAIN)] == [1, 1, 2]


def test_somebody_s_own_environment_is_used_and_never_removed(checkout, start):
    own = checkout.root / ".venv/bin"
    own.mkdir(parents=True)
    shutil.copy(checkout.bin / "python3", own / "python")
    (own / "packages").touch()
    assert start() == [TRAIN]
    (own / "packages").unlink()
    assert start(status=1, PIP="fail") == [RUN]
    assert start() == [RUN, TRAIN]


OLD = "#!/bin/bash\n[[ $1 == --version ]] && echo Python 3.9.2 || exit 1\n"


@pytest.mark.parametrize(
    ("script", "why"), [(PYTHON, "it lacks ensurepip: on Debian"), (OLD, "Python 3.9.2 is too old: put")]
)
def test_a_python_that_will_not_do_is_named(checkout, script, why):
    checkout.program("python3", script)
    done = checkout.run("launch.sh", NO_ENSUREPIP="1")
    assert done.returncode == 1
    assert why in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (checkout.root / ".venv").exists()


def test_testing_stops_at_the_first_tool_that_fails_and_may_be_quick(checkout, start):
    checkout.installed()
    for steps, tool in enumerate(("ruff check", "ruff format", "mypy", "importlinter", "pytest"), 1):
        assert len(start("scripts/test.sh", status=7, FAIL=tool)) == steps
    assert checkout.run("scripts/test.sh", "--quick", "-x").returncode == 0
    assert checkout.calls() == [*LINT, f"{PYTEST} --quick -x"]


def test_ci_needs_no_terminal(checkout):
    checkout.program("python3", '#!/bin/bash\n[[ $1 == -P ]] || { echo "$CI $*" >>"$NOTES"; cat; }\n')
    assert checkout.run(".ci/run").returncode == 0
    calls = checkout.calls()
    assert "true -m pipetrain.commands.launcher" in calls
    assert calls[-1] == "true -m pytest -n 3 --dist worksteal"


def test_the_short_comparison(checkout):
    checkout.installed()
    methods = "--schedules layer_dist pipedream --models vgg16 resnet18"
    for given, passed in (("epochs=5", "-- epochs=5"), *[("--seeds 0 1 -- epochs=5",) * 2]):
        assert checkout.run("scripts/compare.sh", *given.split()).returncode == 0
        assert checkout.calls() == [f"OMP= {checkout.root}/scripts/compare.py {methods} {passed}"]
