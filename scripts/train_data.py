"""What train_exits.py learns from: images, boxes, which classes each source labels, and views.

CARLA Town01, 03 and 04 carry labels (Town02 is for evaluation); frames 1 to 400 of the pedestrian
video and the dashcam video get the source network's own detections at full size as labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import exit_graph as ex
import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Detect = Callable[[ex.U8], ex.F32]

TOWNS = ("Town01", "Town03", "Town04")
PERSON, BICYCLE, CAR, MOTORCYCLE, BUS, TRUCK, LIGHT, STOP = range(ex.CLASSES)
VEHICLES = (CAR, BUS, TRUCK)
# CARLA's classes to ours. A vehicle may be any of three; a traffic sign is not a stop sign.
CARLA_VEHICLE = 0
GROUPS = {CARLA_VEHICLE: VEHICLES, 1: (BICYCLE,), 2: (MOTORCYCLE,), 3: (LIGHT,)}
UNLABELLED = (PERSON, STOP)  # in CARLA
SURE, UNSURE = 0.45, 0.2  # scores of pseudo-labels: a label; left out of the loss
REPEAT_BELOW = 0.3  # a class seen in a smaller share of the images is drawn more often
SHARES = (0.55, 0.3, 0.15)  # of CARLA, pedestrians, dashcam in what is drawn
PLAIN = 0.35  # share of views as at run time
SCALES = (0.6, 2.4)
KEPT, SMALLEST = 0.35, 4.0  # part of a box that must stay visible; its shortest side in pixels


@dataclass(frozen=True)
class Sample:
    """One image with its truth.

    boxes [N, 4] l, t, r, b in its pixels; classes [N, CLASSES]: the classes that a box may be;
    sure [N]: false where it only says where not to look; labelled [CLASSES]: what is labelled.
    """

    image: ex.U8
    boxes: ex.F32
    classes: Bools
    sure: Bools
    labelled: Bools
    source: int


def carla_boxes(
    folder: Path, stem: str, shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.int64], ex.F32]:
    """Class indices [N] and boxes [N, 4] l, t, r, b in pixels of a CARLA picture of `shape`."""
    text = (folder / "labels" / "train" / f"{stem}.txt").read_text().split()
    rows: ex.F32 = np.array(text, np.float32).reshape(-1, 5)
    low, high = rows[:, 1:3] - rows[:, 3:] / 2, rows[:, 1:3] + rows[:, 3:] / 2
    size = np.array([shape[1], shape[0]] * 2, np.float32)
    return rows[:, 0].astype(np.int64), np.concatenate([low, high], 1) * size


def _carla(folder: Path) -> list[Sample]:
    samples = []
    labelled = np.ones(ex.CLASSES, bool)
    labelled[list(UNLABELLED)] = False
    for path in sorted((folder / "images" / "train").glob("*.jpg")):
        if path.name[:6] not in TOWNS:
            continue
        image = cv2.imread(str(path))
        if image is None:
            raise SystemExit(f"cannot read {path}")
        indices, boxes = carla_boxes(folder, path.stem, image.shape)
        used = np.isin(indices, list(GROUPS))
        indices, boxes = indices[used], boxes[used]
        classes = np.zeros((len(boxes), ex.CLASSES), bool)
        for n, index in enumerate(indices):
            classes[n, list(GROUPS[int(index)])] = True
        sure = np.ones(len(boxes), bool)
        samples.append(Sample(np.asarray(image, np.uint8), boxes, classes, sure, labelled, 0))
    return samples


def _pseudo(path: Path, last: int, step: int, source: int, detect: Detect) -> list[Sample]:
    samples = []
    capture = cv2.VideoCapture(str(path))
    if not capture.isOpened():
        raise SystemExit(f"cannot open the video {path}")
    for number in range(last):
        ok, frame = capture.read()
        if not ok:
            break
        if number % step:
            continue
        image = np.asarray(frame, np.uint8)
        found = detect(image)  # [N, 6]: box, score, class
        classes = np.zeros((len(found), ex.CLASSES), bool)
        classes[np.arange(len(found)), found[:, 5].astype(int)] = True
        sure = found[:, 4] >= SURE
        labelled = np.ones(ex.CLASSES, bool)
        samples.append(Sample(image, found[:, :4], classes, sure, labelled, source))
    return samples


def load(data: Path, detect: Detect) -> list[Sample]:
    """All training images; `detect` gives boxes, score and class of those without labels."""
    video = data / "video"
    return [
        *_carla(data / "carla"),
        *_pseudo(video / "vtest_pedestrians_768x576_10fps.avi", 400, 2, 1, detect),
        *_pseudo(video / "udacity_dashcam_960x540_25fps.mp4", 10**6, 2, 2, detect),
    ]


def draw_shares(samples: list[Sample]) -> npt.NDArray[np.float64]:
    """Probability of each sample: SHARES by source, inside one by its rarest class.

    A class in a share f < REPEAT_BELOW of a source's images repeats its images sqrt(limit / f)
    times (repeat factor sampling, arXiv:1908.03195).
    """
    shares = np.zeros(len(samples))
    sources = np.array([s.source for s in samples])
    has = np.array([(s.classes & s.sure[:, None]).any(0) for s in samples])
    for source in np.unique(sources):
        mine = sources == source
        often = np.maximum(has[mine].mean(0), 1e-9)
        factor = np.sqrt(np.maximum(1.0, REPEAT_BELOW / often))
        repeat = np.maximum(1.0, (has[mine] * np.minimum(factor, 4.0)).max(1))
        shares[mine] = SHARES[source] * repeat / repeat.sum()
    return np.asarray(shares / shares.sum(), np.float64)


def view(sample: Sample, rng: np.random.Generator) -> tuple[ex.U8, ex.F32, Bools, Bools]:
    """A view on the network's canvas: image, boxes, classes, sure.

    As at run time, or moved, scaled, mirrored and relit.
    """
    h, w = sample.image.shape[:2]
    scale = min(ex.WIDTH / w, ex.HEIGHT / h)
    if rng.random() < PLAIN:
        left, top = (ex.WIDTH - w * scale) / 2, (ex.HEIGHT - h * scale) / 2
    else:
        scale *= math.exp(rng.uniform(*np.log(SCALES)))
        spare = np.array([ex.WIDTH - w * scale, ex.HEIGHT - h * scale])
        left, top = rng.uniform(np.minimum(spare, 0), np.maximum(spare, 0))
    matrix = np.array([[scale, 0, left], [0, scale, top]])
    boxes = sample.boxes * scale + np.array([left, top] * 2, np.float32)
    flags = cv2.INTER_AREA if scale < 0.5 else cv2.INTER_LINEAR
    image = cv2.warpAffine(
        sample.image, matrix, (ex.WIDTH, ex.HEIGHT), flags=flags, borderValue=[ex.PAD_VALUE] * 3
    )
    if rng.random() < 0.5:
        image = image[:, ::-1]
        boxes = boxes[:, [2, 1, 0, 3]] * [-1, 1, -1, 1] + [ex.WIDTH, 0, ex.WIDTH, 0]
    if rng.random() < 0.7:
        light = image.astype(np.float32) * rng.uniform(0.65, 1.35) + rng.uniform(-25, 25)
        image = np.clip(light * rng.uniform(0.93, 1.07, 3), 0, 255).astype(np.uint8)
    clipped = boxes.copy()
    clipped[:, ::2] = clipped[:, ::2].clip(0, ex.WIDTH)
    clipped[:, 1::2] = clipped[:, 1::2].clip(0, ex.HEIGHT)
    sides = clipped[:, 2:] - clipped[:, :2]
    area = np.maximum((boxes[:, 2:] - boxes[:, :2]).prod(1), 1e-6)
    seen = (sides > 1.0).all(1)
    whole = (sides.prod(1) / area >= KEPT) & (sides.min(1, initial=1e9) >= SMALLEST)
    sure = sample.sure & whole
    return (
        np.ascontiguousarray(image, np.uint8),
        clipped[seen].astype(np.float32),
        sample.classes[seen],
        sure[seen],
    )
