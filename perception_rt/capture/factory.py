"""The source that a configuration asks for."""

from __future__ import annotations

from perception_rt.capture.source import Source
from perception_rt.core.config import SourceConfig
from perception_rt.core.errors import UnavailableError, UsageError


def make_source(config: SourceConfig, node: object | None = None) -> Source:
    """Make the source of ``config``; only what it needs is imported.

    Args:
        config: where frames come from.
        node: the rclpy node that subscribes, for kind ``topic``.

    Raises:
        UsageError: a kind that is unknown, or ``topic`` without a node.
        UnavailableError: ``topic`` where rclpy cannot be imported.
    """
    if config.kind == "bag":
        from perception_rt.capture.bag import BagSource

        return BagSource(config)
    if config.kind == "video":
        from perception_rt.capture.video import VideoSource

        return VideoSource(config)
    if config.kind == "topic":
        if node is None:
            raise UsageError(
                "a topic source needs a ROS node: use `perception_rt up` or the launch file"
            )
        try:
            from perception_rt.capture.ros_image import TopicSource
        except ImportError as error:
            raise UnavailableError(
                f"topics need rclpy, which cannot be imported ({error}); "
                "run scripts/setup.sh, or source ROS 2"
            ) from error
        return TopicSource(config, node)
    raise UsageError(f"source kind '{config.kind}' is unknown: use bag, video or topic")
