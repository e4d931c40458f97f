"""The source that a configuration asks for."""

from __future__ import annotations

import sys

import pytest

from perception_rt.capture.bag import BagSource
from perception_rt.capture.factory import make_source
from perception_rt.capture.video import VideoSource
from perception_rt.core.config import SourceConfig
from perception_rt.core.errors import UnavailableError, UsageError


def test_bag_and_video():
    assert isinstance(make_source(SourceConfig("bag", "x")), BagSource)
    assert isinstance(make_source(SourceConfig("video", "x")), VideoSource)


def test_topic_needs_a_node_and_rclpy(monkeypatch):
    with pytest.raises(UsageError, match="needs a ROS node"):
        make_source(SourceConfig("topic", "/image_raw"))
    monkeypatch.delitem(sys.modules, "perception_rt.capture.ros_image", raising=False)
    monkeypatch.setitem(sys.modules, "rclpy", None)
    monkeypatch.setitem(sys.modules, "rclpy.impl.implementation_singleton", None)
    with pytest.raises(UnavailableError, match=r"need rclpy.*scripts/setup.sh"):
        make_source(SourceConfig("topic", "/image_raw"), object())


def test_unknown_kind():
    with pytest.raises(UsageError, match="'camera' is unknown"):
        make_source(SourceConfig("camera", "x"))
