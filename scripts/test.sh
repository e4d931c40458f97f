#!/usr/bin/env bash
# Set-up, then lint, types, architecture and all tests; last the pure rooms (core, latency, safety) on other Pythons and
# NumPys. usage: scripts/test.sh [--quick]    --quick leaves out the other Pythons
# Exit 0 only if every step passed.
set -uo pipefail

quick=no
case "$*" in
  "") ;;
  --quick) quick=yes ;;
  *) echo "usage: scripts/test.sh [--quick]" >&2; exit 64 ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root" || exit 70
exec </dev/null
export PYTHONUNBUFFERED=1 NO_COLOR=1
# A python of another ROS environment may have started us.
if [ -n "${_ROS_WHEELS_BOOTSTRAP_COMPLETE:-}" ]; then unset _ROS_WHEELS_BOOTSTRAP_COMPLETE LD_LIBRARY_PATH; fi

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
bin=$root/.venv/bin
table=()
failed=0

run() { # NAME COMMAND...
  local name=$1 began=$SECONDS rc=0; shift
  echo "== $name"
  "$@" || rc=$?
  table+=("$(printf '%-26s %-7s %4d s' "$name" "$([ "$rc" -eq 0 ] && echo passed || echo FAILED)" $((SECONDS - began)))")
  [ "$rc" -eq 0 ] || failed=1
  return "$rc"
}
skip() { echo "== $1: skipped, $2"; table+=("$(printf '%-26s skipped        %s' "$1" "$2")"); }

shell_syntax() { local script rc=0; for script in scripts/*.sh .ci/run; do bash -n "$script" || rc=1; done; return $rc; }

# The oldest NumPy that each Python has to live with: 3.10 as Humble, 3.12 as Jazzy on Ubuntu, 3.11 between them.
compat() { # PYTHON_VERSION NUMPY SCIPY
  local name="python $1" python="" candidate env=$root/.venv-compat/$1 key
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/"python$1"; do
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then python=$candidate; break; fi
  done
  [ -n "$python" ] || { skip "$name" "python$1 with venv is not installed"; return; }
  key="$2 $3 $(sha256sum <requirements/lock.txt)"
  if [ "$(cat "$env/.key" 2>/dev/null)" != "$key" ]; then
    rm -rf "$env"
    run "$name set-up" compat_setup "$python" "$env" "$2" "$3" || return
    echo "$key" >"$env/.key"
  fi
  run "$name, NumPy $2" env -u AMENT_PREFIX_PATH PYTHONPATH="$root" "$env/bin/python" -m pytest -q -p no:cacheprovider \
    --junitxml="$results/$1.xml" test/core test/latency test/safety
}
compat_setup() { # PYTHON ENV NUMPY SCIPY; neither cv2 nor rclpy
  "$1" -m venv "$2" &&
    grep -vE '^(numpy|scipy)==' requirements/lock.txt >"$results/constraints.txt" &&
    "$2/bin/pip" install --quiet --disable-pip-version-check --no-input --retries 8 --timeout 60 -c "$results/constraints.txt" \
      "numpy==$3" "scipy==$4" pytest pytest-timeout hypothesis autosar-e2e typer rich
}

run "set-up" scripts/setup.sh || exit 1
run "shell syntax" shell_syntax
run "ruff check" "$bin/ruff" check --quiet .
run "ruff format" "$bin/ruff" format --check --quiet .
run "mypy" "$bin/mypy"
run "import-linter" "$bin/lint-imports"
if [ $quick = yes ]; then
  skip "other Pythons" "--quick"
else
  compat 3.10 1.21.6 1.10.1
  compat 3.11 1.23.5 1.10.1
  compat 3.12 1.26.4 1.15.3
fi
# What needs neither a GPU nor CUDA runs with the other tests; the rest with pycuda on a stand-in driver, NVRTC, TensorRT-RTX.
gpu_checks() {
  scripts/setup_gpu_checks.sh .venv-gpu/bin/python -m pytest -q -p no:cacheprovider -m gpu_checks --durations=5 \
    --junitxml="$results/gpu.xml" test/detector test/replay
}
if [ "$(uname -m)" = x86_64 ]; then run "GPU code without a GPU" gpu_checks
else skip "GPU code without a GPU" "its packages exist for x86-64 only"; fi
run "tests" "$bin/python" -m pytest -m "not gpu_checks" --durations=10 --junitxml="$results/main.xml"

echo "== summary ($SECONDS s)"
printf '%s\n' "${table[@]}"
# One plain line over all legs; skipped counts what no leg could run and why stands in the legs' own output.
"$bin/python" - "$results" <<'PY' || failed=1
import sys
from pathlib import Path
from xml.etree import ElementTree

total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
for report in Path(sys.argv[1]).glob("*.xml"):
    for suite in ElementTree.parse(report).iter("testsuite"):
        for key in total:
            total[key] += int(suite.get(key, 0))
bad = total["failures"] + total["errors"]
print(f"{total['tests'] - bad - total['skipped']} passed, {bad} failed, {total['skipped']} skipped")
PY
exit $failed
