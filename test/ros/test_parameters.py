"""Every parameter: its own default passes, everything else outside its kind and range does not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")

from rclpy.node import Node
from rclpy.parameter import Parameter

from perception_rt.core.errors import UsageError
from perception_rt.ros.parameters import (
    DETECTOR,
    WATCHDOG,
    ParameterSpec,
    Takes,
    check_all,
    declare,
    on_set_callback,
)

ALL = [*DETECTOR.values(), *WATCHDOG.values()]
NUMBERS = [spec for spec in ALL if spec.low is not None]
ANYTHING = st.one_of(
    st.booleans(), st.integers(), st.floats(), st.text(), st.none(), st.lists(st.integers())
)


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_defaults_pass_their_own_check(spec: ParameterSpec) -> None:
    assert spec.check(spec.default) == ""
    assert spec.description.endswith(".")


@pytest.mark.parametrize("spec", NUMBERS, ids=lambda spec: spec.name)
def test_numbers_end_at_their_range(spec: ParameterSpec) -> None:
    assert spec.low is not None
    assert spec.high is not None
    kind: Any = type(spec.default)
    assert spec.check(kind(spec.low)) == ""
    assert spec.check(kind(spec.high)) == ""
    for value in (kind(spec.low) - 1, kind(spec.high) + 1):
        reason = spec.check(value)
        assert reason.startswith(f"{spec.name} must lie between {spec.low:g} and ")


@given(st.sampled_from(ALL), ANYTHING)
def test_a_value_is_accepted_only_within_type_and_range(
    spec: ParameterSpec, value: object
) -> None:
    if spec.check(value):
        assert spec.name in spec.check(value)
        return
    if isinstance(spec.default, float):
        assert isinstance(value, (int, float))
        assert not isinstance(value, bool)
    else:
        assert type(value) is type(spec.default)
    if spec.low is not None and spec.high is not None:
        assert isinstance(value, (int, float))
        assert spec.low <= value <= spec.high


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("deadline_ms", 0, "deadline_ms must lie between 1 and 60000, got 0"),
        ("deadline_ms", -33.3, "deadline_ms must lie between 1 and 60000, got -33.3"),
        ("deadline_ms", math.nan, "deadline_ms must lie between 1 and 60000, got nan"),
        ("deadline_ms", "300", "deadline_ms must be a number, got '300'"),
        ("deadline_ms", True, "deadline_ms must be a number, got True"),
        ("max_det", 2.0, "max_det must be a whole number, got 2.0"),
        ("loop", 1, "loop must be true or false, got 1"),
        ("source_uri", 7, "source_uri must be a text, got 7"),
        (
            "backend",
            "tensorflow",
            (
                "backend must be one of auto, tensorrt, onnxruntime-tensorrt, onnxruntime-cuda, "
                "onnxruntime, or module:Class, got 'tensorflow'"
            ),
        ),
        ("backend", "a:B", ""),
        (
            "fallback_backend",
            "tensorrt",
            (
                "fallback_backend must be one of auto, none, onnxruntime, or module:Class, got "
                "'tensorrt'"
            ),
        ),
        ("precision", "a:B", "precision must be one of auto, fp32, fp16, int8, got 'a:B'"),
        ("dla_core", 4, "dla_core must lie between -1 and 3, got 4"),
        ("source", "camera", "source must be one of bag, video, topic, got 'camera'"),
    ],
)
def test_reasons(name: str, value: object, reason: str) -> None:
    assert DETECTOR[name].check(value) == reason


def test_an_integer_is_a_number() -> None:
    assert DETECTOR["deadline_ms"].check(300) == ""


def test_unknown_names_bring_the_nearest_known_ones() -> None:
    with pytest.raises(UsageError) as error:
        check_all(DETECTOR, {"confidence_treshold": 0.5, "zzz": 1, "loop": True}, "/detector")
    text = str(error.value)
    assert "\n" not in text
    assert (
        "unknown parameter of /detector: 'confidence_treshold' (nearest: confidence_threshold"
        in text
    )
    assert "'zzz';" in text
    assert error.value.exit_code == 64


def test_parameters_of_ros_itself_are_passed_over() -> None:
    check_all(DETECTOR, {"use_sim_time": True, "qos_overrides./x.publisher.depth": 3}, "/detector")


def test_every_wrong_value_is_named() -> None:
    with pytest.raises(UsageError, match=r"deadline_ms must lie .*; max_det must lie"):
        check_all(DETECTOR, {"deadline_ms": 0.0, "max_det": 0}, "/detector")


def make_node(*overrides: Parameter) -> Node:
    return Node(
        "detector",
        parameter_overrides=list(overrides),
        automatically_declare_parameters_from_overrides=True,
    )


def test_declaring_takes_overrides_and_describes(ros) -> None:
    ros()
    node = make_node(Parameter("deadline_ms", value=300), Parameter("autostart", value=False))
    values = declare(node, DETECTOR)
    assert values["deadline_ms"] == 300
    assert values["autostart"] is False
    assert values["max_det"] == 100
    assert set(values) == set(DETECTOR)
    described = node.describe_parameter("deadline_ms")
    assert described.description.startswith("Milliseconds from capture stamp")
    assert described.floating_point_range[0].from_value == 1.0
    assert described.floating_point_range[0].to_value == 60_000.0
    assert node.describe_parameter("max_det").integer_range[0].to_value == 300
    assert node.describe_parameter("source").additional_constraints == "one of bag, video, topic"
    assert node.describe_parameter("autostart").read_only
    assert not node.describe_parameter("deadline_ms").read_only
    node.destroy_node()


def test_declaring_refuses_what_cannot_be_used(ros) -> None:
    ros()
    for override, words in (
        (Parameter("deadline", value=3), "unknown parameter of /detector: 'deadline'"),
        (Parameter("rate", value="fast"), "rate must be a number"),
    ):
        node = make_node(override)
        with pytest.raises(UsageError, match=words):
            declare(node, DETECTOR)
        node.destroy_node()


def test_later_changes(ros) -> None:
    ros()
    node = make_node()
    declare(node, DETECTOR)
    configured = False
    taken: list[dict[str, object]] = []

    def take(values: dict[str, object]) -> str:
        taken.append(values)
        return "not today" if values.get("max_det") == 13 else ""

    node.add_on_set_parameters_callback(on_set_callback(DETECTOR, lambda: configured, take))

    def change(name: str, value: object) -> str:
        result = node.set_parameters([Parameter(name, value=value)])[0]
        assert result.successful == (not result.reason)
        return str(result.reason)

    assert change("source_uri", "a.mcap") == ""
    configured = True
    assert change("deadline_ms", 50) == ""
    assert change("frame_skip", True) == ""
    assert change("source_uri", "b.mcap") == (
        "source_uri takes effect at configure: deactivate and clean up the node first"
    )
    assert "autostart" in change("autostart", False)
    assert "nms_threshold" in change("nms_threshold", 1.5)
    assert change("nms_threshold", "high") == "nms_threshold must be a number, got 'high'"
    assert change("max_det", 13) == "not today"
    assert taken == [
        {"source_uri": "a.mcap"},
        {"deadline_ms": 50},
        {"frame_skip": True},
        {"max_det": 13},
    ]
    assert node.get_parameter("source_uri").value == "a.mcap"
    assert node.get_parameter("max_det").value == 100
    assert node.get_parameter("deadline_ms").value == 50
    node.destroy_node()


def test_read_only_is_what_is_read_at_start() -> None:
    assert [s.name for s in DETECTOR.values() if s.takes is Takes.START] == ["autostart"]
    assert {s.takes for s in WATCHDOG.values()} == {Takes.START}
