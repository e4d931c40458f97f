"""Every frame of a bag once, in order, as fast as asked for: the source of lock-step replay."""

from __future__ import annotations

import time
from collections.abc import Iterator

from perception_rt.capture.bag import Bag
from perception_rt.capture.decode import DECODERS
from perception_rt.core.config import SourceConfig
from perception_rt.core.errors import UsageError
from perception_rt.core.frame import FrameBuffer, StampSource


def bag_frames(config: SourceConfig) -> Iterator[FrameBuffer]:
    """Decode the image topic of a bag, without a schedule.

    Args:
        config: ``uri`` is the bag, ``topic`` its image topic (empty: the only one).

    Yields:
        The one buffer there is, filled anew for every frame: ``frame_id`` from 1, ``error`` set
        where a frame cannot be decoded. The capture stamp is the instant decoding began.

    Raises:
        UsageError: the source is no bag.
        InputError: as ``Bag.open`` and ``Bag.messages``, when that point is reached.
    """
    if config.kind != "bag":
        raise UsageError(f"lock-step replay reads bags only, not a source of kind '{config.kind}'")
    bag = Bag(config.uri, config.topic)
    bag.open()
    decode = DECODERS[bag.message_type]
    buffer = FrameBuffer()
    buffer.stamp_source = StampSource.SIMULATED
    for frame_id, (_, raw) in enumerate(bag.messages(), 1):
        buffer.frame_id = frame_id
        buffer.capture_stamp_ns = buffer.capture_start_ns = time.monotonic_ns()
        decode(raw, buffer)
        buffer.capture_end_ns = time.monotonic_ns()
        yield buffer
