"""Labelled recordings: images and their true boxes in one bag, made alike by two scripts.

Topics: ``/camera/image/compressed`` (sensor_msgs/CompressedImage, JPEG) and ``/camera/labels``
(vision_msgs/Detection2DArray) with one message each per frame and equal headers. In the labels:

- ``bbox`` in pixels of the image, edges in continuous coordinates (column i covers [i, i + 1)),
  clipped to the image;
- ``results[0].hypothesis.class_id`` is the name of the class; ``score`` is 1 for a box that must
  be found and 0 for one to be ignored: finding it is neither right nor wrong;
- ``id`` names the object, the same in all frames that show it.

A step of the header stamps above one and a half periods is a cut: the scene or the object jumps.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore
from rosbags.typesys.store import Typestore

IMAGE_TOPIC = "/camera/image/compressed"
LABEL_TOPIC = "/camera/labels"
IMAGE_TYPE = "sensor_msgs/msg/CompressedImage"
LABEL_TYPE = "vision_msgs/msg/Detection2DArray"
FRAME_ID = "camera"
START_NS = 1_700_000_000_000_000_000
TRANSPORT_NS = 8_000_000  # typical way from shutter to recorder
JITTER_NS = 1_500_000

REPOSITORY = Path(__file__).resolve().parent.parent


class Label(NamedTuple):
    """A true box: edges in pixels of its image, inside the image."""

    class_id: str
    left: float
    top: float
    right: float
    bottom: float
    track: str
    ignore: bool = False


class LabelledFrame(NamedTuple):
    """A picture as JPEG bytes, its header stamp in ROS time, and all of its boxes."""

    stamp_ns: int
    jpeg: bytes
    labels: list[Label]


def typestore() -> Typestore:
    """The types of ROS 2 Humble and those of this repository's vision_msgs."""
    store = get_typestore(Stores.ROS2_HUMBLE)
    types: dict[str, Any] = {}
    for file in sorted((REPOSITORY / "third_party/vision_msgs/msg").glob("*.msg")):
        types.update(get_types_from_msg(file.read_text(), f"vision_msgs/msg/{file.stem}"))
    store.register(types)
    return store


def write_labelled_bag(folder: Path, frames: Iterable[LabelledFrame], seed: int) -> int:
    """Write ``frames``, in the order given, as an MCAP bag in place of ``folder``.

    Args:
        seed: of the jitter of the log times; the same input gives the same bytes.

    Returns:
        The number of frames.

    Raises:
        SystemExit: ``folder`` holds something else than a bag.
    """
    if folder.exists() and not (folder / "metadata.yaml").is_file():
        sys.exit(f"{folder} is there and no bag: name a new folder")
    store = typestore()
    jitter = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    # Metadata version 8 is the newest that ROS 2 Humble reads.
    with Writer(folder, version=8, storage_plugin=StoragePlugin.MCAP) as writer:
        images = writer.add_connection(IMAGE_TOPIC, IMAGE_TYPE, typestore=store)
        truths = writer.add_connection(LABEL_TOPIC, LABEL_TYPE, typestore=store)
        for frame in frames:
            log_ns = frame.stamp_ns + TRANSPORT_NS + round(abs(jitter.gauss(0, JITTER_NS)))
            image, labels = _messages(store, frame)
            writer.write(images, log_ns, store.serialize_cdr(image, IMAGE_TYPE))
            writer.write(truths, log_ns, store.serialize_cdr(labels, LABEL_TYPE))
            count += 1
    return count


def _messages(store: Typestore, frame: LabelledFrame) -> tuple[Any, Any]:
    def make(name: str, **fields: Any) -> Any:
        return store.types[name.replace("/", "/msg/")](**fields)

    sec, nanosec = divmod(frame.stamp_ns, 1_000_000_000)
    stamp = make("builtin_interfaces/Time", sec=sec, nanosec=nanosec)
    header = make("std_msgs/Header", stamp=stamp, frame_id=FRAME_ID)
    pose = make(  # no pose is known
        "geometry_msgs/PoseWithCovariance",
        pose=make(
            "geometry_msgs/Pose",
            position=make("geometry_msgs/Point", x=0.0, y=0.0, z=0.0),
            orientation=make("geometry_msgs/Quaternion", x=0.0, y=0.0, z=0.0, w=1.0),
        ),
        covariance=np.zeros(36),
    )

    def detection(label: Label) -> Any:
        centre = make(
            "vision_msgs/Point2D",
            x=(label.left + label.right) / 2,
            y=(label.top + label.bottom) / 2,
        )
        hypothesis = make(
            "vision_msgs/ObjectHypothesis",
            class_id=label.class_id,
            score=0.0 if label.ignore else 1.0,
        )
        return make(
            "vision_msgs/Detection2D",
            header=header,
            results=[
                make("vision_msgs/ObjectHypothesisWithPose", hypothesis=hypothesis, pose=pose)
            ],
            bbox=make(
                "vision_msgs/BoundingBox2D",
                center=make("vision_msgs/Pose2D", position=centre, theta=0.0),
                size_x=label.right - label.left,
                size_y=label.bottom - label.top,
            ),
            id=label.track,
        )

    data = np.frombuffer(frame.jpeg, np.uint8)
    return (
        make("sensor_msgs/CompressedImage", header=header, format="jpeg", data=data),
        make(
            "vision_msgs/Detection2DArray",
            header=header,
            detections=[detection(label) for label in frame.labels],
        ),
    )
