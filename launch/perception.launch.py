"""Detector and watchdog under ROS's launch. What is started is described in
perception_rt/ros/graph.py.
"""

from __future__ import annotations

from typing import Any

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, OpaqueFunction, Shutdown
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from perception_rt.ros.graph import (
    LOG_LEVELS,
    PACKAGE,
    GraphOptions,
    NodeSpec,
    describe,
    to_command,
)

BOOLEAN = ["true", "false"]
ARGUMENTS = {
    "source": ("", "bag, video or topic; empty: as in params_file, bag where bag is given", None),
    "bag": ("", "path of the bag or video", None),
    "model": ("", "directory with manifest.json; empty: as in params_file", None),
    "deadline_ms": (
        "",
        "milliseconds from capture stamp to deadline; empty: as in params_file",
        None,
    ),
    "params_file": ("", "parameters of the nodes; empty: the file shipped with the package", None),
    "namespace": ("", "namespace of the nodes", None),
    "use_watchdog": ("true", "start the watchdog", BOOLEAN),
    "use_receiver": ("false", "start the reference safety receiver", BOOLEAN),
    "accept_simulated": ("false", "let that receiver grant for bags and videos", BOOLEAN),
    "log_level": ("info", "of the nodes", list(LOG_LEVELS)),
}


def start(context: Any) -> list[Any]:
    """Turn the launch arguments into actions."""
    values = {name: LaunchConfiguration(name).perform(context) for name in ARGUMENTS}
    options = {
        name: value == "true" if ARGUMENTS[name][2] is BOOLEAN else value
        for name, value in values.items()
    }
    return [action(spec) for spec in describe(GraphOptions(**options))]


def action(spec: NodeSpec) -> Any:
    """One process of the description as a launch action; the launch ends with a required one."""
    common = {
        "output": "screen",
        "on_exit": Shutdown(reason=f"{spec.name} ended") if spec.required else None,
    }
    if not spec.ros:
        return ExecuteProcess(cmd=to_command(spec), name=spec.name, **common)
    return Node(
        package=PACKAGE,
        executable=spec.executable,
        name=spec.name,
        namespace=spec.namespace,
        parameters=[*spec.params_files, *([dict(spec.parameters)] if spec.parameters else [])],
        arguments=list(spec.arguments),
        ros_arguments=["--log-level", spec.log_level],
        additional_env=dict(spec.environment),
        **common,
    )


def generate_launch_description() -> LaunchDescription:
    """What ``ros2 launch perception_rt perception.launch.py`` reads."""
    declared = []
    for name, (default, text, choices) in ARGUMENTS.items():
        limits = {"choices": choices} if choices else {}
        declared.append(
            DeclareLaunchArgument(name, default_value=default, description=text, **limits)
        )
    return LaunchDescription([*declared, OpaqueFunction(function=start)])
