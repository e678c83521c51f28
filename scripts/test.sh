#!/usr/bin/env bash
# Check everything: lint, format, types, which floor imports which, tests.
#
#     scripts/test.sh                  all
#     scripts/test.sh --quick          something of everything that starts no process and takes no seconds
#     scripts/test.sh -x -k pipedream  what pytest makes of these arguments; -n 0 runs them in one process
#
# Stops at the first tool that fails, with its status. Tests run in the checkout's folder, three at a time, as some wait;
# a thread a process, because the tests start several processes at a time.

set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/environment.sh"
use_environment test || exit
cd -- "$checkout"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

step() {
    echo "== $*"
    "$python" -m "$@"
}

step ruff check .
step ruff format --check .
step mypy
echo "== lint-imports"
PYTHONPATH=$PYTHONPATH:scripts "$python" -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-logo --no-cache
step pytest -n 3 --dist worksteal "$@"
