#!/usr/bin/env python3
"""Make test/data/pedestrians_labelled_mcap from the pedestrian video and its labels.

The same input gives the same bytes. ``--overlay FILE`` draws every frame with its boxes on one
sheet instead: green from the silhouette, yellow by hand, cyan in between, red to be ignored.
Topics and fields: see scripts/labelled_bag.py; how the boxes came about: test/data/README.md.
"""

from __future__ import annotations

import argparse
import csv
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from labelled_bag import REPOSITORY, START_NS, Label, LabelledFrame, write_labelled_bag
from numpy.typing import NDArray

RATE_HZ = 10
JPEG_QUALITY = 54  # 60 frames stay below 3 MB
SEED = 600
SIZE = (768, 576)  # width, height of the video
COLUMNS = ["frame", "id", "left", "top", "right", "bottom", "ignore", "source"]
COLOURS = {"silhouette": (0, 255, 0), "hand": (0, 255, 255), "between": (255, 255, 0)}

VIDEO = REPOSITORY.parent / "shared/data/video/vtest_pedestrians_768x576_10fps.avi"
LABELS = REPOSITORY / "test/data/pedestrians_labels.csv"
OUTPUT = REPOSITORY / "test/data/pedestrians_labelled_mcap"


class Row(NamedTuple):
    """One line of the label file: a person in a frame of the video, and where the box is from."""

    frame: int
    label: Label
    source: str


def read_rows(file: Path) -> list[Row]:
    """The lines of the label file, in its order, which must be that of the frames.

    Raises:
        SystemExit: a line that is none, with its file and number.
    """
    rows: list[Row] = []
    with file.open(newline="") as stream:
        reader = csv.reader(stream)
        if next(reader, None) != COLUMNS:
            sys.exit(f"{file}:1: the columns must be {','.join(COLUMNS)}")
        for number, cells in enumerate(reader, 2):
            try:
                frame, track, *edges, ignore, source = cells
                left, top, right, bottom = map(int, edges)
                row = Row(
                    int(frame),
                    Label("person", left, top, right, bottom, track, bool(int(ignore))),
                    source,
                )
            except ValueError:
                sys.exit(f"{file}:{number}: not {','.join(COLUMNS)}: {','.join(cells)}")
            inside = 0 <= left < right <= SIZE[0] and 0 <= top < bottom <= SIZE[1]
            if not inside or source not in COLOURS or (rows and row.frame < rows[-1].frame):
                sys.exit(
                    f"{file}:{number}: box outside {SIZE}, unknown source or frames out of order"
                )
            rows.append(row)
    return rows


def read_frames(video: Path, wanted: set[int]) -> dict[int, NDArray[np.uint8]]:
    """The frames ``wanted``, by index from 0, decoded in order (seeking is not always exact)."""
    capture = cv2.VideoCapture(str(video))
    images: dict[int, NDArray[np.uint8]] = {}
    for index in range(max(wanted) + 1):
        ok, image = capture.read()
        if not ok:
            sys.exit(f"{video} ends at frame {index}, frame {max(wanted)} is needed")
        if index in wanted:
            images[index] = np.asarray(image, np.uint8)
    return images


def overlay(images: dict[int, NDArray[np.uint8]], rows: list[Row]) -> Any:
    """A sheet of all frames, six in a row, 320 pixels wide each, without the sky."""
    scale, tiles = 320 / SIZE[0], []
    for index, group in groupby(rows, key=lambda row: row.frame):
        tile = cv2.resize(images[index], (320, 240), interpolation=cv2.INTER_AREA)
        for _, label, source in group:
            left, top, right, bottom = (round(edge * scale) for edge in label[1:5])
            colour = (0, 0, 255) if label.ignore else COLOURS[source]
            cv2.rectangle(tile, (left, top), (right, bottom), colour, 1)
        cv2.putText(tile, str(index), (4, 230), cv2.FONT_HERSHEY_SIMPLEX, 0.45, (255, 255, 255), 1)
        tiles.append(tile[10:])
    tiles += [np.zeros_like(tiles[0])] * (-len(tiles) % 6)
    return np.vstack([np.hstack(tiles[i : i + 6]) for i in range(0, len(tiles), 6)])


def main() -> None:
    """Write the bag, or the sheet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--video", type=Path, default=VIDEO)
    parser.add_argument("--labels", type=Path, default=LABELS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--overlay", type=Path, help="write this picture, no bag")
    arguments = parser.parse_args()
    for file in (arguments.video, arguments.labels):
        if not file.is_file():
            sys.exit(f"no such file: {file}; give it with --video or --labels")
    rows = read_rows(arguments.labels)
    if not rows:
        sys.exit(f"{arguments.labels}: no labels")
    images = read_frames(arguments.video, {row.frame for row in rows})
    if arguments.overlay:
        cv2.imwrite(str(arguments.overlay), overlay(images, rows), [cv2.IMWRITE_JPEG_QUALITY, 40])
        return
    options = [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY, cv2.IMWRITE_JPEG_OPTIMIZE, 1]
    made = [
        LabelledFrame(
            START_NS + (index - rows[0].frame) * 1_000_000_000 // RATE_HZ,
            cv2.imencode(".jpg", images[index], options)[1].tobytes(),
            [row.label for row in group],
        )
        for index, group in groupby(rows, key=lambda row: row.frame)
    ]
    count = write_labelled_bag(arguments.output, made, SEED)
    size = sum(file.stat().st_size for file in arguments.output.iterdir())
    print(f"{arguments.output}: {count} frames, {len(rows)} boxes, {size} bytes")


if __name__ == "__main__":
    main()
