"""The launch file, executed with a recording double of launch, starts what ``up`` starts."""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from perception_rt.ros.graph import GraphOptions, describe, to_command


class Recorded:
    """Stands for any launch action: keeps what it was made with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs


class DeclareLaunchArgument(Recorded):
    pass


class OpaqueFunction(Recorded):
    pass


class Node(Recorded):
    def command(self, prefix: Path) -> list[str]:
        """What launch_ros makes of it, parameter dictionaries written as -p."""
        k = self.kwargs
        files = [p for p in k["parameters"] if isinstance(p, str)]
        given = [p for p in k["parameters"] if isinstance(p, dict)]
        # Names as launch_ros passes them: __node and __ns remappings.
        command = [str(prefix / "lib" / k["package"] / k["executable"]), *k["arguments"]]
        command += ["--ros-args", *k["ros_arguments"]]
        command += ["-r", f"__node:={k['name']}", "-r", f"__ns:={k['namespace']}"]
        for file in files:
            command += ["--params-file", file]
        for parameters in given:
            assert parameters, "launch_ros writes a file for an empty dictionary too"
            for name, value in parameters.items():
                command += ["-p", (name, value)]
        return command


class ExecuteProcess(Recorded):
    pass


class Shutdown(Recorded):
    pass


class LaunchConfiguration:
    def __init__(self, name: str) -> None:
        self.name = name

    def perform(self, context: dict[str, str]) -> str:
        return context[self.name]


class LaunchDescription:
    def __init__(self, entities: list[Recorded]) -> None:
        self.entities = entities


@pytest.fixture
def launch_file(repository: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchDescription:
    """The description that the launch file makes, under the double."""
    doubles: dict[str, list[Any]] = {
        "launch": [LaunchDescription],
        "launch.actions": [DeclareLaunchArgument, ExecuteProcess, OpaqueFunction, Shutdown],
        "launch.substitutions": [LaunchConfiguration],
        "launch_ros": [],
        "launch_ros.actions": [Node],
    }
    for name, members in doubles.items():
        module = types.ModuleType(name)
        for member in members:
            setattr(module, member.__name__, member)
        monkeypatch.setitem(sys.modules, name, module)
    namespace = runpy.run_path(str(repository / "launch" / "perception.launch.py"))
    description = namespace["generate_launch_description"]()
    assert isinstance(description, LaunchDescription)
    return description


def started(description: LaunchDescription, arguments: dict[str, str]) -> list[Any]:
    """What is started with these launch arguments."""
    context: dict[str, str] = {}
    actions: list[Any] = []
    for entity in description.entities:
        if isinstance(entity, DeclareLaunchArgument):
            name = entity.args[0]
            context[name] = arguments.get(name, entity.kwargs["default_value"])
            choices = entity.kwargs.get("choices")
            assert choices is None or context[name] in choices
        else:
            assert isinstance(entity, OpaqueFunction)
            actions += entity.kwargs["function"](context)
    assert set(arguments) <= set(context)
    return actions


CASES: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({}, {}),
    ({"bag": "a.mcap"}, {"bag": "a.mcap"}),
    ({"source": "video", "bag": "a.avi"}, {"source": "video", "bag": "a.avi"}),
    (
        {"namespace": "front", "deadline_ms": "80", "model": "m", "log_level": "debug"},
        {"namespace": "front", "deadline_ms": "80", "model": "m", "log_level": "debug"},
    ),
    ({"use_watchdog": "false"}, {"use_watchdog": False}),
    (
        {"use_receiver": "true", "accept_simulated": "true"},
        {"use_receiver": True, "accept_simulated": True},
    ),
]


@pytest.mark.parametrize(("arguments", "options"), CASES)
def test_launch_starts_what_up_starts(
    launch_file: LaunchDescription,
    arguments: dict[str, str],
    options: dict[str, Any],
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from perception_rt.ros import graph

    monkeypatch.setattr(graph, "share_dir", lambda: repository)
    monkeypatch.setattr(graph, "install_prefix", lambda: Path("/opt/x"))
    actions = started(launch_file, arguments)
    specs = describe(GraphOptions(**options))
    assert len(actions) == len(specs)
    for action, spec in zip(actions, specs):
        assert isinstance(action.kwargs["on_exit"], Shutdown) == spec.required
        assert action.kwargs["output"] == "screen"
        if isinstance(action, ExecuteProcess):
            assert action.kwargs["cmd"] == to_command(spec)
            continue
        assert action.kwargs["additional_env"] == spec.environment
        assert spec.environment["MALLOC_TOP_PAD_"] == "67108864"
        words = action.command(Path("/opt/x"))
        flat = [w if isinstance(w, str) else f"{w[0]}:={_yaml(w[1])}" for w in words]
        assert flat == to_command(spec)


def _yaml(value: object) -> str:
    import json

    return json.dumps(value)


def test_a_launch_argument_for_every_option(launch_file: LaunchDescription) -> None:
    declared = {e.args[0] for e in launch_file.entities if isinstance(e, DeclareLaunchArgument)}
    assert declared == set(GraphOptions.__dataclass_fields__) - {"detector", "watchdog"}
