#!/usr/bin/env bash
# Check everything: lint, format, types, tests.
#
#     scripts/test.sh                  all: tests that start processes beside those that do not
#     scripts/test.sh --quick          those that neither start processes nor train for seconds
#     scripts/test.sh -x -k pipedream  what pytest makes of these arguments
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
if [[ ${1-} == --quick ]]; then
    step pytest -m "not processes and not slow" "${@:2}"
elif (($#)); then
    step pytest "$@"
else
    said=$(mktemp)
    trap 'rm -f "$said"' EXIT
    step pytest -m processes >"$said" 2>&1 &
    status=0
    step pytest -m "not processes" || status=$?
    wait $! || status=$?
    cat "$said"
    exit "$status"
fi
