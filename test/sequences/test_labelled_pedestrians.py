"""The hand-corrected pedestrian labels, and the bag that scripts/make_labelled_bag.py makes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cv2
import make_labelled_bag as labelled
import numpy as np
import pytest
from labelled_bag import IMAGE_TOPIC, LABEL_TOPIC, typestore
from rosbags.highlevel import AnyReader

HEADER = "frame,id,left,top,right,bottom,ignore,source\n"


def test_the_label_file_holds_what_the_readme_says():
    rows = labelled.read_rows(labelled.LABELS)
    assert len(rows) == 458
    assert [row.label.ignore for row in rows].count(True) == 39
    assert Counter(row.source for row in rows) == {"silhouette": 299, "hand": 137, "between": 22}
    frames = Counter(row.frame for row in rows)
    assert list(frames) == [*range(600, 630), *range(680, 710)]
    assert min(frames.values()) == 6
    assert len({row.label.track for row in rows}) == 16
    assert len({(row.frame, row.label.track) for row in rows}) == 458


def test_nobody_jumps():
    last: dict[str, tuple[int, float, float]] = {}
    for row in labelled.read_rows(labelled.LABELS):
        box = row.label
        centre = ((box.left + box.right) / 2, (box.top + box.bottom) / 2)
        if box.track in last and not box.ignore:
            frame, x, y = last[box.track]
            assert row.frame == frame + 1
            assert np.hypot(centre[0] - x, centre[1] - y) < 40, row
        last[box.track] = (row.frame, *centre)


def test_the_committed_bag_holds_the_label_file():
    rows = labelled.read_rows(labelled.LABELS)
    found: list[tuple[Any, ...]] = []
    stamps: dict[str, list[int]] = {IMAGE_TOPIC: [], LABEL_TOPIC: []}
    with AnyReader([labelled.OUTPUT], default_typestore=typestore()) as reader:
        for connection, _, raw in reader.messages():
            message: Any = reader.deserialize(raw, connection.msgtype)
            stamp = message.header.stamp
            stamps[connection.topic].append(stamp.sec * 10**9 + stamp.nanosec)
            if connection.topic == IMAGE_TOPIC:
                assert message.format == "jpeg"
                picture: Any = cv2.imdecode(message.data, cv2.IMREAD_COLOR)
                assert picture.shape == (576, 768, 3)
                continue
            for detection in message.detections:
                assert detection.header == message.header
                (result,) = detection.results
                centre, box = detection.bbox.center.position, detection.bbox
                left, top = centre.x - box.size_x / 2, centre.y - box.size_y / 2
                edges = (left, top, left + box.size_x, top + box.size_y)
                found.append((detection.id, result.hypothesis.class_id, *edges))
                assert result.hypothesis.score == (not rows[len(found) - 1].label.ignore)
    expected = [(r.label.track, r.label.class_id, *map(float, r.label[1:5])) for r in rows]
    assert found == expected
    assert {row[1] for row in found} == {"person"}
    assert stamps[IMAGE_TOPIC] == stamps[LABEL_TOPIC]
    steps = np.diff(stamps[IMAGE_TOPIC]).tolist()
    assert steps == [100_000_000] * 29 + [5_100_000_000] + [100_000_000] * 29
    assert sum(file.stat().st_size for file in labelled.OUTPUT.iterdir()) <= 3_000_000


@pytest.mark.parametrize(
    "line",
    [
        "600,a1,0,0,769,10,0,hand",
        "600,a1,10,0,10,10,0,hand",
        "600,a1,0,0,10,nan,0,hand",
        "600,a1,0,0,10,10,0,guess",
        "600,a1,0,0,10,10,hand",
        "599,a1,0,0,10,10,0,hand",
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line):
    file = tmp_path / "labels.csv"
    file.write_text(f"{HEADER}600,a2,0,0,10,10,0,hand\n{line}\n")
    with pytest.raises(SystemExit, match=r"labels\.csv:3: "):
        labelled.read_rows(file)


def test_another_header_is_refused(tmp_path: Path):
    file = tmp_path / "labels.csv"
    file.write_text("frame,box\n")
    with pytest.raises(SystemExit, match=r"labels\.csv:1: the columns must be frame,id,left"):
        labelled.read_rows(file)


@pytest.mark.data
def test_the_committed_bag_comes_from_the_script(shared_data: Path, tmp_path: Path):
    video = shared_data / "video" / labelled.VIDEO.name
    script = Path(labelled.__file__)
    for name in "ab":  # the file is named like its folder
        output = tmp_path / name / labelled.OUTPUT.name
        command: list[str | Path] = [sys.executable, script, "--video", video, "--output", output]
        subprocess.run(command, check=True, capture_output=True)
    file = f"{labelled.OUTPUT.name}.mcap"
    a, b = ((tmp_path / name / labelled.OUTPUT.name / file).read_bytes() for name in "ab")
    assert a == b
    # Not byte for byte with the committed one: another libjpeg may encode otherwise.
    assert len(a) == pytest.approx((labelled.OUTPUT / file).stat().st_size, rel=0.02)
