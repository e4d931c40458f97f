"""The parameters of both nodes in one table each, and what is done with a value before it counts.

A value of the wrong type or out of range, and a name that is not in the table, are refused with
the reason: at start as a UsageError, later as the reason of the set-parameters answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)
from rclpy.node import Node
from rclpy.parameter import Parameter

from perception_rt.core.config import BACKENDS, FALLBACKS, PRECISIONS, SOURCE_KINDS
from perception_rt.core.errors import UsageError
from perception_rt.safety.e2e import DEFAULT_DATA_ID
from perception_rt.safety.transports import DEFAULT_HOST, DEFAULT_PORT

Value = bool | int | float | str

MAX_DET = 300
"""Upper end of ``max_det``: what the worker's buffers are made for."""


class Takes(Enum):
    """When a new value of a parameter takes effect."""

    START = "at the start of the node"
    CONFIGURE = "at configure"
    NEXT_FRAME = "on the next frame"


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: its type is that of ``default``.

    Attributes:
        name, description: as shown by ``ros2 param describe``.
        default: value without an override.
        takes: when a change takes effect.
        low, high: inclusive range of a number; None: none.
        choices: allowed texts; empty: any.
        classes: ``module:Class`` is allowed besides ``choices``.
    """

    name: str
    default: Value
    description: str
    takes: Takes
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    classes: bool = False

    def check(self, value: object) -> str:
        """Why ``value`` cannot be used, naming the parameter; empty when it can."""
        if not self._has_type(value):
            return f"{self.name} must be {_TYPE_NAMES[type(self.default)]}, got {value!r}"
        named = self.classes and ":" in str(value)
        if self.choices and value not in self.choices and not named:
            return f"{self.name} must be {self._allowed}, got {value!r}"
        if self.low is not None and self.high is not None:
            assert isinstance(value, (int, float))
            # The negation also refuses NaN.
            if not self.low <= value <= self.high:
                return (
                    f"{self.name} must lie between {self.low:g} and {self.high:g}, got {value:g}"
                )
        return ""

    def descriptor(self) -> ParameterDescriptor:
        """The ROS descriptor: description, range, read-only."""
        descriptor = ParameterDescriptor(
            name=self.name,
            description=f"{self.description} Takes effect {self.takes.value}.",
            additional_constraints=self._allowed,
            read_only=self.takes is Takes.START,
            # `300` is an integer to ROS; where a float is meant it is one.
            dynamic_typing=isinstance(self.default, float),
        )
        if self.low is not None and self.high is not None:
            if isinstance(self.default, float):
                descriptor.floating_point_range.append(
                    FloatingPointRange(from_value=self.low, to_value=self.high)
                )
            else:
                descriptor.integer_range.append(
                    IntegerRange(from_value=int(self.low), to_value=int(self.high), step=1)
                )
        return descriptor

    @property
    def _allowed(self) -> str:
        if not self.choices:
            return ""
        return f"one of {', '.join(self.choices)}{', or module:Class' if self.classes else ''}"

    def _has_type(self, value: object) -> bool:
        if isinstance(self.default, float):
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        return type(value) is type(self.default)


_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _table(*specs: ParameterSpec) -> dict[str, ParameterSpec]:
    return {spec.name: spec for spec in specs}


_P, _START, _CONFIGURE, _FRAME = ParameterSpec, Takes.START, Takes.CONFIGURE, Takes.NEXT_FRAME

# fmt: off
DETECTOR = _table(
    _P("model_path", "",
       "Directory with manifest.json; empty: the model shipped with the package.", _CONFIGURE),
    _P("source", "topic",
       "What kind of source frames come from.", _CONFIGURE, choices=SOURCE_KINDS),
    _P("source_uri", "",
       "Path of the bag or video; for a topic its name, empty: ~/image_raw.", _CONFIGURE),
    _P("bag_topic", "", "Image topic inside the bag; empty: the only one there.", _CONFIGURE),
    _P("compressed", False,
       "The topic carries sensor_msgs/CompressedImage instead of Image.", _CONFIGURE),
    _P("loop", False, "Start a bag or video again at its end.", _CONFIGURE),
    _P("rate", 1.0, "Speed of play of a bag or video, 1 is as recorded.", _CONFIGURE, 0.01, 100.0),
    _P("source_log", "",
       "File that gets one line per delivered frame when the worker stops.", _CONFIGURE),
    _P("deadline_ms", 100.0,
       "Milliseconds from capture stamp to deadline.", _FRAME, 1.0, 60_000.0),
    _P("confidence_threshold", 0.35, "Least score of a detection.", _FRAME, 0.0, 1.0),
    _P("nms_threshold", 0.6,
       "Overlap (IoU) from which the weaker box is suppressed.", _FRAME, 0.0, 1.0),
    _P("max_det", 100, "Most detections in one message.", _FRAME, 1, MAX_DET),
    _P("frame_skip", False, "Newest frame wins by wish: a replaced frame is not a miss.", _FRAME),
    _P("autostart", True, "Configure and activate without a lifecycle manager.", _START),
    _P("backend", "auto", "What runs the network; auto: the fastest that runs here.",
       _CONFIGURE, choices=BACKENDS, classes=True),
    _P("fallback_backend", "auto",
       "What takes over while it fails; auto: onnxruntime behind a GPU.",
       _CONFIGURE, choices=FALLBACKS, classes=True),
    _P("engine_cache_dir", "",
       "Where built TensorRT engines are kept; empty: the user's cache directory.", _CONFIGURE),
    _P("precision", "auto",
       "Precision of TensorRT engines; auto: the fastest within the stated loss.",
       _CONFIGURE, choices=PRECISIONS),
    _P("dla_core", -1, "Run on this deep learning accelerator; -1: on the GPU.",
       _CONFIGURE, -1, 3),
    _P("build_on_configure", False,
       "Build missing TensorRT engines at configure, which takes minutes.", _CONFIGURE),
    _P("intra_op_threads", 1, "Threads of the network on a CPU.", _CONFIGURE, 1, 64),
    _P("warmup_runs", 60, "Runs of every segment before ready.", _CONFIGURE, 50, 10_000),
    _P("detections_reliable", True,
       "QoS of ~/detections: reliable instead of best effort.", _CONFIGURE),
    _P("detections_depth", 1, "QoS of ~/detections: KEEP_LAST depth.", _CONFIGURE, 1, 1000),
    _P("realtime.enabled", True, "Ask for SCHED_FIFO, affinity and locked memory.", _CONFIGURE),
    _P("realtime.required", False,
       "Refuse to configure without these rights, instead of a warning.", _CONFIGURE),
    _P("realtime.capture_core", -1,
       "Core of the capture and deadline threads; -1: chosen.", _CONFIGURE, -1, 1023),
    _P("realtime.inference_core", -1,
       "Core of the inference thread; -1: chosen.", _CONFIGURE, -1, 1023),
    _P("realtime.capture_priority", 80,
       "SCHED_FIFO priority of the capture thread.", _CONFIGURE, 1, 98),
    _P("realtime.deadline_priority", 75,
       "SCHED_FIFO priority of the deadline thread.", _CONFIGURE, 1, 98),
    _P("realtime.inference_priority", 70,
       "SCHED_FIFO priority of the inference thread.", _CONFIGURE, 1, 98),
)
"""Parameters of detector_node by name."""

WATCHDOG = _table(
    _P("detector", "detector", "Name of the detector node; relative to the namespace.", _START),
    _P("pdu.host", DEFAULT_HOST, "Host that gets the safety PDU by UDP.", _START),
    _P("pdu.port", DEFAULT_PORT, "UDP port of that host.", _START, 1, 65_535),
    _P("pdu.data_id", DEFAULT_DATA_ID,
       "E2E data id of this detector's PDU.", _START, 0, 2**32 - 1),
    _P("supervision.lost_heartbeats", 3,
       "Heartbeat periods of silence until EXPIRED.", _START, 2, 50),
    _P("supervision.frozen_beats", 5,
       "Heartbeats over which a thread's counter may stand still.", _START, 1, 50),
    _P("supervision.tolerance", 2, "Error count that is still FAILED.", _START, 0, 50),
    _P("supervision.window_length", 20, "Frames of the (m,k)-firm window.", _START, 2, 64),
    _P("supervision.window_failed", 2,
       "FAILED above so many misses in the window.", _START, 0, 64),
    _P("supervision.window_expired", 4,
       "EXPIRED above so many misses in the window.", _START, 0, 64),
    _P("supervision.consecutive_expired", 3, "EXPIRED at so many misses in a row.", _START, 1, 64),
    _P("supervision.grace_ms", 2000.0,
       "Milliseconds from activation to the first frame.", _START, 0.0, 60_000.0),
    _P("supervision.frame_period_ms", 33.333333,
       "Expected milliseconds between frames.", _START, 1.0, 60_000.0),
    _P("supervision.frame_silence_floor_ms", 250.0,
       "Shortest silence that counts.", _START, 0.0, 60_000.0),
    _P("supervision.report_patience_ms", 60.0,
       "After its deadline, until a report is late.", _START, 0.0, 10_000.0),
    _P("supervision.min_exit_head", 0,
       "Shallowest exit head that may be published.", _START, 0, 7),
    _P("supervision.self_lag_cycles", 2,
       "Own lateness, in cycles, that is SELF_LAG.", _START, 1, 50),
    _P("supervision.frame_skip", False,
       "As the detector's frame_skip: replaced frames are no misses.", _START),
    _P("realtime.enabled", True, "Ask for SCHED_FIFO, affinity and locked memory.", _START),
    _P("realtime.required", False,
       "Refuse to start without these rights, instead of a warning.", _START),
    _P("realtime.core", -1, "Core of the loop; -1: chosen.", _START, -1, 1023),
    _P("realtime.priority", 85, "SCHED_FIFO priority of the loop.", _START, 1, 98),
)
"""Parameters of watchdog_node by name."""
# fmt: on

_STANDARD = ("use_sim_time", "start_type_description_service")
_STANDARD_PREFIX = "qos_overrides."


def unknown_parameter(names: Sequence[str], known: Sequence[str], node_name: str) -> str:
    """One line on parameters that do not exist, with the nearest names that do."""
    parts = []
    for name in sorted(names):
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        parts.append(f"'{name}' (nearest: {', '.join(near)})" if near else f"'{name}'")
    return (
        f"unknown parameter of {node_name}: {', '.join(parts)}; correct or remove it, "
        f"known are: {', '.join(sorted(known))}"
    )


def check_all(
    table: Mapping[str, ParameterSpec], given: Mapping[str, object], node_name: str
) -> None:
    """Check names and values.

    Args:
        table: the node's parameters.
        given: values by name; ROS's own parameters are passed over.
        node_name: for the message.

    Raises:
        UsageError: an unknown name, a wrong type, or a value out of range.
    """
    own = {name: value for name, value in given.items() if not _is_standard(name)}
    unknown = [name for name in own if name not in table]
    if unknown:
        raise UsageError(unknown_parameter(unknown, list(table), node_name))
    reasons = [reason for name, value in own.items() if (reason := table[name].check(value))]
    if reasons:
        raise UsageError(f"parameter of {node_name}: " + "; ".join(reasons))


def _is_standard(name: str) -> bool:
    return name in _STANDARD or name.startswith(_STANDARD_PREFIX)


def declare(node: Node, table: Mapping[str, ParameterSpec]) -> dict[str, Value]:
    """Declare every parameter of ``table`` with its descriptor and return the values that hold.

    Args:
        node: made with ``automatically_declare_parameters_from_overrides=True``, which shows every
            override, those that no one declares included.
        table: the node's parameters.

    Raises:
        UsageError: an override that cannot be used.
    """
    given = {
        name: parameter.value for name, parameter in node.get_parameters_by_prefix("").items()
    }
    check_all(table, given, node.get_fully_qualified_name())
    values: dict[str, Value] = {}
    for name, spec in table.items():
        if name in given:
            node.undeclare_parameter(name)
        values[name] = given.get(name, spec.default)
        node.declare_parameter(name, values[name], spec.descriptor(), ignore_override=True)
    return values


def on_set_callback(
    table: Mapping[str, ParameterSpec],
    configured: Callable[[], bool],
    take: Callable[[dict[str, Any]], str],
) -> Callable[[list[Parameter]], SetParametersResult]:
    """The callback that judges later changes.

    Args:
        table: the node's parameters.
        configured: True while values that take effect at configure are in use.
        take: gets the values, by name, of a change that nothing here refuses; returns why it
            refuses it, or "".
    """

    def on_set(parameters: list[Parameter]) -> SetParametersResult:
        values = {p.name: p.value for p in parameters if p.name in table}
        for name, value in values.items():
            spec = table[name]
            reason = spec.check(value)
            if not reason and spec.takes is Takes.CONFIGURE and configured():
                reason = (
                    f"{name} takes effect at configure: deactivate and clean up the node first"
                )
            if reason:
                return SetParametersResult(successful=False, reason=reason)
        reason = take(values)
        return SetParametersResult(successful=not reason, reason=reason)

    return on_set
