"""The topic source against rclpy's own publishers."""

from __future__ import annotations

import time

import cv2
import numpy as np
import pytest

from perception_rt.capture.factory import make_source
from perception_rt.capture.source import SourceEvent
from perception_rt.core.config import SourceConfig
from perception_rt.core.errors import UnavailableError
from perception_rt.core.frame import FrameBuffer, StampSource

rclpy = pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")
pytestmark = [
    pytest.mark.integration,
    # lark, which rclpy imports with its first message type, still imports sre_parse.
    pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning"),
]

SECOND = 10**9


@pytest.fixture
def node():
    context = rclpy.Context()
    rclpy.init(context=context, domain_id=77)
    node = rclpy.create_node("capture_test", context=context)
    yield node
    node.destroy_node()
    context.destroy()


@pytest.fixture
def opened(node):
    """An open topic source, started, and a publisher that it has been matched with."""
    from rclpy.qos import qos_profile_sensor_data
    from sensor_msgs.msg import CompressedImage, Image

    sources = []

    def make(compressed=False):
        source = make_source(SourceConfig("topic", "/image", compressed=compressed), node)
        source.open()
        sources.append(source)
        kind = CompressedImage if compressed else Image
        publisher = node.create_publisher(kind, "/image", qos_profile_sensor_data)
        until = time.monotonic() + 30
        while publisher.get_subscription_count() == 0:
            assert time.monotonic() < until, "publisher and subscription never matched"
            time.sleep(0.001)
        source.start(time.monotonic_ns())
        return source, publisher, kind

    yield make
    for source in sources:
        source.close()
        source.close()


def read_frame(source, buffer, resend):
    """Read until a frame comes; best effort may lose one, so it is sent again."""
    for _ in range(30):
        resend()
        event = source.read(buffer, time.monotonic_ns() + SECOND)
        if event == SourceEvent.FRAME:
            return
        assert event == SourceEvent.TIMEOUT
    pytest.fail("no frame arrived")


def test_raw_images(opened):
    source, publisher, kind = opened()
    assert source.stamp_source == StampSource.RECEIPT
    message = kind(height=2, width=4, encoding="rgb8", step=12, data=[1, 2, 3] * 8)
    message.header.frame_id = "front"
    message.header.stamp.sec, message.header.stamp.nanosec = 5, 7
    buffer = FrameBuffer()
    before_ns = time.monotonic_ns()
    read_frame(source, buffer, lambda: publisher.publish(message))
    assert buffer.error == ""
    assert buffer.image.tolist() == [[[3, 2, 1]] * 4] * 2
    assert (buffer.header_stamp_ns, buffer.header_frame_id) == (5 * SECOND + 7, "front")
    assert buffer.stamp_source == StampSource.RECEIPT
    assert before_ns < buffer.capture_stamp_ns == buffer.capture_start_ns
    assert buffer.capture_start_ns < buffer.capture_end_ns < time.monotonic_ns()


def test_compressed_images_and_a_bad_one(opened):
    source, publisher, kind = opened(compressed=True)
    buffer = FrameBuffer()
    read_frame(source, buffer, lambda: publisher.publish(kind(format="jpeg", data=b"no jpeg")))
    assert "is neither JPEG nor PNG" in buffer.error
    jpeg = cv2.imencode(".jpg", np.full((8, 8, 3), 90, np.uint8))[1].tobytes()
    while buffer.error:
        read_frame(source, buffer, lambda: publisher.publish(kind(format="jpeg", data=jpeg)))
    assert buffer.image[3, 3].tolist() == [90, 90, 90]


def test_the_newest_of_several_is_delivered_and_nothing_after_it(opened):
    source, publisher, kind = opened()
    message = kind(height=1, width=1, encoding="mono8", step=1, data=[0])
    buffer = FrameBuffer()

    def send_ten():
        for level in range(10):
            message.data = [level]
            publisher.publish(message)

    read_frame(source, buffer, send_ten)
    while buffer.image[0, 0, 0] != 9:  # the ones before 9 may be read as they come
        assert source.read(buffer, time.monotonic_ns() + 30 * SECOND) == SourceEvent.FRAME
    until_ns = time.monotonic_ns() + SECOND // 20
    assert source.read(buffer, until_ns) == SourceEvent.TIMEOUT
    assert time.monotonic_ns() >= until_ns


def test_until_in_the_past_returns_at_once_and_start_forgets(opened):
    source, publisher, kind = opened()
    message = kind(height=1, width=1, encoding="mono8", step=1, data=[0])
    buffer = FrameBuffer()
    assert source.read(buffer, 0) == SourceEvent.TIMEOUT
    assert not source.sample(buffer)
    read_frame(source, buffer, lambda: publisher.publish(message))
    publisher.publish(message)
    source.start(0)
    # Whatever start() did not find yet arrives within the first read.
    while source.read(buffer, time.monotonic_ns() + SECOND // 5) == SourceEvent.FRAME:
        pass
    assert source.read(buffer, 0) == SourceEvent.TIMEOUT


def test_an_invalid_topic_name(node):
    source = make_source(SourceConfig("topic", "no topic!"), node)
    with pytest.raises(UnavailableError, match="cannot subscribe to no topic!"):
        source.open()
    source.close()
