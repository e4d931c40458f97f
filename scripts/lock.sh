#!/usr/bin/env bash
# Writes requirements/lock.txt anew from requirements/*.in: exact versions of everything, one set for Python 3.10 to 3.13.
# Run it to take newer releases; scripts/setup.sh and scripts/test.sh then show whether they work.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../requirements"

tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
echo "lock: getting uv"
python3 -m venv "$tool"
"$tool/bin/pip" install --quiet --disable-pip-version-check uv
echo "lock: resolving"
{
  echo "# Written by scripts/lock.sh from requirements/*.in. Do not edit."
  "$tool/bin/uv" pip compile --quiet --universal --fork-strategy fewest --python-version 3.10 \
    --no-header --no-annotate ros.in build.in runtime.in dev.in
} >"$tool/lock.txt"
mv "$tool/lock.txt" lock.txt
echo "lock: $(grep -c == lock.txt) packages in requirements/lock.txt"
