"""Entry of a worker process that publishes to ROS: ``python -m perception_rt.ros.worker_main``, by
WorkerProcess.

Its node has no executor, no parameters and no services: nothing of rclpy runs here but publish(),
in the deadline thread, and take(), in the capture thread of a topic source. Names and QoS come
resolved from the parent node.
"""

from __future__ import annotations

import sys
import time

import rclpy
from perception_rt_msgs.msg import FrameTiming, WorkerHeartbeat
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions
from vision_msgs.msg import Detection2DArray

from perception_rt.capture.factory import make_source
from perception_rt.core.config import WorkerConfig
from perception_rt.core.errors import PerceptionRtError, RealtimeError, UnavailableError
from perception_rt.core.frame import FrameRecord
from perception_rt.detector.model import Model
from perception_rt.detector.postprocess import Detections
from perception_rt.ros.cdr import DetectionsEncoder, FrameTimingEncoder, encode_heartbeat
from perception_rt.ros.middleware import raise_threads, thread_ids
from perception_rt.runtime.publisher import Heartbeat
from perception_rt.runtime.shared_state import SharedState
from perception_rt.runtime.worker import read_config, report_end, run_worker

TIMING_DEPTH = 64
HEARTBEAT_DEPTH = 8


class RosPublisher:
    """The worker's publisher (``runtime.publisher.Publisher``): CDR bytes from templates.

    Args:
        node: of this worker.
        config: names and QoS.
        labels: class_id of class 0, 1, ...
    """

    def __init__(self, node: Node, config: WorkerConfig, labels: list[str]) -> None:
        names = config.ros
        reliability = (
            ReliabilityPolicy.RELIABLE
            if names.detections_reliable
            else ReliabilityPolicy.BEST_EFFORT
        )
        self._node = node
        self._detections_qos = QoSProfile(depth=names.detections_depth, reliability=reliability)
        self._detections = node.create_publisher(
            Detection2DArray, names.detections_topic, self._detections_qos
        )
        self._timing = node.create_publisher(
            FrameTiming, names.timing_topic, _reliable(TIMING_DEPTH)
        )
        self._heartbeat = node.create_publisher(
            WorkerHeartbeat, names.heartbeat_topic, _reliable(HEARTBEAT_DEPTH)
        )
        self._detections_encoder = DetectionsEncoder(labels, config.max_det)
        self._timing_encoder = FrameTimingEncoder()

    def warm_up(self, detections: Detections, runs: int) -> list[int]:
        """Publish ``runs`` times on a topic of its own; the nanoseconds that encoding and
        publish() took.
        """
        rehearsal = self._node.create_publisher(
            Detection2DArray, "~/warm_up", self._detections_qos
        )
        record, beat, totals = FrameRecord(), Heartbeat(0, 0), [0] * 7
        spent = []
        for _ in range(runs):
            start_ns = time.monotonic_ns()
            rehearsal.publish(self._encode(record, detections))
            spent.append(time.monotonic_ns() - start_ns)
            self._timing_encoder.encode(record, totals)
            encode_heartbeat(beat)
        self._node.destroy_publisher(rehearsal)
        return spent

    def detections(self, record: FrameRecord, detections: Detections) -> None:
        """Publish the answer of the frame in ``record``."""
        self._detections.publish(self._encode(record, detections))

    def timing(self, record: FrameRecord, totals: list[int]) -> None:
        """Publish FrameTiming."""
        self._timing.publish(self._timing_encoder.encode(record, totals))

    def heartbeat(self, beat: Heartbeat) -> None:
        """Publish WorkerHeartbeat; the first one, sent before any frame, also tells the session's
        id.
        """
        self._timing_encoder.session_id = beat.session_id
        self._heartbeat.publish(encode_heartbeat(beat))

    def _encode(self, record: FrameRecord, found: Detections) -> bytes:
        return self._detections_encoder.encode(
            record.header_stamp_ns,
            record.header_frame_id,
            found.boxes,
            found.scores,
            found.class_ids,
            found.count,
        )


def _reliable(depth: int) -> QoSProfile:
    return QoSProfile(depth=depth, reliability=ReliabilityPolicy.RELIABLE)


def main() -> int:
    """Run one worker to its end; returns the exit status."""
    try:
        config = read_config()
    except PerceptionRtError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    try:
        node = _make_node(config)
    except Exception as error:  # noqa: BLE001  the parent must hear of it, whatever it is
        return report_end(SharedState(config.state_fd), error)
    try:
        return run_worker(
            config,
            lambda asked, model: _make_publisher(node, asked, model),
            lambda asked: make_source(asked.source, node),
        )
    finally:
        node.destroy_node()
        rclpy.try_shutdown()


def _make_node(config: WorkerConfig) -> Node:
    others = thread_ids()
    try:
        rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
        node = Node(
            config.ros.node_name,
            namespace=config.ros.namespace,
            use_global_arguments=False,
            enable_rosout=False,
            start_parameter_services=False,
        )
    except Exception as error:
        raise UnavailableError(
            f"worker cannot join ROS: {' '.join(str(error).split())}"
        ) from error
    rights = config.realtime
    if rights.enabled and rights.deadline_priority > 1:
        refused = raise_threads(thread_ids() - others, rights.deadline_priority - 1)
        if refused and rights.required:
            raise RealtimeError(f"realtime.required is set and was refused: {refused}")
    return node


def _make_publisher(node: Node, config: WorkerConfig, model: Model) -> RosPublisher:
    return RosPublisher(node, config, list(model.labels))


if __name__ == "__main__":
    sys.exit(main())
