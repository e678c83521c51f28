#!/usr/bin/env bash
# Check everything: lint, format, types, tests. Arguments go to pytest: scripts/test.sh -x -k pipedream
#
# Stops at the first tool that fails, with its status. Tests run in the checkout's folder; a thread a process,
# because the tests start several processes at a time.

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
step pytest "$@"
