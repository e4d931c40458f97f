"""Train all exits of the early-exit NanoDet-g together, or the control that has only the deepest.

The trunk and the deepest head start from NanoDet-g's weights. A label's positive anchors are those
that the deepest exit answers best (task alignment, arXiv:2108.07755); every exit learns them with
quality focal loss, GIoU and the bin distribution (arXiv:2006.04388), and the early ones also learn
the deepest exit's dense answer. The weights written are a running mean over the steps.

    python scripts/train_exits.py --data-dir DATA --out weights.npz --seed 0
    python scripts/train_exits.py --data-dir DATA --out control.npz --seed 0 --control

A run that was cut goes on from its checkpoint when the same command is given again. PyTorch
(requirements/train.txt) is needed here and nowhere else.
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
import torch
import torch.nn.functional as F  # noqa: N812
import train_data as td
from torch import Tensor, nn

BATCH = 6
LR_HEADS, LR_SOURCE = 2e-3, 4e-4
EXIT_WEIGHTS = (1.0, 0.8, 0.8, 1.0)
TOP_K = 9
MEAN_DECAY = 0.998
CHECKPOINT_EVERY = 200
DEEPEST = ex.EXITS - 1


class Network(nn.Module):
    """The topology of exit_graph in PyTorch; layers appear on first use."""

    def __init__(self, source: ex.Weights, control: bool) -> None:
        super().__init__()
        self.source, self.control = source, control
        self.layers = nn.ModuleDict()
        with torch.no_grad():
            self.forward(torch.zeros(2, 3, ex.HEIGHT, ex.WIDTH))

    def conv(
        self, x: Tensor, name: str, cin: int, cout: int, k: int, stride: int, groups: int, act: str
    ) -> Tensor:
        key = name.replace(".", "_")
        if key not in self.layers:
            self.layers[key] = self._layer(name, cin, cout, k, stride, groups)
        y: Tensor = self.layers[key](x)
        if act == "leaky":
            return F.leaky_relu(y, 0.1)
        return F.relu(y) if act == "relu" else y

    def _layer(
        self, name: str, cin: int, cout: int, k: int, stride: int, groups: int
    ) -> nn.Sequential:
        old, final = name + ".weight" in self.source, ".out" in name
        conv = nn.Conv2d(cin, cout, k, stride, k // 2, groups=groups, bias=old or final)
        if old:
            assert conv.bias is not None
            conv.weight.data = torch.from_numpy(self.source[name + ".weight"].copy())
            conv.bias.data = torch.from_numpy(self.source[name + ".bias"].copy())
        elif final:
            assert conv.bias is not None
            nn.init.normal_(conv.weight, std=0.01)
            nn.init.zeros_(conv.bias)
            nn.init.constant_(conv.bias[: ex.CLASSES], -4.6)  # sigmoid = 0.01
        conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
        return nn.Sequential(conv, nn.Identity() if old or final else nn.BatchNorm2d(cout))

    def max_pool(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 2, 1)

    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b], 1)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def nearest_up(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2.0, mode="nearest")

    def linear(self, x: Tensor, scale: float) -> Tensor:
        return F.interpolate(x, scale_factor=scale, mode="bilinear", align_corners=False)

    def forward(self, image: Tensor) -> list[Tensor]:
        """Raw [B, OUTPUTS, A] of every exit, or of the deepest alone."""
        f, out = {"image": image}, []
        for k in range(ex.EXITS):
            new, maps = ex.segment(self, k, f, head=not self.control)
            f.update(new)
            if maps is not None:
                out.append(torch.cat([m.flatten(2) for m in maps], 2))
        return out


def folded(state: dict[str, Tensor]) -> ex.Weights:
    """Weights with batch norm folded, named as the exporter asks for them."""
    out: ex.Weights = {}
    for key in [k for k in state if k.endswith(".0.weight")]:
        base = key[: -len("0.weight")]
        weight = state[key]
        if base + "1.running_var" in state:
            gain = state[base + "1.weight"] / (state[base + "1.running_var"] + 1e-5).sqrt()
            weight = weight * gain[:, None, None, None]
            bias = state[base + "1.bias"] - state[base + "1.running_mean"] * gain
        else:
            bias = state[base + "0.bias"]
        name = base.removeprefix("layers.").rstrip(".").replace("_", ".")
        out[name + ".weight"] = np.ascontiguousarray(weight.numpy(), np.float32)
        out[name + ".bias"] = bias.numpy().astype(np.float32)
    return out


def boxes_of(raw: Tensor, centres: Tensor, strides: Tensor) -> Tensor:
    """Boxes [B, A, 4] in pixels of raw outputs."""
    b, _, a = raw.shape
    bins = raw[:, ex.CLASSES :].reshape(b, 4, ex.BINS, a).softmax(2)
    sides = (bins * torch.arange(ex.BINS)[:, None]).sum(2) * strides
    low, high = centres - sides[:, :2], centres + sides[:, 2:]
    return torch.cat([low, high], 1).transpose(1, 2)


def overlaps(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and GIoU (arXiv:1902.09630) of boxes [..., 4], broadcast."""
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    inter = (high - low).clamp(min=0).prod(-1)
    area = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1)
    union = (area - inter).clamp(min=1e-6)
    hull_low = torch.minimum(a[..., :2], b[..., :2])
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - hull_low).prod(-1).clamp(min=1e-6)
    iou = inter / union
    return iou, iou - (hull - union) / hull


class Targets:
    """One image's positives and what its score loss looks at, from the deepest exit's answer."""

    def __init__(
        self, raw: Tensor, boxes: Tensor, truth: Any, labelled: Tensor, points: Any
    ) -> None:
        _, gt, classes, sure = truth
        gt, classes, sure = map(torch.from_numpy, (gt, classes, sure))
        centres, strides = points
        c = centres[0].T  # [A, 2]
        scores = raw[: ex.CLASSES].sigmoid()
        self.mask = labelled[:, None].expand(-1, len(c)).clone()
        inside = (c[None] > gt[:, None, :2]).all(2) & (c[None] < gt[:, None, 2:]).all(2)
        for n in torch.nonzero(~sure)[:, 0]:  # do not look there
            self.mask[classes[n]] &= ~inside[n]
        gt, classes, inside = gt[sure], classes[sure], inside[sure]
        self.index = torch.zeros(0, dtype=torch.long)
        if not len(gt):
            return
        middle = (gt[:, None, :2] + gt[:, None, 2:]) / 2
        away = (c[None] - middle).abs().amax(2) / strides[0]
        inside |= away < 0.8  # the nearest anchors of a box smaller than their stride
        iou, _ = overlaps(gt[:, None], boxes[None])
        score = torch.stack([scores[k].amax(0) for k in classes])
        fit = (score.clamp(min=0.01).sqrt() * iou.clamp(min=0.01) ** 3) * inside
        fit = torch.where(inside, fit + 1e-7 / (1 + away), torch.zeros(()))
        top = fit.topk(min(TOP_K, fit.shape[1]), 1)
        chosen = torch.zeros_like(fit).scatter(1, top.indices, top.values)
        # a box of few pixels takes fewer anchors: as many as its IoUs sum up to
        rank = chosen.argsort(1, descending=True).argsort(1)
        count = (iou * (chosen > 0)).sum(1).clamp(min=1).round()
        chosen = chosen * (rank < count[:, None])
        best, owner = chosen.max(0)
        self.index = torch.nonzero(best > 0)[:, 0]
        owner = owner[self.index]
        self.gt = gt[owner]
        group = classes[owner]  # of a group the class that the deepest exit prefers
        own = torch.where(group, scores[:, self.index].T, -torch.ones(()))
        self.classes = own.argmax(1)
        others = group.clone()
        others[torch.arange(len(others)), self.classes] = False
        self.mask[:, self.index] &= ~others.T


def exit_loss(
    raw: Tensor, boxes: Tensor, teacher: Tensor | None, targets: list[Targets], points: Any
) -> Tensor:
    """Loss of one exit; `teacher` is the deepest exit's raw answer where it is another one."""
    centres, strides = points
    logits = raw[:, : ex.CLASSES]
    wanted = torch.zeros_like(logits)
    box = dist = torch.zeros(())
    for b, t in enumerate(targets):
        if not len(t.index):
            continue
        iou, giou = overlaps(boxes[b, t.index], t.gt)
        quality = iou.detach().clamp(0.05, 1.0)
        wanted[b, t.classes, t.index] = quality
        box = box + ((1 - giou) * quality).sum()
        c, s = centres[0].T[t.index], strides[0, 0, t.index, None]
        sides = torch.cat([c - t.gt[:, :2], t.gt[:, 2:] - c], 1) / s
        sides = sides.clamp(0, ex.BINS - 1.01)
        low = sides.floor()
        bins = raw[b, ex.CLASSES :, t.index].reshape(4, ex.BINS, -1).permute(2, 0, 1)
        log = bins.log_softmax(2)
        left = log.gather(2, low.long()[..., None])[..., 0] * (low + 1 - sides)
        right = log.gather(2, low.long()[..., None] + 1)[..., 0] * (sides - low)
        dist = dist - ((left + right).mean(1) * quality).sum()
        if teacher is not None:
            theirs = teacher[b, ex.CLASSES :, t.index].reshape(4, ex.BINS, -1).permute(2, 0, 1)
            dist = dist - ((theirs.softmax(2) * log).sum(2).mean(1) * quality).sum()
    mask = torch.stack([t.mask for t in targets])
    norm = wanted.sum().clamp(min=4.0)
    bce = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    gap = (wanted - logits.detach().sigmoid()).square()
    loss = ((gap * bce) * mask).sum() + 2.0 * box + 0.25 * dist
    if teacher is not None:
        soft = teacher[:, : ex.CLASSES].sigmoid()
        gap = (soft - logits.detach().sigmoid()).square()
        learn = F.binary_cross_entropy_with_logits(logits, soft, reduction="none")
        loss = loss + (gap * learn).sum()
    return loss / norm


def draw(
    samples: list[td.Sample], shares: Any, rng: np.random.Generator
) -> tuple[Tensor, list[Any], Tensor]:
    """A batch: normalised images, truths, and which classes are labelled."""
    pick = rng.choice(len(samples), BATCH, p=shares)
    truths = [td.view(samples[i], rng) for i in pick]
    images = np.concatenate([ex.normalise(t[0]) for t in truths])
    labelled = torch.from_numpy(np.stack([samples[i].labelled for i in pick]))
    return torch.from_numpy(images).contiguous(memory_format=torch.channels_last), truths, labelled


def train(network: Network, samples: list[td.Sample], args: argparse.Namespace) -> dict[str, Any]:
    """Run the steps; returns the running mean of the weights and the seconds it took."""
    old = [p for n, p in network.named_parameters() if n.startswith("layers.conv")]
    new = [p for n, p in network.named_parameters() if not n.startswith("layers.conv")]
    groups = [{"params": old, "peak": LR_SOURCE}, {"params": new, "peak": LR_HEADS}]
    optimiser = torch.optim.AdamW([g for g in groups if g["params"]], weight_decay=1e-3)
    mean = {k: v.clone() for k, v in network.state_dict().items()}
    checkpoint = args.out.with_suffix(".checkpoint")
    step, seconds = 0, 0.0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        step, seconds, mean = saved["step"], saved["seconds"], saved["mean"]
        network.load_state_dict(saved["network"])
        optimiser.load_state_dict(saved["optimiser"])
        print(f"goes on from step {step}", flush=True)
    points = [torch.from_numpy(a) for a in ex.anchor_points()]
    shares = td.draw_shares(samples)
    sums, began = np.zeros(ex.EXITS), time.monotonic() - seconds
    network.train()
    while step < args.steps:
        rng = np.random.default_rng((args.seed, step))  # a run that goes on draws the same
        images, truths, labelled = draw(samples, shares, rng)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            raws = [r.float() for r in network(images)]
        boxes = [boxes_of(r, *points) for r in raws]
        deepest, deep_boxes = raws[-1].detach(), boxes[-1].detach()
        targets = [
            Targets(deepest[b], deep_boxes[b], truths[b], labelled[b], points)
            for b in range(BATCH)
        ]
        total = torch.zeros(())
        for k, (raw, own) in enumerate(zip(raws, boxes)):
            last = k == len(raws) - 1
            loss = exit_loss(raw, own, None if last else deepest, targets, points)
            total = total + loss * EXIT_WEIGHTS[k - len(raws)]  # the control has only the last
            sums[k] += loss.item()
        shape = min(1.0, (step + 1) / 100) * (
            0.5 * (1 + math.cos(math.pi * step / args.steps)) + 0.01
        )
        for group in optimiser.param_groups:
            group["lr"] = group["peak"] * shape
        optimiser.zero_grad()
        torch.autograd.backward(total)
        nn.utils.clip_grad_norm_(network.parameters(), 10.0)
        optimiser.step()
        step += 1
        keep = min(MEAN_DECAY, (step + 1) / (step + 10))
        for k, v in network.state_dict().items():
            mean[k] = mean[k].lerp(v, 1 - keep) if v.is_floating_point() else v.clone()
        seconds = time.monotonic() - began
        if step % 25 == 0:
            text = " ".join(f"{v:.3f}" for v in sums[: len(raws)] / 25)
            left = seconds / step * (args.steps - step) / 60
            print(f"step {step}/{args.steps} {seconds:.0f} s, {left:.0f} min left: {text}")
            sums[:] = 0
        if step % CHECKPOINT_EVERY == 0 or step == args.steps:
            state = {"step": step, "seconds": seconds, "mean": mean}
            state |= {"network": network.state_dict(), "optimiser": optimiser.state_dict()}
            torch.save(state, checkpoint.with_suffix(".partial"))
            checkpoint.with_suffix(".partial").replace(checkpoint)
            write(args, mean, step, seconds, len(samples))
    return mean


def write(
    args: argparse.Namespace, mean: dict[str, Tensor], step: int, seconds: float, count: int
) -> None:
    training = {
        "data": "CARLA Town01, Town03, Town04 (labels); every second of pedestrian video frames "
        "1-400 and of the dashcam video (pseudo-labels of NanoDet-g)",
        "images": count,
        "seed": args.seed,
        "steps": step,
        "batch": BATCH,
        "minutes": round(seconds / 60, 1),
        "precision": "bf16" if args.bf16 else "fp32",
        "script": "scripts/train_exits.py",
    }
    partial = args.out.with_suffix(".partial.npz")
    arrays: dict[str, Any] = {"training": np.array(json.dumps(training)), **folded(mean)}
    np.savez(partial, **arrays)
    partial.replace(args.out)


def detector(network: Network) -> td.Detect:
    """The source network at an image's full size (rounded to 32): rows box, score, class."""

    def detect(image: ex.U8) -> ex.F32:
        h, w = (math.ceil(v / 32) * 32 for v in image.shape[:2])
        canvas = np.full((h, w, 3), ex.PAD_VALUE, np.uint8)
        canvas[: image.shape[0], : image.shape[1]] = image
        with torch.no_grad():
            raw = network(torch.from_numpy(ex.normalise(canvas)))[-1]
        points = [torch.from_numpy(a) for a in ex.anchor_points(h, w)]
        boxes = boxes_of(raw, *points)[0].numpy()
        scores = raw[0, : ex.CLASSES].sigmoid().numpy()
        rows = []
        for c in range(ex.CLASSES):
            keep = scores[c] >= td.UNSURE
            xywh = np.concatenate([boxes[keep, :2], boxes[keep, 2:] - boxes[keep, :2]], 1)
            chosen = cv2.dnn.NMSBoxes(xywh.tolist(), scores[c, keep].tolist(), td.UNSURE, 0.6)
            for i in np.asarray(chosen, int).reshape(-1):
                rows += [[*boxes[keep][i], scores[c, keep][i], c]]
        return np.array(rows, np.float32).reshape(-1, 6)

    return detect


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--data-dir", type=Path, default=root.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, required=True, help="weights.npz to write")
    parser.add_argument("--control", action="store_true", help="only the deepest exit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="convolutions in bfloat16")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    source = ex.source_weights(args.data_dir / "weights" / "nanodet_g_416_coco80.onnx")
    network = Network(source, args.control)
    began = time.monotonic()
    samples = td.load(args.data_dir, detector(Network(source, control=True).eval()))
    print(f"{len(samples)} images in {time.monotonic() - began:.0f} s", flush=True)
    train(network, samples, args)
    print(f"wrote {args.out}: {args.out.stat().st_size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
