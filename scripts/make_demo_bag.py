#!/usr/bin/env python3
"""Make test/data/pedestrians_mcap from the pedestrian video: the same bytes at every run.

Frames from index 401 on are kept out of every training (see test/data/README.md).
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from pathlib import Path

import cv2
import numpy as np
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

FIRST_FRAME = 401
FRAMES = 60
RATE_HZ = 10
JPEG_QUALITY = 80  # 60 frames stay below 5 MB
TOPIC = "/camera/image_raw/compressed"
TYPE = "sensor_msgs/msg/CompressedImage"
START_NS = 1_700_000_000_000_000_000
TRANSPORT_NS = 8_000_000  # typical way from shutter to recorder
JITTER_NS = 1_500_000
SEED = 401

REPOSITORY = Path(__file__).resolve().parent.parent
VIDEO = REPOSITORY.parent / "shared/data/video/vtest_pedestrians_768x576_10fps.avi"
OUTPUT = REPOSITORY / "test/data/pedestrians_mcap"


def frames(video: Path) -> list[bytes]:
    """JPEG bytes of the frames, decoded in order (seeking is not exact in every container)."""
    capture = cv2.VideoCapture(str(video))
    encoded = []
    for index in range(FIRST_FRAME + FRAMES):
        ok, image = capture.read()
        if not ok:
            sys.exit(f"{video} ends at frame {index}, {FIRST_FRAME + FRAMES} are needed")
        if index >= FIRST_FRAME:
            encoded.append(
                cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes()
            )
    return encoded


def main() -> None:
    """Write the bag."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--video", type=Path, default=VIDEO)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    if not arguments.video.is_file():
        sys.exit(f"no such video: {arguments.video}; give it with --video")
    images = frames(arguments.video)

    store = get_typestore(Stores.ROS2_HUMBLE)
    message, header, stamp = (
        store.types[name] for name in (TYPE, "std_msgs/msg/Header", "builtin_interfaces/msg/Time")
    )
    jitter = random.Random(SEED)
    shutil.rmtree(arguments.output, ignore_errors=True)
    # Metadata version 8 is the newest that ROS 2 Humble reads.
    with Writer(arguments.output, version=8, storage_plugin=StoragePlugin.MCAP) as writer:
        connection = writer.add_connection(TOPIC, TYPE, typestore=store)
        for index, jpeg in enumerate(images):
            stamp_ns = START_NS + index * 1_000_000_000 // RATE_HZ
            log_ns = stamp_ns + TRANSPORT_NS + round(abs(jitter.gauss(0, JITTER_NS)))
            sec, nanosec = divmod(stamp_ns, 1_000_000_000)
            image = message(
                header=header(stamp=stamp(sec=sec, nanosec=nanosec), frame_id="camera"),
                format="jpeg",
                data=np.frombuffer(jpeg, np.uint8),
            )
            writer.write(connection, log_ns, store.serialize_cdr(image, TYPE))
    size = sum(file.stat().st_size for file in arguments.output.iterdir())
    print(f"{arguments.output}: {len(images)} frames, {size} bytes")


if __name__ == "__main__":
    main()
