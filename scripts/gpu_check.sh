#!/usr/bin/env bash
# The contract tests of the GPU code (test/gpu) on this machine's GPU, in at most 8 minutes; ends with a short table.
#
# usage: scripts/gpu_check.sh [--part pieces|backend|engines]... [--json FILE]
#        scripts/gpu_check.sh --prepare [FOLDER]     packages for a machine without network; default .gpu-wheels
#
# pieces   preprocess kernel against the CPU, spin kernel            needs a driver and a CUDA compiler (NVRTC or nvcc)
# backend  threads, contexts, memory, time; segments that only spin  needs pycuda too
# engines  the shipped model: answers, buffers, cost, latency        needs tensorrt too
# What a part needs and does not find is installed (from FOLDER, else from PyPI) into an environment of its own, which leaves
# the machine's packages as they are; a part whose needs are not met is named with the reason. docs/gpu.md tells more.
#
# PYTHON=python3.12                        use this interpreter (default: that of .venv-gpu, of .venv if it has pycuda, else python3)
# PERCEPTION_RT_WHEELS=FOLDER              of --prepare (default .gpu-wheels)
# PERCEPTION_RT_GPU_PRECISIONS="fp32 fp16" of the part engines (default: fp32 fp16 int8)
# exit: 0 what ran passed, 1 something failed, 64 usage, 69 no GPU, or nothing can run on it
set -uo pipefail

readonly BUDGET_S=470 # of the 480 allowed; the rest is for the table
declare -A LIMIT_S=([pieces]=60 [backend]=150 [engines]=300)
declare -A NEEDS=(
  [pieces]="numpy cv2 pytest hypothesis"
  [backend]="numpy cv2 pytest hypothesis onnx pycuda"
  [engines]="numpy cv2 pytest hypothesis onnx pycuda onnxruntime"
)
declare -A PACKAGE=([cv2]=opencv-python-headless) # where it is called otherwise than the module

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# A python of another ROS environment may have started us.
if [ -n "${_ROS_WHEELS_BOOTSTRAP_COMPLETE:-}" ]; then unset _ROS_WHEELS_BOOTSTRAP_COMPLETE LD_LIBRARY_PATH; fi
unset PYTHONHOME VIRTUAL_ENV

usage() { sed -n '/^# usage/,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 64; }
say() { echo "gpu_check: $*" >&2; }

# --- pycuda --------------------------------------------------------------------------------------
# build_pycuda PYTHON FOLDER [TOOLKIT]: a wheel, from its source, without cuRAND; PYTHON has pip, setuptools, wheel and
# numpy. Against the headers of TOOLKIT where it has them, else of CUDA 12 from PyPI, which suit newer drivers too.
build_pycuda() {
  local python=$1 folder=$2 toolkit=${3:-/nonexistent} source=$work/pycuda headers="" package
  package=$(grep '^pycuda==' "$root/requirements/gpu-checks.txt")
  mkdir -p "$source" "$work/link"
  if [ -f "$toolkit/include/cudaProfiler.h" ]; then headers="\"$toolkit/include\""
  else
    grep -E '^nvidia-cuda-(runtime|profiler)' "$root/requirements/gpu-checks.txt" | sed 's/ *#.*//' >"$work/headers.txt"
    "$python" -m pip install --quiet --no-deps --target "$work/headers" -r "$work/headers.txt" || return
    headers="\"$work/headers/nvidia/cuda_runtime/include\", \"$work/headers/nvidia/cuda_profiler_api/include\""
  fi
  # Only to link against: the driver of the machine that runs it is found by its soname.
  echo 'int perception_rt_no_driver;' | cc -x c -shared -Wl,-soname,libcuda.so.1 -o "$work/link/libcuda.so" - || return
  if compgen -G "$folder/pycuda-*.tar.gz" >/dev/null; then cp "$folder"/pycuda-*.tar.gz "$source"
  else "$python" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation -d "$source" "$package" || return; fi
  tar -xzf "$source"/pycuda-*.tar.gz -C "$source" --strip-components=1 || return
  cat >"$source/siteconf.py" <<CONF
CUDA_ENABLE_CURAND = False
CUDA_INC_DIR = [$headers]
CUDADRV_LIB_DIR = ["$work/link"]
CONF
  say "building $package (one to three minutes)"
  LDFLAGS=-Wl,--no-as-needed "$python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$folder" "$source" \
    >"$work/pycuda.log" 2>&1 || {
    tail -n 20 "$work/pycuda.log" >&2
    return 1
  }
}

prepare() { # FOLDER
  local folder python=${PYTHON:-python3}
  mkdir -p "$1" && folder=$(cd "$1" && pwd -P) || exit 69
  "$python" -m venv "$work/venv" && python=$work/venv/bin/python || exit 69
  "$python" -m pip install --quiet setuptools wheel numpy || { say "PyPI cannot be reached"; exit 69; }
  compgen -G "$folder/pycuda-*.whl" >/dev/null || build_pycuda "$python" "$folder" || { say "pycuda was not built"; exit 69; }
  # What pycuda imports; the rest of what the parts need is bigger, and named where it is missing.
  grep -E '^(pytools|siphash24|mako|markupsafe)==' "$root/requirements/gpu-checks.txt" >"$work/beside.txt"
  grep -E '^(platformdirs|typing-extensions)==' "$root/requirements/lock.txt" >>"$work/beside.txt"
  "$python" -m pip download --quiet --no-deps -d "$folder" -r "$work/beside.txt" || exit 69
  say "for $("$python" -c 'import platform, sys; print("Python %d.%d on" % sys.version_info[:2], platform.machine())'):"
  du -ch "$folder"/* | sed "s|$folder/||" >&2
  exit 0
}

# --- arguments -----------------------------------------------------------------------------------
parts=() json=/dev/null
while [ $# -gt 0 ]; do
  case $1 in
    --part) [ -n "${LIMIT_S[${2:-none}]:-}" ] || usage; parts+=("$2"); shift 2 ;;
    --json) [ -n "${2:-}" ] || usage; json=$2; shift 2 ;;
    --prepare) [ $# -le 2 ] || usage; prepare "${2:-${PERCEPTION_RT_WHEELS:-$root/.gpu-wheels}}" ;;
    *) usage ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(pieces backend engines)

# --- python, GPU ---------------------------------------------------------------------------------
if [ -n "${PYTHON:-}" ]; then python=$PYTHON
elif [ -x "$root/.venv-gpu/bin/python" ]; then python=$root/.venv-gpu/bin/python
elif "$root/.venv/bin/python" -c 'import pycuda.driver' 2>/dev/null; then python=$root/.venv/bin/python
else python=python3; fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
  { say "$python is not Python 3.10 or later: name another with PYTHON=/path/to/python3.12"; exit 69; }
export PYTHONPATH=$root:$root/test${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 NO_COLOR=1

finish() { "$python" "$root/test/support/gpu_report.py" "$work" "$json"; }

# On standard output the reason why there is no GPU; nothing where there is one.
no_gpu=$("$python" - "$work/about.json" <<'PY'
import json, platform, sys
from support.gpu_driver import find_gpu
gpu = find_gpu()
about = {"python": platform.python_version(), "machine": platform.machine()}
if isinstance(gpu, str):
    print(gpu)
else:
    about |= {"gpu": f"{gpu.name}, SM {gpu.sm / 10}", "driver": gpu.driver}
json.dump(about, open(sys.argv[1], "w"))
PY
) || { say "$python could not ask for the GPU"; exit 69; }
if [ -n "$no_gpu" ]; then
  for part in "${parts[@]}"; do echo "$no_gpu" >"$work/$part.status"; done
  finish >/dev/null
  say "$no_gpu"
  exit 69
fi

# --- packages ------------------------------------------------------------------------------------
missing() { # [--why] MODULES...: those that cannot be imported
  "$python" - "$@" <<'PY'
import importlib, sys, warnings
warnings.simplefilter("ignore")
why = sys.argv[1] == "--why"
for name in sys.argv[1 + why:]:
    try:
        importlib.import_module("pycuda._driver" if name == "pycuda" else name)
    except Exception as error:
        print(f"{name} ({error})" if why else name)
PY
}

# An environment over the one that is there: sees all its packages, adds the missing ones, changes nothing outside.
make_environment() {
  local base=$python folder
  folder=${XDG_CACHE_HOME:-$HOME/.cache}/perception_rt/gpu_check/$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  [ -x "$folder/bin/python" ] || "$base" -m venv --without-pip --system-site-packages "$folder" || return
  "$base" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))))' \
    >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beneath.pth" || return
  python=$folder/bin/python
  "$python" -m pip --version >/dev/null 2>&1 || { say "$base has no pip"; python=$base; return 1; }
}

install_missing() {
  local wheels=${PERCEPTION_RT_WHEELS:-$root/.gpu-wheels} module names=()
  if compgen -G "$wheels/*.whl" >/dev/null; then
    say "installing what is in $wheels"
    "$python" -m pip install --quiet --no-index --no-deps "$wheels"/*.whl || say "some of it was refused"
  fi
  for module in $(missing "$@"); do
    [ "$module" = pycuda ] || names+=("${PACKAGE[$module]:-$module}")
  done
  if [ ${#names[@]} -gt 0 ]; then
    say "installing ${names[*]} from PyPI"
    timeout 90 "$python" -m pip install --quiet --retries 1 --timeout 10 "${names[@]}" || say "not all of it was installed"
  fi
  # Not where it is there but does not load: another build of it would not either.
  if [[ " $* " == *" pycuda "* ]] && ! "$python" -c 'import importlib.util as i, sys; sys.exit(not i.find_spec("pycuda"))'; then
    if "$python" -c 'import setuptools, wheel' 2>/dev/null || timeout 30 "$python" -m pip install --quiet --retries 1 --timeout 10 setuptools wheel; then
      mkdir -p "$work/built"
      if compgen -G "$wheels/pycuda-*.tar.gz" >/dev/null; then cp "$wheels"/pycuda-*.tar.gz "$work/built"; fi
      build_pycuda "$python" "$work/built" "${CUDA_HOME:-/usr/local/cuda}" &&
        timeout 60 "$python" -m pip install --quiet --retries 1 --timeout 10 "$work"/built/pycuda-*.whl
    fi
  fi
}

wanted=()
for part in "${parts[@]}"; do
  for module in ${NEEDS[$part]}; do wanted+=("$module"); done
done
mapfile -t wanted < <(printf '%s\n' "${wanted[@]}" | sort -u)
if [ -n "$(missing "${wanted[@]}")" ]; then
  if make_environment; then install_missing "${wanted[@]}"; fi
fi

# --- parts ---------------------------------------------------------------------------------------
ran=no
# Only the plugins that the tests use: with ROS sourced, its own are found too, and stop pytest 9.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
plugins=(-p _hypothesis_pytestplugin)
[ -n "$(missing pytest_timeout)" ] || plugins+=(-p pytest_timeout)
for part in "${parts[@]}"; do
  # shellcheck disable=SC2086 # several modules
  lacks=$(missing --why ${NEEDS[$part]} | paste -sd ';')
  left=$((BUDGET_S - SECONDS))
  limit=$((LIMIT_S[$part] < left ? LIMIT_S[$part] : left))
  if [ -n "$lacks" ]; then
    echo "missing: $lacks" >"$work/$part.status"
  elif [ "$part" = engines ] && [ -n "$(missing tensorrt)" ] && [ -n "$(missing tensorrt_rtx)" ]; then
    echo "missing: tensorrt (or tensorrt_rtx)" >"$work/$part.status"
  elif [ "$limit" -lt 15 ]; then
    echo "no time left of $BUDGET_S s" >"$work/$part.status"
  else
    say "$part, at most $limit s"
    PERCEPTION_RT_GPU_FIGURES=$work/$part.jsonl timeout -k 10 "$limit" \
      "$python" -m pytest "$root/test/gpu/test_$part.py" --rootdir "$root" -q -p no:cacheprovider "${plugins[@]}" --import-mode=importlib \
      -o addopts= -o filterwarnings=default -o timeout="$limit" --junitxml="$work/$part.xml"
    echo $? >"$work/$part.status"
    ran=yes
  fi
done
finish && exit 0
[ $ran = yes ] && exit 1
exit 69
