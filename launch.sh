#!/usr/bin/env bash
# Train over several processes of this machine: sets up the environment, then starts torchrun.
#
#     ./launch.sh                                            the quickstart: a few minutes, no download
#     ./launch.sh model=resnet18 schedule=pipedream epochs=3 any override of the configuration
#     ./launch.sh --cfg job                                  what would run;  --help: all there is to override
#     NPROC=4 ./launch.sh ...                                with so many processes
#
# Processes: NPROC, or stages= among the arguments, or one per GPU; two where there is no GPU, and two for the
# quickstart. They share the machine's cores between them; threads= says otherwise.

set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/scripts/environment.sh"

# How many GPUs a process would see. `device=cpu` wants none.
gpus() {
    local argument
    for argument; do
        if [[ $argument == device=cpu ]]; then echo 0 && return; fi
    done
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true
    else
        echo 0
    fi
}

processes() {
    local argument stages='' count
    for argument; do
        if [[ $argument =~ ^\+*stages=(.*)$ ]]; then stages=${BASH_REMATCH[1]}; fi
    done
    if [[ -n ${NPROC:-} ]]; then
        echo "$NPROC"
    elif [[ $stages =~ ^[1-9][0-9]*$ ]]; then
        echo "$stages"
    else
        count=$(gpus "$@")
        echo $((count > 0 ? count : 2))
    fi
}

if [[ -n ${NPROC:-} && ! $NPROC =~ ^[1-9][0-9]{0,3}$ ]]; then
    say "NPROC must be a whole number from 1 to 9999; got $NPROC"
    exit 2
fi
if [[ $# == 0 ]]; then
    set -- experiment=quickstart
    NPROC=${NPROC:-2}
fi
count=$(processes "$@")
use_environment run || exit
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
if ((count > cores && count > 8)); then # ask on paper before so many processes are started in vain
    "$python" -m pipetrain.plan "$@" "stages=$count" >/dev/null || exit
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > count ? cores / count : 1))}
exec "$python" -m pipetrain.launcher --standalone --nproc_per_node="$count" -m pipetrain "$@"
