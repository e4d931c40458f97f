"""ament_python build: the package, its executables, and what ROS looks for under share/."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import find_packages, setup

PACKAGE = "perception_rt"
ROOT = Path(__file__).resolve().parent
SHARED_FOLDERS = ("launch", "config", "models")


def data_files() -> list[tuple[str, list[str]]]:
    """Return (folder under the prefix, files) pairs, the shared folders with all below them."""
    pairs = [
        ("share/ament_index/resource_index/packages", [f"resource/{PACKAGE}"]),
        (f"share/{PACKAGE}", ["package.xml"]),
    ]
    for name in SHARED_FOLDERS:
        below: dict[str, list[str]] = {}
        for path in sorted((ROOT / name).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                relative = path.relative_to(ROOT)
                below.setdefault(relative.parent.as_posix(), []).append(relative.as_posix())
        pairs += [(f"share/{PACKAGE}/{folder}", files) for folder, files in below.items()]
    return pairs


setup(
    name=PACKAGE,
    version=runpy.run_path(str(ROOT / PACKAGE / "__init__.py"))["__version__"],
    description="Real-time object detection for ROS 2: a fixed deadline at variable quality",
    license="Apache-2.0",
    maintainer="perception_rt maintainers",
    maintainer_email="perception_rt@example.com",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=[PACKAGE, f"{PACKAGE}.*"]),
    package_data={PACKAGE: ["py.typed", "detector/kernels/*.cu"]},
    data_files=data_files(),
    zip_safe=False,
    entry_points={
        "console_scripts": [
            "perception_rt = perception_rt.cli:main",
            "detector_node = perception_rt.ros.main:detector_node",
            "watchdog_node = perception_rt.ros.main:watchdog_node",
            "safety_receiver = perception_rt.safety.receiver:main",
        ],
    },
)
