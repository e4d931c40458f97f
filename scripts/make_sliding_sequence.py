#!/usr/bin/env python3
"""Make a sequence with exact truth: a window slides and zooms over labelled still pictures.

The pictures are those of one CARLA town (images and YOLO labels); one picture makes one segment.
Nothing moves but the window, so the true box at any instant is the picture's box, shifted, scaled
and clipped. The same options give the same bytes. Topics and fields: see scripts/labelled_bag.py.

Rule for boxes: clipped to the window; left out when no pixel is visible; to be ignored (score 0)
when less than a third of its area is visible or a visible side is below 4 pixels.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from labelled_bag import REPOSITORY, START_NS, Label, LabelledFrame, write_labelled_bag
from numpy.typing import NDArray

MIN_VISIBLE = 1 / 3  # share of the box's area
MIN_SIDE = 4.0  # pixels of the window's image
CUT_NS = 500_000_000  # pause between two segments
JPEG_QUALITY = 90
DATA = REPOSITORY.parent / "shared/data/carla"


class Window(NamedTuple):
    """Part of a picture that fills the image: ``zoom`` image pixels per picture pixel."""

    left: float
    top: float
    zoom: float

    def see(self, box: Label, width: int, height: int) -> Label | None:
        """``box`` (pixels of the picture) in the image of ``width`` x ``height`` pixels.

        Returns:
            The visible part, marked to be ignored by the rule above; None: nothing is visible.
        """
        edges = (
            (box.left - self.left) * self.zoom,
            (box.top - self.top) * self.zoom,
            (box.right - self.left) * self.zoom,
            (box.bottom - self.top) * self.zoom,
        )
        left, right = (min(max(x, 0.0), float(width)) for x in edges[::2])
        top, bottom = (min(max(y, 0.0), float(height)) for y in edges[1::2])
        if right <= left or bottom <= top:
            return None
        visible = (right - left) * (bottom - top)
        whole = (edges[2] - edges[0]) * (edges[3] - edges[1])
        ignore = visible < MIN_VISIBLE * whole or min(right - left, bottom - top) < MIN_SIDE
        return Label(box.class_id, left, top, right, bottom, box.track, ignore)

    def cut(self, picture: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
        """The image, uint8 [height, width, 3]; pixel centres are at half coordinates."""
        shift = ((0.5 - self.left) * self.zoom - 0.5, (0.5 - self.top) * self.zoom - 0.5)
        matrix = np.array([[self.zoom, 0, shift[0]], [0, self.zoom, shift[1]]])
        return np.asarray(
            cv2.warpAffine(picture, matrix, (width, height), borderMode=cv2.BORDER_REPLICATE),
            np.uint8,
        )


class Path2D:
    """Smooth way of a window that stays inside the picture, at a speed that changes all the time.

    Each of x, y and zoom swings between its limits with a wandering phase.
    """

    def __init__(self, rng: random.Random, zoom: tuple[float, float]) -> None:
        self._zoom = zoom
        self._swings = [
            (rng.uniform(0.1, 0.35), rng.random(), rng.uniform(0.2, 0.5), rng.random())
            for _ in range(3)
        ]

    def _share(self, axis: int, t: float) -> float:
        rate, phase, wander_rate, wander_phase = self._swings[axis]
        wander = 0.1 * math.sin(2 * math.pi * (wander_rate * t + wander_phase))
        return 0.5 + 0.5 * math.sin(2 * math.pi * (rate * t + phase + wander))

    def at(self, t: float, picture: tuple[int, int], image: tuple[int, int]) -> Window:
        """The window ``t`` seconds after the segment's start; sizes are (width, height)."""
        low, high = self._zoom
        zoom = low * (high / low) ** self._share(2, t)
        room = [p - i / zoom for p, i in zip(picture, image)]
        return Window(self._share(0, t) * room[0], self._share(1, t) * room[1], zoom)


def read_labels(
    file: Path, names: list[str], width: int, height: int, segment: int
) -> list[Label]:
    """The boxes of a YOLO label file (class, centre x, y, width, height; shares of the picture).

    Raises:
        SystemExit: a line that is none, with its file and number.
    """
    labels: list[Label] = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            index, x, y, w, h = int(line.split()[0]), *map(float, line.split()[1:])
            name = names[index] if index >= 0 else ""
        except (ValueError, IndexError):
            name, x, y, w, h = "", 0.0, 0.0, 0.0, 0.0
        if not (name and 0 <= x <= 1 and 0 <= y <= 1 and 0 < w <= 1 and 0 < h <= 1):
            sys.exit(f"{file}:{number}: '{line}' is no label: class, then x y w h from 0 to 1")
        labels.append(
            Label(
                name,
                max(x - w / 2, 0.0) * width,
                max(y - h / 2, 0.0) * height,
                min(x + w / 2, 1.0) * width,
                min(y + h / 2, 1.0) * height,
                f"s{segment}_{len(labels)}",
            )
        )
    return labels


def frames(arguments: argparse.Namespace) -> Iterator[LabelledFrame]:
    """All frames, segment by segment."""
    data, size = arguments.data, tuple(arguments.size)
    names = (data / "labels.txt").read_text().split()
    files = [
        file
        for file in sorted((data / "labels/train").glob(f"{arguments.town}_*.txt"))
        if file.read_text().strip()
    ]
    if len(files) < arguments.segments:
        sys.exit(f"{data}: {len(files)} labelled pictures of {arguments.town}; ask for fewer")
    rng = random.Random(arguments.seed)
    step_ns = round(1e9 / arguments.rate)
    count = round(arguments.seconds * arguments.rate)
    stamp_ns = START_NS
    for segment, file in enumerate(sorted(rng.sample(files, arguments.segments))):
        image_file = data / "images/train" / f"{file.stem}.jpg"
        picture = cv2.imread(str(image_file))
        if picture is None:
            sys.exit(f"{image_file}: no picture for its labels")
        height, width = picture.shape[:2]
        if any(i / arguments.zoom[0] > p for i, p in zip(size, (width, height))):
            sys.exit(f"{image_file} is {width} x {height}: too small for --size at this --zoom")
        boxes = read_labels(file, names, width, height, segment)
        path = Path2D(rng, tuple(arguments.zoom))
        for index in range(count):
            window = path.at(index / arguments.rate, (width, height), size)
            image = window.cut(np.asarray(picture, np.uint8), *size)
            jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1]
            seen = [window.see(box, *size) for box in boxes]
            yield LabelledFrame(stamp_ns, jpeg.tobytes(), [label for label in seen if label])
            stamp_ns += step_ns
        stamp_ns += CUT_NS


def main() -> None:
    """Write the bag."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder of the bag; replaced if it is there")
    parser.add_argument("--data", type=Path, default=DATA, help="images/, labels/, labels.txt")
    parser.add_argument("--town", default="Town02", help="prefix of the pictures' names")
    parser.add_argument("--segments", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a segment")
    parser.add_argument("--rate", type=float, default=20.0, help="Hz")
    parser.add_argument("--size", type=int, nargs=2, default=[480, 288], metavar=("W", "H"))
    parser.add_argument("--zoom", type=float, nargs=2, default=[0.8, 1.6], metavar=("MIN", "MAX"))
    parser.add_argument("--seed", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.segments < 1 or arguments.rate <= 0 or arguments.seconds * arguments.rate < 1:
        sys.exit("--segments, --rate and --seconds must give at least one frame")
    if min(arguments.size) < 1 or not 0 < arguments.zoom[0] <= arguments.zoom[1]:
        sys.exit("--size must be positive, --zoom two rising numbers above 0")
    if not (arguments.data / "labels.txt").is_file():
        sys.exit(f"no data set at {arguments.data}: give it with --data")
    made = list(frames(arguments))  # all of them, before an earlier bag is replaced
    count = write_labelled_bag(arguments.output, made, arguments.seed)
    size = sum(file.stat().st_size for file in arguments.output.iterdir())
    print(f"{arguments.output}: {count} frames, {size} bytes")


if __name__ == "__main__":
    main()
