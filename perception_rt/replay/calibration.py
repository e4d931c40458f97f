"""Frames to calibrate INT8 and to compare precisions on: a folder of pictures, or a bag."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from perception_rt.core.config import SourceConfig
from perception_rt.core.errors import InputError

PICTURES = (".bmp", ".jpeg", ".jpg", ".png")
MAX_FRAMES = 64


def calibration_images(path: Path, limit: int = MAX_FRAMES) -> list[NDArray[np.uint8]]:
    """Up to ``limit`` images, evenly spread, uint8 [height, width, 3], BGR.

    Args:
        path: a folder with pictures (in the order of their names), or a bag.

    Raises:
        InputError: nothing there, no picture in it, or none that can be decoded.
    """
    if not path.exists():
        raise InputError(f"no such folder or bag: {path}")
    if path.is_dir() and not (path / "metadata.yaml").exists():
        return _pictures(path, limit)
    from perception_rt.replay.bag_frames import bag_frames  # needs rosbags, pictures do not

    config = SourceConfig("bag", str(path))
    count = sum(1 for _ in bag_frames(config))
    wanted = _spread(count, limit)
    images = [
        frame.image.copy()
        for i, frame in enumerate(bag_frames(config))
        if i in wanted and not frame.error
    ]
    if not images:
        raise InputError(f"{path}: no frame of the bag can be decoded")
    return images


def _pictures(folder: Path, limit: int) -> list[NDArray[np.uint8]]:
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in PICTURES and p.is_file())
    if not files:
        raise InputError(f"{folder} holds neither a bag nor pictures ({', '.join(PICTURES)})")
    images = []
    for i in sorted(_spread(len(files), limit)):
        image = cv2.imread(str(files[i]), cv2.IMREAD_COLOR)
        if image is None:
            raise InputError(f"{files[i]} is not a picture that OpenCV can decode: remove it")
        images.append(np.asarray(image, np.uint8))
    return images


def _spread(count: int, limit: int) -> set[int]:
    """``limit`` of ``count`` positions, evenly spread; all where there are no more."""
    if count <= limit:
        return set(range(count))
    return {i * count // limit for i in range(limit)}
