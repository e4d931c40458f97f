#!/usr/bin/env bash
# Set-up, then the whole graph on the recorded pedestrians, checked from outside, and once more with every frame late.
# Arguments go to `perception_rt demo`: --seconds 20, --json FILE, --skip-negative, ...
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
# Another environment's python may have started us: its wheels' library path must not reach ours.
if [ -n "${_ROS_WHEELS_BOOTSTRAP_COMPLETE:-}" ]; then unset _ROS_WHEELS_BOOTSTRAP_COMPLETE LD_LIBRARY_PATH; fi
exec "$root/.venv/bin/perception_rt" demo --out "$root/demo_out" "$@"
