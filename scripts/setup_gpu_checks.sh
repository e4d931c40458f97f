#!/usr/bin/env bash
# Makes .venv-gpu in the repository root: what checks the GPU code where there is no GPU. Beside the locked packages it
# holds pycuda, built here from its source against headers from pip wheels and the tests' stand-in for the CUDA driver
# (.venv-gpu/standin/libcuda.so.1), cuda-bindings, NVRTC, and TensorRT-RTX, whose builder runs on a CPU.
# Same Python as .venv; run scripts/setup.sh first. A second run takes a second.
#
# Run something in it:  scripts/setup_gpu_checks.sh COMMAND...   (after set-up; the stand-in driver is the process's libcuda)
# exit: 0 done, 69 something is missing or cannot be reached, 70 a build failed; with COMMAND: its status
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv-gpu
state=$venv/.setup # stamps and logs
started=$SECONDS

# Another environment's python may have started us: its wheels' library path must not reach ours.
if [ -n "${_ROS_WHEELS_BOOTSTRAP_COMPLETE:-}" ]; then unset _ROS_WHEELS_BOOTSTRAP_COMPLETE LD_LIBRARY_PATH; fi
unset PYTHONHOME VIRTUAL_ENV AMENT_PREFIX_PATH

say() { echo "gpu checks: $*" >&2; }
die() { local code=$1; shift; echo "gpu checks: error: $*" >&2; exit "$code"; }
stamped() { [ "$(cat "$state/$1" 2>/dev/null)" = "$2" ]; }
digest() { cat -- "$@" | sha256sum | cut -c1-16; }

step() { # LOG EXIT_CODE TEXT COMMAND...
  local log=$state/$1.log code=$2 text=$3; shift 3
  say "$text"
  "$@" >"$log" 2>&1 </dev/null || { tail -n 30 "$log" >&2; die "$code" "failed: $text (whole log: ${log#"$root"/})"; }
}

[ "$(uname -sm)" = "Linux x86_64" ] ||
  die 69 "the packages exist for Linux x86-64 only, this is $(uname -sm); on a machine with a GPU run scripts/gpu_check.sh"
[ -x "$root/.venv/bin/python" ] || die 69 ".venv is missing: run scripts/setup.sh first"
command -v g++ >/dev/null || die 69 "a C++ compiler is missing: run sudo apt-get install -y g++"
# The base interpreter: a .venv inside another would bring the ROS prefix along.
python=$("$root/.venv/bin/python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

if command -v flock >/dev/null; then
  exec 9>"$root/.setup.lock"
  flock -n 9 || { say "waiting for another set-up of this folder"; flock 9; }
fi

# --- environment ---------------------------------------------------------------------------------
key="$version $python $root"
if ! stamped environment "$key"; then
  [ ! -e "$venv" ] || { say "removing a .venv-gpu made for something else or left half-made"; rm -rf "$venv"; }
  say "making .venv-gpu with Python $version ($python)"
  "$python" -m venv "$venv"
  mkdir -p "$state"
  echo "$key" >"$state/environment"
fi

# --- packages ------------------------------------------------------------------------------------
pip() {
  "$venv/bin/python" -m pip "$@" --disable-pip-version-check --no-input --retries 8 --timeout 60 --progress-bar off --no-deps
}
# Neither ROS nor what builds and lints.
unwanted='^(#|ros-|catkin-pkg|cmake|cyclonedds|empy|lark-parser|mypy|ninja|pre-commit|ruff|scipy)'
key="$unwanted $(digest "$root"/requirements/{lock,gpu-checks}.txt)"
if ! stamped packages "$key"; then
  grep -vE "$unwanted" "$root/requirements/lock.txt" >"$state/wanted.txt"
  step packages 69 "installing $(grep -c == "$state/wanted.txt") packages of requirements/lock.txt" \
    pip install --only-binary :all: -r "$state/wanted.txt"
  grep -vE '^(#|pycuda)' "$root/requirements/gpu-checks.txt" | sed 's/ *#.*//' >"$state/gpu.txt"
  # One at a time: some are source packages that look for their neighbours.
  while read -r package; do
    step "${package%%==*}" 69 "installing $package" pip install --no-build-isolation "$package"
  done <"$state/gpu.txt"
  echo "$key" >"$state/packages"
fi
nvidia=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
headers=$nvidia/cuda_runtime/include

# --- the stand-in driver -------------------------------------------------------------------------
standin=$root/test/support/standin_cuda
key=$(digest "$standin"/*.[ch] "$standin"/*.py)
if ! stamped standin "$key"; then
  step standin 70 "building the stand-in driver" "$venv/bin/python" "$standin/build.py" "$venv/standin" "$headers"
  echo "$key" >"$state/standin"
fi

# --- pycuda --------------------------------------------------------------------------------------
build_pycuda() { # PACKAGE
  local source=$state/pycuda-source
  rm -rf "$source"
  mkdir -p "$source"
  pip download --no-binary :all: --no-build-isolation -d "$source" "$1" &&
    tar -xzf "$source"/pycuda-*.tar.gz -C "$source" --strip-components=1 &&
    cat >"$source/siteconf.py" <<CONF &&
CUDA_ENABLE_CURAND = False
CUDA_INC_DIR = ["$headers", "$nvidia/cuda_profiler_api/include"]
CUDADRV_LIB_DIR = ["$venv/standin"]
CONF
    pip install --no-build-isolation "$source" && rm -rf "$source"
}
package=$(grep '^pycuda==' "$root/requirements/gpu-checks.txt")
key=$(grep -hE '^(pycuda|nvidia-cuda-(runtime|profiler)-|numpy=)' "$root"/requirements/{lock,gpu-checks}.txt)
if ! stamped pycuda "$key"; then
  step pycuda 70 "building $package (about two minutes)" build_pycuda "$package"
  echo "$key" >"$state/pycuda"
fi

export LD_LIBRARY_PATH=$venv/standin
key="$key $(cat "$state/packages")"
if ! stamped checked "$key"; then
  step checked 70 "importing what was installed" "$venv/bin/python" -c \
    "import cuda.bindings.driver, cuda.bindings.nvrtc, onnxconverter_common, onnxruntime, pycuda.driver, tensorrt_rtx"
  echo "$key" >"$state/checked"
fi
say "ready: .venv-gpu, Python $version ($((SECONDS - started)) s)"
[ $# -gt 0 ] || exit 0
exec 9>&-
PYTHONPATH=$root exec "$@"
