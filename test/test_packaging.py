"""What ROS, pip and people find where they look: executables, shared files, lock, interfaces."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import perception_rt

EXECUTABLES = {
    "perception_rt": "perception_rt.cli:main",
    "detector_node": "perception_rt.ros.main:detector_node",
    "watchdog_node": "perception_rt.ros.main:watchdog_node",
    "safety_receiver": "perception_rt.safety.receiver:main",
}
MESSAGES = ["FrameTiming", "SafetyStatus", "StageTiming", "SupervisionStatus", "WorkerHeartbeat"]
FIXED_WIDTH = re.compile(
    r"(bool|u?int(8|16|32|64)|string<=\d+|std_msgs/Header|StageTiming)(\[(<=)?\d+\])?"
)


def message_lines(repository: Path, message: str) -> list[str]:
    path = repository / "interfaces" / "perception_rt_msgs" / "msg" / f"{message}.msg"
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def test_versions_agree(repository):
    for manifest in ("package.xml", "interfaces/perception_rt_msgs/package.xml"):
        found = ET.parse(repository / manifest).findtext("version")
        assert found == perception_rt.__version__, manifest
    assert metadata.version("perception_rt") == perception_rt.__version__


def test_executables_are_declared_as_ros_and_people_expect():
    points = metadata.distribution("perception_rt").entry_points
    found = {point.name: point.value for point in points if point.group == "console_scripts"}
    assert found == EXECUTABLES


@pytest.mark.parametrize("target", EXECUTABLES.values())
def test_executable_can_be_loaded(target):
    module, function = target.split(":")
    assert callable(getattr(import_module(module), function))


def test_executables_lie_where_launch_ros_looks():
    folder = Path(sys.prefix, "lib", "perception_rt")
    assert {path.name for path in folder.iterdir()} == set(EXECUTABLES)
    for path in folder.iterdir():
        assert os.access(path, os.X_OK), path


def test_colcon_puts_executables_there_too(repository):
    config = configparser.ConfigParser()
    config.read(repository / "setup.cfg")
    assert config["install"]["install_scripts"] == "$base/lib/perception_rt"
    assert config["develop"]["script_dir"] == "$base/lib/perception_rt"


def test_package_share_is_live(repository):
    from ament_index_python.packages import get_package_share_directory

    share = Path(get_package_share_directory("perception_rt"))
    assert (share / "package.xml").samefile(repository / "package.xml")
    for folder in ("launch", "config", "models"):
        assert (share / folder).samefile(repository / folder)


def test_prefix_is_known_without_sourcing():
    """A plain shell, no AMENT_PREFIX_PATH, no LD_LIBRARY_PATH."""
    code = (
        "import os, sys, rclpy, vision_msgs.msg, perception_rt_msgs.msg;"
        "assert sys.prefix in os.environ['AMENT_PREFIX_PATH'].split(':')"
    )
    plain = {"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/")}
    subprocess.run([sys.executable, "-c", code], env=plain, check=True, timeout=60)


def test_data_files_name_every_shared_file_once(repository):
    """What pip or colcon would install: data_files() of setup.py, without running setup()."""
    tree = ast.parse((repository / "setup.py").read_text(encoding="utf-8"))
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    ]
    scope: dict = {"__file__": str(repository / "setup.py")}
    exec(compile(tree, "setup.py", "exec"), scope)
    pairs = scope["data_files"]()
    installed = [f"{folder}/{Path(file).name}" for folder, files in pairs for file in files]
    assert len(installed) == len(set(installed))
    assert "share/ament_index/resource_index/packages/perception_rt" in installed
    assert "share/perception_rt/package.xml" in installed
    for folder in ("launch", "config", "models"):
        for path in (repository / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"share/perception_rt/{path.relative_to(repository)}" in installed


def test_lock_is_exact_and_covers_what_is_asked_for(repository):
    requirements = repository / "requirements"
    locked = set()
    for line in (requirements / "lock.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*( ; .+)?", line), line
        name = line.partition("==")[0]
        locked.add(name)
    for path in requirements.glob("*.in"):
        for line in path.read_text(encoding="utf-8").splitlines():
            wanted = line.partition("#")[0].strip()
            if wanted:
                assert re.split(r"[<>=]", wanted)[0] in locked, f"{path.name}: {wanted}"


def test_installed_versions_are_the_locked_ones(repository):
    """Wheels only: where apt's ROS 2 is used, numpy and OpenCV are the distribution's."""
    if (Path(sys.prefix) / "pyvenv.cfg").read_text().count("include-system-site-packages = true"):
        pytest.skip("environment on an apt ROS 2")
    for line in (
        (repository / "requirements" / "lock.txt").read_text(encoding="utf-8").splitlines()
    ):
        if "==" in line and ";" not in line:
            name, _, version = line.partition("==")
            assert metadata.version(name) == version


@pytest.mark.parametrize("message", MESSAGES)
def test_message_fields_are_fixed_width_and_commented(repository, message):
    for line in message_lines(repository, message):
        definition, _, comment = line.partition("#")
        if not definition.strip():
            continue
        assert comment.strip(), f"{message}: no comment: {line}"
        kind, name = definition.split()[:2]
        assert FIXED_WIDTH.fullmatch(kind), f"{message}: {line}"
        if "=" in name:
            continue
        assert re.search(r"clock|CLOCK|ROS time", comment), f"{message}: clock not named: {line}"
        if name.endswith("_ns"):
            assert kind == "int64", f"{message}: {line}"
            assert "nanoseconds" in comment, f"{message}: unit not named: {line}"


@pytest.mark.parametrize("message", MESSAGES)
def test_built_message_is_the_one_in_the_tree(repository, message):
    """A .msg file changed without another set-up would be tested in its old form."""
    module = import_module("perception_rt_msgs.msg")
    fields = []
    for line in message_lines(repository, message):
        definition = line.partition("#")[0].split()
        if definition and "=" not in definition[1]:
            fields.append(definition[1])
        elif definition:
            name, value = definition[1].split("=")
            assert getattr(getattr(module, message), name) == int(value)
    assert list(getattr(module, message).get_fields_and_field_types()) == fields


def test_vision_msgs_are_those_of_the_distribution():
    """Names, types and order of vision_msgs 4: the type hash and the bytes depend on no more."""
    messages = import_module("vision_msgs.msg")
    expected = {
        "Point2D": {"x": "double", "y": "double"},
        "Pose2D": {"position": "vision_msgs/Point2D", "theta": "double"},
        "BoundingBox2D": {"center": "vision_msgs/Pose2D", "size_x": "double", "size_y": "double"},
        "ObjectHypothesis": {"class_id": "string", "score": "double"},
        "ObjectHypothesisWithPose": {
            "hypothesis": "vision_msgs/ObjectHypothesis",
            "pose": "geometry_msgs/PoseWithCovariance",
        },
        "Detection2D": {
            "header": "std_msgs/Header",
            "results": "sequence<vision_msgs/ObjectHypothesisWithPose>",
            "bbox": "vision_msgs/BoundingBox2D",
            "id": "string",
        },
        "Detection2DArray": {
            "header": "std_msgs/Header",
            "detections": "sequence<vision_msgs/Detection2D>",
        },
    }
    for name, fields in expected.items():
        found = getattr(messages, name).get_fields_and_field_types()
        assert list(found.items()) == list(fields.items()), name
