"""Frames of a bag for lock-step: every one once."""

from __future__ import annotations

import pytest

from perception_rt.capture.bag import BagSource
from perception_rt.core.config import SourceConfig
from perception_rt.core.errors import InputError, UsageError
from perception_rt.core.frame import StampSource
from perception_rt.replay.bag_frames import bag_frames


def test_every_frame_once_in_order(repository):
    config = SourceConfig("bag", str(repository / "test/data/pedestrians_mcap"))
    source = BagSource(config)
    source.open()
    seen = []
    for buffer in bag_frames(config):
        assert (buffer.error, buffer.image.shape) == ("", (576, 768, 3))
        assert buffer.stamp_source == StampSource.SIMULATED
        assert buffer.capture_stamp_ns == buffer.capture_start_ns <= buffer.capture_end_ns
        seen.append((buffer.frame_id, buffer.header_stamp_ns))
    assert seen == [(k, stamp) for k, (_, stamp) in enumerate(source.schedule(), 1)]
    assert len(seen) == 60


def test_other_sources_and_missing_bags(tmp_path):
    with pytest.raises(UsageError, match="lock-step replay reads bags only"):
        next(bag_frames(SourceConfig("topic", "/image_raw")))
    with pytest.raises(InputError, match="no such bag"):
        next(bag_frames(SourceConfig("bag", str(tmp_path / "nothing"))))
