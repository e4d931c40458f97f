"""What the main programs of both nodes share: joining ROS, stopping on a signal, one line for an
error.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TypeVar

import rclpy
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from rclpy.utilities import remove_ros_args

from perception_rt.core.errors import PerceptionRtError, UnavailableError, UsageError

NodeType = TypeVar("NodeType", bound=Node)


class StopRequest:
    """Becomes true on SIGINT or SIGTERM. Handlers only set it: nothing is interrupted half-way."""

    def __init__(self) -> None:
        self.asked = False

    def install(self) -> None:
        """Handle SIGINT and SIGTERM of this process."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True


def run_node(
    node_class: Callable[[], NodeType],
    body: Callable[[NodeType, StopRequest], int],
    ros_arguments: Sequence[str] = (),
) -> int:
    """Join ROS, make the node, run ``body``, clean up.

    Args:
        node_class: makes the node.
        body: runs until the stop request; returns the exit status.
        ros_arguments: added to those of the command line.

    Returns:
        What ``body`` returned, or the exit code of the PerceptionRtError that it or ``node_class``
        raised, its message printed as one line on standard error.
    """
    stop = StopRequest()
    try:
        stop.install()
        _join(sys.argv, ros_arguments)
        try:
            node = _make(node_class)
            try:
                return body(node, stop)
            finally:
                node.destroy_node()
        finally:
            rclpy.try_shutdown()
    except PerceptionRtError as error:
        sys.stderr.write(f"error: {one_line(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 0  # before the handlers were in place: asked to stop, as by any later signal


def _join(argv: list[str], ros_arguments: Sequence[str]) -> None:
    try:
        rest = remove_ros_args(argv)[1:]
        if ros_arguments:
            argv = [*argv, "--ros-args", *ros_arguments]
        rclpy.init(args=argv, signal_handler_options=SignalHandlerOptions.NO)
    except Exception as error:
        # rcl reports a parameters file that is missing or broken in several lines.
        raise UsageError(f"ROS arguments cannot be used: {one_line(str(error))}") from error
    if rest:
        raise UsageError(
            f"unexpected argument '{rest[0]}': parameters are given as --ros-args -p name:=value"
        )


def _make(node_class: Callable[[], NodeType]) -> NodeType:
    try:
        return node_class()
    except PerceptionRtError:
        raise
    except Exception as error:
        # rclpy has a type for each reason.
        raise UnavailableError(f"node cannot be made: {one_line(str(error))}") from error


def one_line(text: str) -> str:
    """``text`` without line breaks."""
    return " ".join(text.split())
