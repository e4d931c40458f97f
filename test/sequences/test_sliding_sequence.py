"""scripts/make_sliding_sequence.py: exact truth, the rule for hidden boxes, the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import make_sliding_sequence as sliding
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from labelled_bag import IMAGE_TOPIC, LABEL_TOPIC, Label, typestore
from rosbags.highlevel import AnyReader

SCRIPT = Path(sliding.__file__)
numbers = st.floats(0, 1)


def label(left, top, right, bottom):
    return Label("vehicle", left, top, right, bottom, "s0_0")


@pytest.mark.parametrize(
    ("box", "window", "seen"),
    [
        ((20, 30, 60, 50), (10, 20, 2.0), (20, 20, 100, 60, False)),
        ((0, 30, 40, 50), (10, 20, 1.0), (0, 10, 30, 30, False)),  # three quarters are visible
        ((0, 30, 14, 60), (10, 20, 1.0), (0, 10, 4, 40, True)),  # 4 of 14 columns
        ((12, 30, 15, 60), (10, 20, 1.0), (2, 10, 5, 40, True)),  # 3 pixels wide
        ((200, 30, 240, 50), (10, 20, 1.0), None),
        ((0, 30, 10, 50), (10, 20, 1.0), None),  # touches the edge
    ],
)
def test_a_box_in_the_window(box, window, seen):
    found = sliding.Window(*window).see(label(*box), 120, 80)
    if seen is None:
        assert found is None
    else:
        assert found is not None
        assert found[1:5] == seen[:4]
        assert found.ignore == seen[4]


@given(numbers, numbers, numbers, numbers, st.floats(0, 400), st.floats(0, 300), st.floats(0.5, 3))
def test_visible_edges_are_those_of_the_picture(a, b, c, d, left, top, zoom):
    box = label(a * 600, b * 340, a * 600 + 5 + c * 30, b * 340 + 5 + d * 30)
    seen = sliding.Window(left, top, zoom).see(box, 480, 288)
    if seen is None:
        outside_x = box.right <= left or box.left >= left + 480 / zoom
        assert outside_x or box.bottom <= top or box.top >= top + 288 / zoom or c * d == 0
        return
    assert 0 <= seen.left < seen.right <= 480
    assert 0 <= seen.top < seen.bottom <= 288
    back = [seen.left / zoom + left, seen.right / zoom + left]
    back += [seen.top / zoom + top, seen.bottom / zoom + top]
    window = [left, left + 480 / zoom, top, top + 288 / zoom]
    clipped = np.clip([box.left, box.right], *window[:2]).tolist()
    clipped += np.clip([box.top, box.bottom], *window[2:]).tolist()
    assert back == pytest.approx(clipped, abs=1e-9)


@given(st.randoms(use_true_random=False), st.floats(0, 60))
def test_the_window_stays_inside_the_picture_and_moves_smoothly(rng, t):
    path = sliding.Path2D(rng, (0.8, 1.6))
    here, there = (path.at(at, (640, 380), (480, 288)) for at in (t, t + 0.05))
    assert 0.8 - 1e-9 <= here.zoom <= 1.6 + 1e-9
    assert -1e-9 <= here.left <= 640 - 480 / here.zoom + 1e-9
    assert -1e-9 <= here.top <= 380 - 288 / here.zoom + 1e-9
    assert abs(there.left - here.left) < 60  # 340 pixels of room, at most 3.1 rad/s of phase


@given(st.integers(0, 80), st.integers(0, 40), st.sampled_from([1.0, 2.0, 1.25]))
def test_the_picture_moves_as_its_boxes_do(left, top, zoom):
    picture = np.zeros((200, 300, 3), np.uint8)
    picture[80:120, 100:150] = 255
    window = sliding.Window(left + 0.5, top + 0.25, zoom)
    image = window.cut(picture, 240, 160)[:, :, 0].astype(float) / 255
    seen = window.see(label(100, 80, 150, 120), 240, 160)
    assert seen is not None
    left, top, right, bottom = (int(edge) for edge in seen[1:5])
    assert image.sum() == pytest.approx(
        (seen.right - seen.left) * (seen.bottom - seen.top), rel=0.01
    )
    assert image[top + 3 : bottom - 2, left + 3 : right - 2].min(initial=1) == 1
    assert image[:, : max(left - 2, 0)].max(initial=0) == 0
    assert image[: max(top - 2, 0)].max(initial=0) == 0


@pytest.fixture(scope="module")
def data_set(tmp_path_factory):
    """Four pictures of Town02 with a white box each, one without a label, one of Town01."""
    root = tmp_path_factory.mktemp("carla")
    for folder in ("images/train", "labels/train"):
        (root / folder).mkdir(parents=True)
    (root / "labels.txt").write_text("vehicle\nbike")
    for town, number in [("Town02", n) for n in range(5)] + [("Town01", 9)]:
        picture = np.full((380, 640, 3), 40, np.uint8)
        picture[152:228, 256:384] = 255
        cv2.imwrite(str(root / f"images/train/{town}_{number}.png"), picture)
        (root / f"images/train/{town}_{number}.png").rename(
            root / f"images/train/{town}_{number}.jpg"
        )
        text = "" if number == 4 else "1 0.5 0.5 0.2 0.2\n"
        (root / f"labels/train/{town}_{number}.txt").write_text(text)
    return root


def run(data, output, *options):
    command = [sys.executable, SCRIPT, output, "--data", data, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_same_seed_gives_the_same_bytes(data_set, tmp_path):
    options = ("--segments", "2", "--seconds", "0.2")
    bags = [tmp_path / name / "bag" for name in "abc"]
    for bag, seed in zip(bags, "778"):
        assert run(data_set, bag, *options, "--seed", seed).returncode == 0
    a, b, c = ((bag / "bag.mcap").read_bytes() for bag in bags)
    assert a == b
    assert a != c


def test_the_bag_has_equal_headers_and_the_boxes_lie_on_the_objects(data_set, tmp_path):
    bag = tmp_path / "bag"
    done = run(data_set, bag, "--segments", "3", "--seconds", "0.25")
    assert "15 frames" in done.stdout
    stamps: dict[str, list[int]] = {IMAGE_TOPIC: [], LABEL_TOPIC: []}
    image: Any = None
    with AnyReader([bag], default_typestore=typestore()) as reader:
        for connection, _, raw in reader.messages():
            message: Any = reader.deserialize(raw, connection.msgtype)
            stamp = message.header.stamp
            stamps[connection.topic].append(stamp.sec * 10**9 + stamp.nanosec)
            if connection.topic == IMAGE_TOPIC:
                image = cv2.imdecode(message.data, cv2.IMREAD_GRAYSCALE)
                continue
            (detection,) = message.detections
            assert detection.header == message.header
            assert detection.results[0].hypothesis.class_id == "bike"
            assert detection.results[0].hypothesis.score == 1
            centre, box = detection.bbox.center.position, detection.bbox
            white = cv2.boundingRect(np.asarray(image > 147, np.uint8))
            edges = [centre.x - box.size_x / 2, centre.y - box.size_y / 2, box.size_x, box.size_y]
            assert edges == pytest.approx(white, abs=1.01)
    assert stamps[IMAGE_TOPIC] == stamps[LABEL_TOPIC]
    steps = np.diff(stamps[IMAGE_TOPIC]).tolist()
    assert steps[:4] == [50_000_000] * 4
    assert steps[4] == steps[9] == 550_000_000


@pytest.mark.parametrize(
    "line", ["2 .5 .5 .1 .1", "0 .5 .5 .1", "0 .5 1.5 .1 .1", "0 nan .5 .1 .1", "-1 .5 .5 .1 .1"]
)
def test_a_bad_label_is_named_and_the_earlier_bag_stays(data_set, tmp_path, line):
    data = tmp_path / "data"
    (data / "labels").mkdir(parents=True)
    (data / "images").symlink_to(data_set / "images")
    (data / "labels.txt").write_text("vehicle\nbike")
    (data / "labels/train").mkdir()
    (data / "labels/train/Town02_0.txt").write_text("0 .5 .5 .2 .2\n")
    one = ("--segments", "1", "--seconds", "0.1")
    assert run(data, tmp_path / "bag", *one).returncode == 0
    before = (tmp_path / "bag/bag.mcap").read_bytes()
    (data / "labels/train/Town02_0.txt").write_text(f"0 .5 .5 .2 .2\n{line}\n")
    done = run(data, tmp_path / "bag", *one)
    assert done.returncode == 1
    assert "Town02_0.txt:2: " in done.stderr
    assert (tmp_path / "bag/bag.mcap").read_bytes() == before


def test_a_folder_that_is_no_bag_is_not_replaced(data_set, tmp_path):
    (tmp_path / "precious").write_text("mine")
    done = run(data_set, tmp_path, "--segments", "1")
    assert done.returncode == 1
    assert "name a new folder" in done.stderr
    assert (tmp_path / "precious").read_text() == "mine"


def test_missing_data_and_too_few_pictures_are_said(data_set, tmp_path):
    assert "give it with --data" in run(tmp_path, tmp_path / "bag").stderr
    few = run(data_set, tmp_path / "bag", "--segments", "5")
    assert "4 labelled pictures of Town02" in few.stderr
    assert not (tmp_path / "bag").exists()


@pytest.mark.data
def test_the_real_town_gives_a_sequence(shared_data, tmp_path):
    options = ("--segments", "3", "--seconds", "0.5")
    done = run(shared_data / "carla", tmp_path / "bag", *options)
    assert "30 frames" in done.stdout
