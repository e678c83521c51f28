#!/usr/bin/env bash
# layer_dist against pipedream on VGG16 and ResNet18. Overrides, or compare.py's options before a --, pass through:
#
#     scripts/compare.sh data=digits epochs=5
#     scripts/compare.sh --seeds 0 1 2 -- data=digits epochs=5

set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/environment.sh"
use_environment compare || exit
[[ ${1-} == -* ]] || set -- -- "$@"
exec "$python" "$checkout/scripts/compare.py" --schedules layer_dist pipedream --models vgg16 resnet18 "$@"
