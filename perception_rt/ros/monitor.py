"""A subscriber process that keeps everything it receives and writes it down when it is stopped.

The demo's third witness beside source and worker. It keeps the raw bytes with the instant of
receipt and decodes only at its end, so that receipt ages are not those of its own decoding. With
``--activate`` it also starts the lifecycle node, once its subscriptions are matched: no frame is
published before somebody listens.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import rclpy
from perception_rt_msgs.msg import FrameTiming, SupervisionStatus
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.serialization import deserialize_message
from rclpy.signals import SignalHandlerOptions
from vision_msgs.msg import Detection2DArray

from perception_rt.core.errors import PerceptionRtError, UnavailableError
from perception_rt.ros.lifecycle_client import ACTIVATE, CONFIGURE, LifecycleClient

ACTIVATED = "activated"
PERMIT = "permit"
"""Lines on standard output: the detector is active; the watchdog gave its first permit."""

CONFIGURE_TIMEOUT_S = 180.0
STEP_TIMEOUT_S = 20.0
MATCH_SETTLE_S = 0.5
"""Only the subscriber's side of a match is seen here; the publisher's follows in milliseconds."""


class Monitor(Node):
    """Subscribes to detections, frame timing and supervision status.

    Args:
        detections, timing, supervision: topic names.
    """

    def __init__(self, detections: str, timing: str, supervision: str) -> None:
        super().__init__("perception_rt_monitor")
        self._kept: list[tuple[str, int, bytes]] = []
        self._permit_seen = False
        reliable = QoSProfile(depth=1000, reliability=ReliabilityPolicy.RELIABLE)
        self._subscriptions_kept = [
            self.create_subscription(
                Detection2DArray, detections, self._keeper("detections"), reliable, raw=True
            ),
            self.create_subscription(
                FrameTiming, timing, self._keeper("timing"), reliable, raw=True
            ),
            self.create_subscription(
                SupervisionStatus, supervision, self._on_supervision, reliable
            ),
        ]
        self._supervision: list[dict[str, Any]] = []

    def matched(self) -> bool:
        """True when every subscription has a publisher."""
        return all(self.count_publishers(sub.topic_name) for sub in self._subscriptions_kept)

    def lines(self) -> Iterator[dict[str, Any]]:
        """All that was received, JSON-ready; ``kind``: detections, timing or supervision."""
        for kind, received_ns, data in self._kept:
            decode = _detections if kind == "detections" else _timing
            yield {"kind": kind, "received_ns": received_ns, **decode(data)}
        yield from self._supervision

    def _keeper(self, kind: str) -> Callable[[bytes], None]:
        def keep(data: bytes) -> None:
            self._kept.append((kind, time.monotonic_ns(), data))

        return keep

    def _on_supervision(self, status: SupervisionStatus) -> None:
        if status.permit and not self._permit_seen:
            self._permit_seen = True
            _say(PERMIT)
        self._supervision.append(
            {
                "kind": "supervision",
                "stamp_ns": status.stamp_ns,
                "state": status.state,
                "causes": status.causes,
                "permit": bool(status.permit),
                "reason": status.reason,
            }
        )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _stamp_ns(header: Any) -> int:
    return int(header.stamp.sec) * 1_000_000_000 + int(header.stamp.nanosec)


def _detections(data: bytes) -> dict[str, Any]:
    message = deserialize_message(data, Detection2DArray)
    boxes = []
    for detection in message.detections:
        box, best = detection.bbox, detection.results[0].hypothesis
        half_w, half_h = box.size_x / 2, box.size_y / 2
        x, y = box.center.position.x, box.center.position.y
        boxes.append([x - half_w, y - half_h, x + half_w, y + half_h, best.score, best.class_id])
    return {
        "header_stamp_ns": _stamp_ns(message.header),
        "frame": message.header.frame_id,
        "boxes": boxes,
    }


def _timing(data: bytes) -> dict[str, Any]:
    message = deserialize_message(data, FrameTiming)
    return {
        "header_stamp_ns": _stamp_ns(message.header),
        "session_id": message.session_id,
        "frame_id": message.frame_id,
        "epoch": message.epoch,
        "outcome": message.outcome,
        "exit_head": message.exit_head,
        "exit_count": message.exit_count,
        "detection_count": message.detection_count,
        "stamp_source": message.stamp_source,
        "capture_stamp_ns": message.capture_stamp_ns,
        "budget_ns": message.budget_ns,
        "deadline_ns": message.deadline_ns,
        "left_ns": message.left_ns,
        "stages": [
            [stage.stage, stage.segment, stage.start_ns, stage.end_ns] for stage in message.stages
        ],
        "outcome_totals": [int(total) for total in message.outcome_totals],
        "reason": message.reason,
    }


class _StoppedError(PerceptionRtError):
    """Asked to stop while waiting for the detector."""


def _activate(monitor: Monitor, target: str, stop: Sequence[int]) -> None:
    def check() -> None:
        if stop:
            raise _StoppedError("stopped")

    client = LifecycleClient(monitor, target, check)
    client.wait(STEP_TIMEOUT_S)
    client.change(CONFIGURE, CONFIGURE_TIMEOUT_S)
    end = time.monotonic() + STEP_TIMEOUT_S
    while not monitor.matched():
        if time.monotonic() > end:
            raise UnavailableError(f"{target} is configured, but not every topic has a publisher")
        rclpy.spin_once(monitor, timeout_sec=0.05)
    settle = time.monotonic() + MATCH_SETTLE_S
    while time.monotonic() < settle:
        rclpy.spin_once(monitor, timeout_sec=0.05)
    client.change(ACTIVATE, STEP_TIMEOUT_S)
    _say(ACTIVATED)


def main() -> int:
    """Record until SIGINT or SIGTERM, then write JSON lines; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for topic in ("detections", "timing", "supervision"):
        parser.add_argument(f"--{topic}", required=True, help="topic name")
    parser.add_argument("--activate", default="", help="lifecycle node to configure and activate")
    parser.add_argument("--out", required=True, help="file that gets the JSON lines")
    options = parser.parse_args()
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stop.append(number))
    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    monitor = Monitor(options.detections, options.timing, options.supervision)
    try:
        if options.activate:
            _activate(monitor, options.activate, stop)
        while not stop:
            rclpy.spin_once(monitor, timeout_sec=0.1)
    except _StoppedError:
        pass
    except PerceptionRtError as error:
        _say(f"error: {error}")
        return error.exit_code
    finally:
        written = _write(Path(options.out), monitor)
        rclpy.try_shutdown()
    return 0 if written else UnavailableError.exit_code


def _write(path: Path, monitor: Monitor) -> bool:
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in monitor.lines())
    except OSError as error:
        _say(f"error: {path} cannot be written: {error.strerror}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
