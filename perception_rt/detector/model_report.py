"""A model directory for people and programs: what ``perception_rt model inspect`` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perception_rt.detector.model import Model

if TYPE_CHECKING:
    from rich.table import Table


def inspect_model(model: Model) -> dict[str, Any]:
    """Segments and exits of a model, JSON-ready; its fields are in docs/json_commands.md."""
    return {
        "command": "model inspect",
        "directory": str(model.directory),
        "name": model.name,
        "version": model.version,
        "manifest_sha256": model.manifest_sha256,
        "input": {"name": model.input.tensor.name, "shape": list(model.input.tensor.shape)},
        "classes": model.classes,
        "licence": model.licence,
        "origin": model.origin,
        "segments": [
            {
                "file": segment.path.name,
                "sha256": segment.sha256,
                "size_bytes": segment.size_bytes,
                "inputs": [tensor.name for tensor in segment.inputs],
                "features": [tensor.name for tensor in segment.features],
                "anchors": segment.exit.anchors,
                "strides": list(segment.exit.strides),
                "trained_classes": len(segment.exit.trained_classes),
                "cost_ms_median": segment.exit.cost_ms_median,
                "ap50": segment.exit.ap50,
            }
            for segment in model.segments
        ],
    }


def inspect_table(result: dict[str, Any]) -> Table:
    """What ``inspect_model`` returned, for people."""
    from rich.table import Table

    table = Table(
        title=f"{result['name']} {result['version']}, input {result['input']['shape']}",
        title_justify="left",
    )
    for column in ("segment", "file", "kB", "anchors", "strides", "classes", "ms to exit", "AP50"):
        table.add_column(column, justify="left" if column in ("file", "AP50") else "right")
    for k, segment in enumerate(result["segments"]):
        cost = segment["cost_ms_median"]
        table.add_row(
            str(k),
            segment["file"],
            f"{segment['size_bytes'] / 1000:,.0f}",
            f"{segment['anchors']:,}",
            " ".join(map(str, segment["strides"])),
            f"{segment['trained_classes']} of {result['classes']}",
            "-" if cost is None else f"{cost:.1f}",
            ", ".join(f"{name} {value:.3f}" for name, value in segment["ap50"].items()) or "-",
        )
    table.caption = (
        f"every file matches the manifest {result['manifest_sha256'][:16]}; {result['licence']}"
    )
    return table
