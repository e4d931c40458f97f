"""The description of the graph, and that ROS reads the command lines as they are meant."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from perception_rt.core.errors import UsageError
from perception_rt.ros import dds_settings
from perception_rt.ros.graph import GraphOptions, NodeSpec, Value, describe, to_command

PREFIX = Path("/opt/somewhere")


@pytest.fixture(scope="session")
def share(repository: Path) -> Path:
    return repository


def test_the_default_graph(share: Path) -> None:
    detector, watchdog = describe(GraphOptions(), share, {})
    params = str(share / "config" / "perception.yaml")
    added = dds_settings.environment(share, {})
    assert detector == NodeSpec("detector_node", "detector", "/", (params,), environment=added)
    assert watchdog == NodeSpec("watchdog_node", "watchdog", "/", (params,), environment=added)


def test_a_bag_and_a_namespace(share: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(share)
    options = GraphOptions(
        bag="test/data/pedestrians_mcap",
        model="models/nanodet_g_416_coco80",
        deadline_ms="33.3",
        namespace="front",
        log_level="warn",
        detector={"loop": True},
        watchdog={"pdu.port": 15021},
    )
    detector, watchdog = describe(options, share)
    assert detector.parameters == {
        "source": "bag",
        "source_uri": str(share / "test/data/pedestrians_mcap"),
        "model_path": str(share / "models/nanodet_g_416_coco80"),
        "deadline_ms": 33.3,
        "loop": True,
    }
    assert detector.full_name == "/front/detector"
    assert watchdog.namespace == "/front"
    assert watchdog.parameters == {"pdu.port": 15021}
    assert detector.log_level == watchdog.log_level == "warn"


def test_the_receiver_listens_where_the_watchdog_sends(share: Path, tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("/front/*: {ros__parameters: {pdu: {port: 16020}}}\n")
    options = GraphOptions(params_file=str(file), use_receiver=True, namespace="front")
    assert describe(options, share)[2].arguments == ["--port", "16020"]
    stronger = dataclasses.replace(options, watchdog={"pdu.port": 0, "pdu.data_id": 7})
    assert describe(stronger, share)[2].arguments == ["--port", "0", "--data-id", "7"]


def test_parameters_of_nobody_are_seen(share: Path, tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    typo = "/**/detectr: {ros__parameters: {deadline_ms: 1.0}}\n"
    file.write_text(typo)
    options = GraphOptions(params_file=str(file))
    message = "has nothing for /detector or /watchdog, only for /[*]{2}/detectr: correct its names"
    with pytest.raises(UsageError, match=message):
        describe(options, share)
    file.write_text(typo + "/detector: {ros__parameters: {deadline_ms: 50.0}}\n")
    assert [spec.unused for spec in describe(options, share)] == [("/**/detectr",), ()]


def test_the_receiver_is_a_plain_program(share: Path) -> None:
    options = GraphOptions(use_receiver=True, accept_simulated=True)
    receiver = describe(options, share)[2]
    assert to_command(receiver, PREFIX) == [
        "/opt/somewhere/lib/perception_rt/safety_receiver",
        "--accept-simulated",
        "--port",
        "15020",
        "--data-id",
        "1347572737",
    ]


def test_a_command_line(share: Path) -> None:
    spec = NodeSpec(
        "detector_node",
        "detector",
        "/front",
        ("a.yaml", "b.yaml"),
        {"loop": True, "rate": 2.0, "max_det": 5, "source_uri": "/my bag"},
        log_level="debug",
    )
    assert to_command(spec, PREFIX) == [
        "/opt/somewhere/lib/perception_rt/detector_node",
        "--ros-args",
        "--log-level",
        "debug",
        "-r",
        "__node:=detector",
        "-r",
        "__ns:=/front",
        "--params-file",
        "a.yaml",
        "--params-file",
        "b.yaml",
        "-p",
        "loop:=true",
        "-p",
        "rate:=2.0",
        "-p",
        "max_det:=5",
        "-p",
        'source_uri:="/my bag"',
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            GraphOptions(source="camera"),
            "source 'camera' is unknown: use one of bag, video, topic",
        ),
        (GraphOptions(source="bag"), "source bag needs a file"),
        (GraphOptions(source="topic", bag="x.mcap"), "source topic reads no file, but x.mcap"),
        (GraphOptions(deadline_ms="soon"), "deadline_ms must be a number of milliseconds"),
        (GraphOptions(accept_simulated=True), "accept_simulated is for the reference receiver"),
        (GraphOptions(params_file="none.yaml"), "parameters file none.yaml does not exist"),
        (GraphOptions(log_level="loud"), "log level 'loud' is unknown"),
        (GraphOptions(use_watchdog=False, use_receiver=True), "use_receiver needs use_watchdog"),
    ],
)
def test_options_that_cannot_be_used(options: GraphOptions, words: str, share: Path) -> None:
    with pytest.raises(UsageError, match=words):
        describe(options, share)


def test_the_shipped_parameters_are_the_defaults(share: Path) -> None:
    pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")
    from perception_rt.ros.parameters import DETECTOR, WATCHDOG

    shipped = yaml.safe_load((share / "config" / "perception.yaml").read_text())
    assert {
        name: {key: (type(value), value) for key, value in node["ros__parameters"].items()}
        for name, node in shipped.items()
    } == {
        "/**/detector": {n: (type(s.default), s.default) for n, s in DETECTOR.items()},
        "/**/watchdog": {n: (type(s.default), s.default) for n, s in WATCHDOG.items()},
    }


VALUES = st.dictionaries(
    st.sampled_from(["a", "b.c", "d_e"]),
    st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False),
        st.text(st.characters(min_codepoint=32, max_codepoint=0x24F), max_size=20),
    ),
    min_size=1,
)


@given(VALUES)
@settings(max_examples=30)
def test_ros_reads_back_every_value_as_it_was_given(values: dict[str, Value]) -> None:
    rclpy = pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")
    spec = NodeSpec("detector_node", "detector", "/front", parameters=values)
    context = rclpy.Context()
    context.init(to_command(spec, PREFIX), domain_id=59)
    node = rclpy.create_node(
        "other",
        context=context,
        start_parameter_services=False,
        enable_rosout=False,
        automatically_declare_parameters_from_overrides=True,
    )
    try:
        assert node.get_fully_qualified_name() == "/front/detector"
        read = {n: node.get_parameter(n).value for n in values}
        assert {n: (type(v), v) for n, v in read.items()} == {
            n: (type(v), v) for n, v in values.items()
        }
    finally:
        node.destroy_node()
        context.destroy()


@pytest.mark.parametrize("name", ["detector", "watchdog"])
@pytest.mark.parametrize("namespace", ["/", "/front", "/a/b"])
def test_the_shipped_parameters_reach_the_nodes_in_any_namespace(
    name: str, namespace: str, share: Path
) -> None:
    rclpy = pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")
    spec = NodeSpec("x", name, namespace, (str(share / "config" / "perception.yaml"),))
    context = rclpy.Context()
    context.init(to_command(spec, PREFIX), domain_id=59)
    node = rclpy.create_node(
        "x", context=context, automatically_declare_parameters_from_overrides=True
    )
    try:
        own = "deadline_ms" if name == "detector" else "pdu.port"
        others = "pdu.port" if name == "detector" else "deadline_ms"
        assert node.has_parameter(own)
        assert not node.has_parameter(others)
    finally:
        node.destroy_node()
        context.destroy()


@pytest.mark.parametrize("namespace", ["bad name", "a//b", "1a", "a/2b", "a.b", "~x"])
def test_a_namespace_that_ros_would_refuse(share: Path, namespace: str) -> None:
    with pytest.raises(UsageError, match=f"namespace '{namespace}' cannot be used"):
        describe(GraphOptions(namespace=namespace), share)


def test_a_nested_namespace(share: Path) -> None:
    assert describe(GraphOptions(namespace="/a_1/B/"), share)[0].full_name == "/a_1/B/detector"
