"""Cost and accuracy of every exit of the exported segments, for the manifest.

Person AP50 is agreement with the deepest exit, since there is no hand-made truth for the video:
its detections with a score of 0.4 or more after NMS count as truth. Vehicle AP50 is against the
labels of CARLA Town02, where car, bus and truck are one class (the highest of the three scores).
AP is the area under the interpolated precision-recall curve, all objects of all sizes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import cv2
import exit_graph as ex
import numpy as np
import onnxruntime as ort

SCORE_FLOOR = 0.05
NMS_IOU = 0.6
TRUTH_SCORE = 0.4
TIMED_RUNS = 100


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
    """Average precision at IoU 0.5 over images; results [N, 5], truths [M, 4] per image."""
    rows = [(float(r[4]), i, r[:4]) for i, image in enumerate(results) for r in image]
    rows.sort(key=lambda row: -row[0])
    free = [np.ones(len(t), bool) for t in truths]
    hits = np.zeros(len(rows))
    for n, (_, i, box) in enumerate(rows):
        overlap = np.where(free[i], iou(box, truths[i]), 0.0)
        if len(overlap) and overlap.max() >= 0.5:
            hits[n] = 1
            free[i][overlap.argmax()] = False
    recall = np.cumsum(hits) / max(1, sum(len(t) for t in truths))
    precision = np.cumsum(hits) / np.arange(1, len(rows) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def person_agreement(chain: list[ort.InferenceSession], video: Path) -> list[float]:
    results: list[list[ex.F32]] = [[] for _ in chain]
    for frame in ex.video_frames(video, 451, 795, 3):
        outs = ex.run_chain(chain, ex.normalise(ex.letterbox(frame)[0]))
        for result, out in zip(results, outs):
            result.append(found(out, (0,)))
    truths = [r[r[:, 4] >= TRUTH_SCORE, :4] for r in results[-1]]
    print(f"pedestrians: {len(truths)} frames, {sum(len(t) for t in truths)} boxes", flush=True)
    return [ap50(result, truths) for result in results]


def town02_vehicles(chain: list[ort.InferenceSession], carla: Path) -> list[float]:
    results: list[list[ex.F32]] = [[] for _ in chain]
    truths: list[ex.F32] = []
    for path in sorted((carla / "images" / "train").glob("Town02_*.jpg")):
        image = np.asarray(cv2.imread(str(path)), np.uint8)
        canvas, scale, left, top = ex.letterbox(image)
        for result, out in zip(results, ex.run_chain(chain, ex.normalise(canvas))):
            result.append(found(out, ex.VEHICLES))
        text = (carla / "labels" / "train" / f"{path.stem}.txt").read_text().split()
        rows: ex.F32 = np.array(text, np.float32).reshape(-1, 5)
        rows = rows[rows[:, 0] == 0]  # vehicle: centre and size as fractions of the image
        corners = np.concatenate(
            [rows[:, 1:3] - rows[:, 3:] / 2, rows[:, 1:3] + rows[:, 3:] / 2], 1
        )
        h, w = image.shape[:2]
        corners = corners * np.array([w, h, w, h], np.float32) * scale + np.array(
            [left, top] * 2, np.float32
        )
        truths.append(corners.astype(np.float32))
    print(f"Town02: {len(truths)} images, {sum(len(t) for t in truths)} vehicles", flush=True)
    return [ap50(result, truths) for result in results]


def costs(chain: list[ort.InferenceSession]) -> list[float]:
    """Median milliseconds up to each exit: CPU time of the one thread that runs all segments."""
    values: dict[str, Any] = {"image": np.zeros((1, 3, ex.SIZE, ex.SIZE), np.float32)}
    cpu, wall = np.zeros((2, TIMED_RUNS, len(chain)))
    for run in range(-10, TIMED_RUNS):
        for k, s in enumerate(chain):
            names = [o.name for o in s.get_outputs()]
            feed = {i.name: values[i.name] for i in s.get_inputs()}
            wall_0, cpu_0 = time.perf_counter_ns(), time.thread_time_ns()
            outputs = s.run(names, feed)
            if run >= 0:
                cpu[run, k] = time.thread_time_ns() - cpu_0
                wall[run, k] = time.perf_counter_ns() - wall_0
            values.update(zip(names, outputs))
    cpu_ms, wall_ms = (np.median(np.cumsum(t, 1), 0) / 1e6 for t in (cpu, wall))
    print("cumulated median ms, CPU:", cpu_ms.round(1), "wall:", wall_ms.round(1), flush=True)
    return [round(float(v), 1) for v in cpu_ms]


def measure(segments: list[Path], data: Path) -> list[dict[str, Any]]:
    """The manifest's measured fields of every exit."""
    chain = [ex.session(path) for path in segments]
    times = costs(chain)
    persons = person_agreement(chain, data / "video" / "vtest_pedestrians_768x576_10fps.avi")
    vehicles = town02_vehicles(chain, data / "carla")
    print("AP50, persons:", persons, "vehicles:", vehicles, flush=True)
    return [
        {
            "cost_ms_median": t,
            "ap50": {
                "person_agreement_with_deepest": round(p, 3),
                "carla_town02_vehicle": round(v, 3),
            },
        }
        for t, p, v in zip(times, persons, vehicles)
    ]
