"""A ROS image topic as a frame source, taken raw in the capture thread, without an executor."""

from __future__ import annotations

import time
from typing import Any

from rclpy.impl.implementation_singleton import rclpy_implementation as _rclpy
from rclpy.qos import QoSHistoryPolicy, QoSProfile, QoSReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image

from perception_rt.capture.decode import decode_compressed_image, decode_image
from perception_rt.capture.source import SourceEvent
from perception_rt.core.config import SourceConfig
from perception_rt.core.errors import UnavailableError
from perception_rt.core.frame import FrameBuffer, StampSource

MAX_DRAIN = 8
"""Most messages taken for one frame: bounds the time that a flooding publisher can take."""


class TopicSource:
    """Delivers the newest image of a topic.

    The capture stamp is the instant of receipt (RECEIPT): the sender's clock is unknown, so its
    stamp is only passed on. QoS is sensor data: best effort, KEEP_LAST 1. The node must not be in
    an executor, which would take the messages.

    Attributes:
        skipped: messages that a newer one had overtaken before they were looked at.

    Args:
        config: ``uri`` is the resolved topic name, ``compressed`` its type.
        node: the rclpy node that subscribes.
    """

    stamp_source = StampSource.RECEIPT

    def __init__(self, config: SourceConfig, node: Any) -> None:
        self._topic = config.uri
        self._type = CompressedImage if config.compressed else Image
        self._decode = decode_compressed_image if config.compressed else decode_image
        self._node = node
        self._subscription: Any = None
        self._wait_set: Any = None
        self.skipped = 0

    def open(self) -> None:
        """Subscribe.

        Raises:
            UnavailableError: the middleware refuses, as for an invalid topic name.
        """
        qos = QoSProfile(
            history=QoSHistoryPolicy.KEEP_LAST,
            depth=1,
            reliability=QoSReliabilityPolicy.BEST_EFFORT,
        )
        try:
            self._subscription = self._node.create_subscription(
                self._type, self._topic, lambda _: None, qos, raw=True
            )
            self._wait_set = _rclpy.WaitSet(1, 0, 0, 0, 0, 0, self._node.context.handle)
        except Exception as error:  # rclpy raises a different type for each reason
            raise UnavailableError(
                f"cannot subscribe to {self._topic}: {' '.join(str(error).split())}"
            ) from error

    def start(self, start_ns: int) -> None:  # noqa: ARG002 (protocol)
        """Forget what arrived before: the first frame delivered is one received from now on."""
        self._take()

    def read(self, buffer: FrameBuffer, until_ns: int) -> SourceEvent:
        """Wait for the next image and decode it into ``buffer``; see ``Source.read``."""
        wait_set = self._wait_set
        while True:
            timeout_ns = until_ns - time.monotonic_ns()
            # rcl clears the set in every wait, and reads a negative timeout as for ever.
            wait_set.clear_entities()
            wait_set.add_subscription(self._subscription.handle)
            wait_set.wait(max(timeout_ns, 0))
            receipt_ns = time.monotonic_ns()
            raw = self._take()
            if raw is not None:
                break
            if receipt_ns >= until_ns:
                return SourceEvent.TIMEOUT
        buffer.stamp_source = StampSource.RECEIPT
        buffer.capture_stamp_ns = buffer.capture_start_ns = receipt_ns
        self._decode(raw, buffer)
        buffer.capture_end_ns = time.monotonic_ns()
        return SourceEvent.FRAME

    def sample(self, buffer: FrameBuffer) -> bool:  # noqa: ARG002 (protocol)
        """A topic has no frame before its time: False."""
        return False

    def close(self) -> None:
        """Unsubscribe; the capture thread must have stopped reading."""
        if self._subscription is not None:
            self._node.destroy_subscription(self._subscription)
        self._subscription = self._wait_set = None

    def _take(self) -> bytes | None:
        """The newest message that has arrived, or None."""
        newest: bytes | None = None
        for _ in range(MAX_DRAIN):
            taken = self._subscription.handle.take_message(self._type, True)
            if taken is None:
                break
            if newest is not None:
                self.skipped += 1
            newest = taken[0]
        return newest
