"""Train the two early exit heads of NanoDet-g 416 on the frozen trunk, by its own predictions.

Each head learns the full model's dense output at the same anchors: scores with quality focal
loss, boxes with GIoU and the bin distribution with cross entropy, both weighted by the teacher's
score. Features and targets are computed once with ONNX Runtime and kept in a cache file.

Data: frames 1 to 400 of the pedestrian video (later frames are for evaluation), the dashcam
video, CARLA Town01, 03 and 04 (Town02 is for evaluation). The labels of CARLA are not used.

    python scripts/train_exits.py --data-dir DATA --out heads.npz --seed 0 --minutes 8

The number of steps is fixed from the speed of the first steps; it is stored with the seed, and
`--steps N` repeats a run without the clock. PyTorch is needed here and nowhere else.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import cv2
import exit_graph as ex
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

BATCH = 12
LR = 3e-3
TARGET_ROWS = len(ex.TRAINED) + 4 * ex.BINS
CACHE = {
    **{name: shape[1:] for name, shape in ex.FEATURES.items()},
    "target": (TARGET_ROWS, ex.ANCHORS),
}


class Head(nn.Module):
    """One early head; the topology is exit_graph.early_head, the layers appear on use."""

    def __init__(self, exit_index: int) -> None:
        super().__init__()
        self.exit_index = exit_index
        self.layers = nn.ModuleDict()
        with torch.no_grad():
            self.forward({n: torch.zeros(2, *s[1:]) for n, s in ex.FEATURES.items()})

    def conv(
        self,
        x: Tensor,
        name: str,
        cin: int,
        cout: int,
        k: int,
        stride: int,
        groups: int,
        act: bool,
    ) -> Tensor:
        key = name.replace(".", "_")
        if key not in self.layers:
            final = name.startswith("out")
            conv = nn.Conv2d(cin, cout, k, stride, k // 2, groups=groups, bias=final)
            if final:
                assert conv.bias is not None
                nn.init.normal_(conv.weight, std=0.01)
                nn.init.zeros_(conv.bias)
                nn.init.constant_(conv.bias[: len(ex.TRAINED)], -4.6)  # sigmoid = 0.01
            norm = nn.Identity() if final else nn.BatchNorm2d(cout)
            self.layers[key] = nn.Sequential(conv, norm)
        y: Tensor = self.layers[key](x)
        return F.relu(y) if act else y

    def up(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2.0, mode="nearest")

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        maps = ex.early_head(self, self.exit_index, features)
        return torch.cat([m.flatten(2) for m in maps], 2)

    def folded(self) -> dict[str, Any]:
        """Weights with batch norm folded, named as the exporter asks for them."""
        out: dict[str, Any] = {}
        for key, layer in self.layers.items():
            conv, norm = layer.get_submodule("0"), layer.get_submodule("1")
            assert isinstance(conv, nn.Conv2d)
            weight, bias = conv.weight.detach(), conv.bias
            if isinstance(norm, nn.BatchNorm2d):
                assert norm.running_var is not None
                assert norm.running_mean is not None
                gain = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
                weight = weight * gain[:, None, None, None]
                bias = nn.Parameter(norm.bias.detach() - norm.running_mean * gain)
            assert bias is not None
            name = f"exit{self.exit_index}.{key.replace('_', '.')}"
            out[name + ".weight"] = weight.numpy()
            out[name + ".bias"] = bias.detach().numpy()
        return out


def source_images(data: Path) -> list[tuple[ex.U8, int]]:
    """Training images with the number of views to draw of each."""
    video = data / "video"
    pedestrian = video / "vtest_pedestrians_768x576_10fps.avi"
    images = [(f, 5) for f in ex.video_frames(pedestrian, 1, 400, 2)]
    images += [
        (f, 3) for f in ex.video_frames(video / "udacity_dashcam_960x540_25fps.mp4", 1, 10**6, 3)
    ]
    towns = [
        p
        for p in sorted((data / "carla" / "images" / "train").glob("*.jpg"))
        if p.name[:6] in ("Town01", "Town03", "Town04")
    ]
    for path in towns:
        image = cv2.imread(str(path))
        if image is None:
            raise SystemExit(f"cannot read {path}")
        images.append((np.asarray(image, np.uint8), 3))
    return images


def view(image: ex.U8, rng: np.random.Generator, plain: bool) -> ex.U8:
    """A letterboxed view: as at run time, or cropped, shrunk, flipped and relit."""
    if plain:
        return ex.letterbox(image)[0]
    h, w = image.shape[:2]
    kind = rng.random()
    if kind < 0.55:  # crop: larger objects, up to five times
        f = math.exp(rng.uniform(math.log(0.2), 0.0))
        cw, ch = max(32, round(w * f)), max(32, round(h * min(1.0, f * rng.uniform(0.9, 1.4))))
        x, y = rng.integers(0, w - cw + 1), rng.integers(0, h - ch + 1)
        image = image[y : y + ch, x : x + cw]
    elif kind < 0.75:  # border: smaller objects
        f = rng.uniform(0.05, 0.5)
        t, b, le, r = (round(v) for v in rng.uniform(0, f, 4) * [h, h, w, w])
        image = np.asarray(
            cv2.copyMakeBorder(image, t, b, le, r, cv2.BORDER_CONSTANT, value=[ex.PAD_VALUE] * 3),
            np.uint8,
        )
    if rng.random() < 0.5:
        image = np.ascontiguousarray(image[:, ::-1])
    light = image.astype(np.float32) * rng.uniform(0.6, 1.3) + rng.uniform(-20, 20)
    return ex.letterbox(np.clip(light, 0, 255).astype(np.uint8))[0]


def build_cache(data: Path, cache: Path, seed: int) -> int:
    """Features and teacher output of every view, float16 on disk; returns the count."""
    source = ex.load_source(data / "weights" / "nanodet_g_416_coco80.onnx")
    outputs = (*ex.FEATURES, *ex.SOURCE_MAPS)
    teacher = ex.session(ex.cut(source, ("image",), outputs, "teacher"))
    rng = np.random.default_rng(seed)
    images = source_images(data)
    count = sum(n for _, n in images)
    arrays = {
        k: np.lib.format.open_memmap(cache / f"{k}.npy", "w+", np.float16, (count, *s))
        for k, s in CACHE.items()
    }
    rows = [*ex.TRAINED, *range(ex.CLASSES, ex.CLASSES + 4 * ex.BINS)]
    start, i = time.monotonic(), 0
    for image, views in images:
        for v in range(views):
            x = ex.normalise(view(image, rng, plain=v == 0))
            got = dict(zip(outputs, teacher.run(list(outputs), {"image": x})))
            maps = [got[m][0].reshape(-1, g * g) for m, g in zip(ex.SOURCE_MAPS, ex.GRIDS)]
            got["target"] = np.concatenate(maps, 1)[None, rows]
            for name, array in arrays.items():
                array[i] = got[name][0]
            i += 1
            if i % 200 == 0:
                print(f"cache {i}/{count} {time.monotonic() - start:.0f} s", flush=True)
    for a in arrays.values():
        a.flush()
    (cache / "done.json").write_text(json.dumps({"seed": seed, "count": count}))
    return count


def corners(bins: Tensor, strides: Tensor) -> Tensor:
    """Distances [N, 4] in pixels from bin logits [N, 4, BINS]."""
    return (bins.softmax(2) * torch.arange(ex.BINS)).sum(2) * strides[:, None]


def giou_loss(a: Tensor, b: Tensor) -> Tensor:
    """1 - GIoU of boxes given as distances from one anchor (arXiv:1902.09630)."""
    area_a = (a[:, 0] + a[:, 2]) * (a[:, 1] + a[:, 3])
    area_b = (b[:, 0] + b[:, 2]) * (b[:, 1] + b[:, 3])
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    inter = (low[:, 0] + low[:, 2]) * (low[:, 1] + low[:, 3])
    hull = (high[:, 0] + high[:, 2]) * (high[:, 1] + high[:, 3]) + 1e-6
    union = area_a + area_b - inter + 1e-6
    return 1 - inter / union + (hull - union) / hull


def loss_of(out: Tensor, target: Tensor, strides: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Score, box and distribution loss of raw outputs [N, C + 44, A] against the teacher's."""
    c = len(ex.TRAINED)
    logits, wanted = out[:, :c], target[:, :c].sigmoid()
    norm = wanted.clamp(min=0.05).sub(0.05).sum().clamp(min=1.0)
    gap = (wanted - logits.sigmoid()).abs().square()
    score = (gap * F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")).sum()
    weight = wanted.amax(1)
    keep = weight > 0.1
    w = weight[keep]
    shape = (-1, 4, ex.BINS)
    mine = out[:, c:].transpose(1, 2)[keep].reshape(shape)
    theirs = target[:, c:].transpose(1, 2)[keep].reshape(shape)
    s = strides.expand_as(weight)[keep]
    box = (giou_loss(corners(mine, s), corners(theirs, s)) * w).sum()
    dist = -((theirs.softmax(2) * mine.log_softmax(2)).sum(2).mean(1) * w).sum()
    wsum = w.sum().clamp(min=1.0)
    return score / norm, box / wsum, dist / wsum


def train(cache: Path, count: int, args: argparse.Namespace) -> tuple[list[Head], int]:
    # channels_last halves the time of a step on a CPU
    heads = [Head(k) for k in range(2)]
    for parameter in (p for h in heads for p in h.parameters()):
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    for k, h in enumerate(heads):
        print(f"head {k}: {sum(p.numel() for p in h.parameters())} parameters", flush=True)
    data = {k: np.load(cache / f"{k}.npy", mmap_mode="r") for k in CACHE}
    params = [p for h in heads for p in h.parameters()]
    optimiser = torch.optim.AdamW(params, LR, weight_decay=1e-3)
    strides = torch.from_numpy(ex.anchor_points()[1][0])
    rng = np.random.default_rng(args.seed)
    steps, step = args.steps, 0
    order: npt.NDArray[np.int64] = np.empty(0, np.int64)
    sums, start = np.zeros(6), time.monotonic()
    while steps is None or step < steps:
        if step == 20 and steps is None:
            steps = max(40, int(20 * args.minutes * 60 / (time.monotonic() - start)))
            print(f"{steps} steps fit into {args.minutes} min", flush=True)
        progress = step / steps if steps else 0.0
        rate = LR * min(1.0, (step + 1) / 20) * (0.5 * (1 + math.cos(math.pi * progress)) + 0.005)
        for group in optimiser.param_groups:
            group["lr"] = rate
        if len(order) < BATCH:
            order = rng.permutation(count)
        pick = np.sort(order[:BATCH])
        order = order[BATCH:]
        features = {k: torch.from_numpy(a[pick]).float() for k, a in data.items()}
        target = features.pop("target")
        features = {
            k: f.contiguous(memory_format=torch.channels_last) for k, f in features.items()
        }
        total = torch.zeros(())
        for k, head in enumerate(heads):
            losses = loss_of(head(features), target, strides)
            total = total + losses[0] + 2 * losses[1] + 0.25 * losses[2]
            sums[3 * k : 3 * k + 3] += [float(v.detach()) for v in losses]
        optimiser.zero_grad()
        torch.autograd.backward(total)
        for head in heads:
            nn.utils.clip_grad_norm_(head.parameters(), 10.0)
        optimiser.step()
        step += 1
        if step % 25 == 0:
            text = " ".join(f"{v:.3f}" for v in sums / 25)
            print(
                f"step {step}/{steps} {time.monotonic() - start:.0f} s "
                f"[score box dist] x 2: {text}",
                flush=True,
            )
            sums[:] = 0
    return [h.eval() for h in heads], step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--data-dir", type=Path, default=root.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, required=True, help="heads.npz to write")
    parser.add_argument("--cache", type=Path, help="folder for 4 GB; default: beside --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8.0, help="for both heads together")
    parser.add_argument("--steps", type=int, help="fixed number of steps instead of --minutes")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    cache = args.cache or args.out.with_suffix(".cache")
    cache.mkdir(parents=True, exist_ok=True)
    done = cache / "done.json"
    found = json.loads(done.read_text()) if done.exists() else {}
    if args.steps == 0:
        count = 0
    elif found.get("seed") == args.seed:
        count = int(found["count"])
    else:
        count = build_cache(args.data_dir, cache, args.seed)
    heads, steps = train(cache, count, args) if count else ([Head(0).eval(), Head(1).eval()], 0)
    training = {
        "data": "teacher: exit 2; pedestrian video frames 1-400, dashcam video, CARLA Town01, "
        "Town03, Town04",
        "views": count,
        "seed": args.seed,
        "steps": steps,
        "batch": BATCH,
        "script": "scripts/train_exits.py",
    }
    weights = {k: v for h in heads for k, v in h.folded().items()}
    np.savez_compressed(args.out, training=np.array(json.dumps(training)), **weights)
    print(f"wrote {args.out}: {args.out.stat().st_size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
