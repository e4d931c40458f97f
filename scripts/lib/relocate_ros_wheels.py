"""Make this environment's ROS wheels usable as a CMake prefix. Run with its own python.

The wheels export the include directories of the machine that built them (/opt/python/...). CMake
refuses an imported target whose include directory does not exist, so they are replaced by the
real ones.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

import numpy as np

NUMPY_INCLUDE = re.compile(r"/opt/python/[^;\"\s]*/numpy/_?core/include")
PYTHON_INCLUDE = re.compile(r"/opt/python/[^;\"\s/]*/include/python3\.\d+")


def main() -> None:
    numpy_include = Path(np.get_include()).as_posix()
    python_include = Path(sysconfig.get_path("include")).as_posix()
    changed = 0
    for path in Path(sys.prefix, "share").glob("*/cmake/*.cmake"):
        before = path.read_text(encoding="utf-8")
        after = NUMPY_INCLUDE.sub(lambda _: numpy_include, before)
        after = PYTHON_INCLUDE.sub(lambda _: python_include, after)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed += 1
    print(f"relocated {changed} CMake files")


if __name__ == "__main__":
    main()
