#!/usr/bin/env bash
# Train over several processes of this machine: sets up the environment, then is the command `pipetrain`.
#
#     ./launch.sh                                            the quickstart: a few minutes, no download
#     ./launch.sh model=resnet18 schedule=pipedream epochs=3 any override of the configuration
#     ./launch.sh --cfg job                                  what would run;  --help: all there is to override
#     NPROC=4 ./launch.sh ...                                with so many processes; see pipetrain/commands/launcher.py

set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/scripts/environment.sh"
use_environment run || exit
exec "$python" -m pipetrain.commands.launcher "$@"
