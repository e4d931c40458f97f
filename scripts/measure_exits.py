"""Cost and accuracy of every exit of the exported segments, for the manifest.

Persons are judged by the boxes of test/data/pedestrians_labels.csv (ignored ones neither count nor
hurt), vehicles by the labels of CARLA Town02, where car, bus and truck are one class (the highest
of the three scores). AP is the area under the interpolated precision-recall curve.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import cv2
import exit_graph as ex
import numpy as np
import onnxruntime as ort
from make_labelled_bag import read_frames, read_rows
from train_data import CARLA_VEHICLE, PERSON, VEHICLES, carla_boxes

SCORE_FLOOR = 0.01
NMS_IOU = 0.6
TIMED_RUNS = 100
Exits = Callable[[ex.F32], list[ex.F32]]


def iou(box: ex.F32, boxes: ex.F32) -> ex.F32:
    """IoU of one box [4] with boxes [N, 4], all l, t, r, b."""
    low, high = np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:], boxes[:, 2:])
    inter = np.clip(high - low, 0, None).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1) + (box[2:] - box[:2]).prod()
    return np.asarray(inter / np.maximum(areas - inter, 1e-9), np.float32)


def found(detections: ex.F32, classes: tuple[int, ...]) -> ex.F32:
    """Rows l, t, r, b, score of the classes taken as one, after NMS, best first."""
    scores = detections[:, [4 + c for c in classes]].max(1)
    keep = scores > SCORE_FLOOR
    rows = np.concatenate([detections[keep, :4], scores[keep, None]], 1)
    rows = rows[np.argsort(-rows[:, 4], kind="stable")][:1000]
    chosen: list[ex.F32] = []
    while len(rows):
        chosen.append(rows[0])
        rows = rows[1:][iou(rows[0, :4], rows[1:, :4]) <= NMS_IOU]
    return np.array(chosen, np.float32).reshape(-1, 5)


def ap50(results: list[ex.F32], truths: list[ex.F32]) -> float:
    """Average precision at IoU 0.5 over images; results [N, 5].

    truths [M, 5] per image: box, then 1 where it counts or 0 where it is ignored.
    """
    rows = [(float(r[4]), i, r[:4]) for i, image in enumerate(results) for r in image]
    rows.sort(key=lambda row: -row[0])
    free = [t[:, 4] > 0 for t in truths]
    hits = []
    for _, i, box in rows:
        overlap = iou(box, truths[i][:, :4])
        mine = np.where(free[i], overlap, 0.0)
        if len(mine) and mine.max() >= 0.5:
            hits.append(True)
            free[i][mine.argmax()] = False
        elif not (overlap[truths[i][:, 4] == 0] >= 0.5).any():
            hits.append(False)
    hit = np.array(hits)
    recall = np.cumsum(hit) / max(1.0, sum(float(t[:, 4].sum()) for t in truths))
    precision = np.cumsum(hit) / np.arange(1, len(hit) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def persons(exits: Exits, video: Path, labels: Path) -> list[float]:
    """Person AP50 of each exit on the labelled frames."""
    rows = read_rows(labels)
    frames = read_frames(video, {row.frame for row in rows})
    truths = [
        np.array([[*row.label[1:5], not row.label.ignore] for row in group], float)
        for _, group in groupby(rows, key=lambda row: row.frame)
    ]
    return _judge(exits, list(frames.values()), truths, (PERSON,))


def town02_vehicles(exits: Exits, carla: Path) -> list[float]:
    """Vehicle AP50 of each exit on CARLA Town02."""
    images, truths = [], []
    for path in sorted((carla / "images" / "train").glob("Town02_*.jpg")):
        image = np.asarray(cv2.imread(str(path)), np.uint8)
        indices, boxes = carla_boxes(carla, path.stem, image.shape)
        boxes = boxes[indices == CARLA_VEHICLE]
        images.append(image)
        truths.append(np.concatenate([boxes, np.ones((len(boxes), 1))], 1))
    return _judge(exits, images, truths, VEHICLES)


def _judge(
    exits: Exits, images: list[ex.U8], truths: list[Any], classes: tuple[int, ...]
) -> list[float]:
    results: list[list[ex.F32]] = []
    scaled = []
    for image, truth in zip(images, truths):
        canvas, scale, left, top = ex.letterbox(image)
        results.append([found(out, classes) for out in exits(ex.normalise(canvas))])
        shift = np.array([left, top] * 2)
        scaled.append(np.concatenate([truth[:, :4] * scale + shift, truth[:, 4:]], 1))
    count = sum(int(t[:, 4].sum()) for t in truths)
    print(f"{len(images)} images, {count} boxes", flush=True)
    return [ap50(list(one), [np.asarray(t, np.float32) for t in scaled]) for one in zip(*results)]


def costs(chain: list[ort.InferenceSession], whole: ort.InferenceSession) -> list[float]:
    """Median milliseconds up to each exit, then those of the network in one piece, interleaved.

    CPU time of the one thread that runs all segments.
    """
    image = np.zeros((1, 3, ex.HEIGHT, ex.WIDTH), np.float32)
    values: dict[str, Any] = {"image": image}
    cpu = np.zeros((TIMED_RUNS, len(chain) + 1))
    for run in range(-10, TIMED_RUNS):
        for k, s in enumerate([*chain, whole]):
            names = [o.name for o in s.get_outputs()]
            feed = {i.name: values[i.name] for i in s.get_inputs()}
            began = time.thread_time_ns()
            outputs = s.run(names, feed)
            if run >= 0:
                cpu[run, k] = time.thread_time_ns() - began
            if k < len(chain):
                values.update(zip(names, outputs))
    cpu[:, :-1] = np.cumsum(cpu[:, :-1], 1)
    return [round(float(v), 1) for v in np.median(cpu, 0) / 1e6]


def accuracy(exits: Exits, data: Path, labels: Path) -> list[dict[str, float]]:
    """AP50 of each exit on persons and vehicles."""
    video = data / "video" / "vtest_pedestrians_768x576_10fps.avi"
    pairs = zip(persons(exits, video, labels), town02_vehicles(exits, data / "carla"))
    return [
        {"person_labelled_frames": round(p, 3), "carla_town02_vehicle": round(v, 3)}
        for p, v in pairs
    ]
