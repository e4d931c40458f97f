"""A model directory: ``manifest.json`` (format version 1), one ONNX file per segment, the labels.

Every file that the manifest names is compared with its sha256 before anything is loaded from it.
A directory that does not match its manifest is refused with the file, what was expected, what was
found, and what to do.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from perception_rt.core.errors import ModelError
from perception_rt.core.frame import MAX_SEGMENTS

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TensorSpec:
    """Name, fixed shape and dtype (always ``float32``) of a tensor that crosses a cut."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class InputSpec:
    """The input: float32 [1, 3, height, width], BGR, ``(pixel - mean) / std`` per channel.

    Attributes:
        tensor: name, shape and dtype.
        mean, std: one value for each of B, G, R, on the 0 to 255 scale.
        pad_value: grey value of the letterbox border, 0 to 255, before normalisation.
    """

    tensor: TensorSpec
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    pad_value: int

    @property
    def height(self) -> int:
        """Rows of the input tensor, pixels."""
        return self.tensor.shape[2]

    @property
    def width(self) -> int:
        """Columns of the input tensor, pixels."""
        return self.tensor.shape[3]


@dataclass(frozen=True)
class ExitSpec:
    """The exit head behind a segment: what it was trained for, and what it was measured to do.

    Attributes:
        anchors: rows of its detection tensor.
        strides: of its anchor grids, input pixels.
        trained_classes: class ids that it can score above 0.
        cost_ms_median: median milliseconds of its segment where exported; None: not measured.
        ap50: average precision at IoU 0.5, by name of the data it was measured on.
    """

    anchors: int
    strides: tuple[int, ...]
    trained_classes: tuple[int, ...]
    cost_ms_median: float | None
    ap50: dict[str, float]


@dataclass(frozen=True)
class SegmentSpec:
    """One piece of the network: an ONNX file, features in, features and a detection tensor out.

    Attributes:
        index: position in the order of running, from 0.
        path: the ONNX file.
        sha256: hexadecimal digest that the manifest promises.
        size_bytes: size that the manifest promises.
        inputs: each is the image or a feature of an earlier segment, by name.
        features: tensors that later segments may read.
        output: the detection tensor, [1, anchors, 4 + classes].
        exit: the exit head.
    """

    index: int
    path: Path
    sha256: str
    size_bytes: int
    inputs: tuple[TensorSpec, ...]
    features: tuple[TensorSpec, ...]
    output: TensorSpec
    exit: ExitSpec

    def read(self) -> bytes:
        """The bytes of the file, compared with the manifest at this very read.

        Raises:
            ModelError: the file is missing, unreadable or another one than the manifest promises.
        """
        return _read_checked(self.path, self.sha256, self.size_bytes)


@dataclass(frozen=True)
class Model:
    """A model directory whose manifest is consistent and whose files match it.

    Attributes:
        directory: where it was loaded from.
        name, version: as the manifest says.
        manifest_sha256: digest of manifest.json itself: names this exact model in reports.
        input: the network's input.
        output_name: name of the detection tensor of every segment.
        classes: C, equal at all exits.
        labels: one text per class id.
        segments: in the order of running, 1 to ``MAX_SEGMENTS``.
        licence, origin: where it comes from and what allows its use.
        training: free-form record of the training, as the manifest has it.
    """

    directory: Path
    name: str
    version: str
    manifest_sha256: str
    input: InputSpec
    output_name: str
    classes: int
    labels: tuple[str, ...]
    segments: tuple[SegmentSpec, ...]
    licence: str
    origin: str
    training: dict[str, Any]


def load_model(directory: str | Path) -> Model:
    """Check a model directory: its manifest, the cuts between segments, every file's sha256.

    The ONNX files are hashed, not parsed; a backend parses them and compares their tensors with
    the manifest.

    Raises:
        ModelError: something is missing or does not match; names the file and what to do.
    """
    root = Path(directory)
    path = root / MANIFEST
    if not root.is_dir():
        raise ModelError(
            f"model directory {root} does not exist: give a directory that holds {MANIFEST}"
        )
    text = _read(path)
    manifest = _Node(_parse(path, text), path, "")

    version = manifest.integer("format_version")
    if version != FORMAT_VERSION:
        manifest.refuse(
            "format_version",
            f"is {version}, this program reads {FORMAT_VERSION}: export the model again",
        )
    input_spec = _input(manifest.child("input"))
    output = manifest.child("output")
    classes = output.positive("classes")
    if output.text("box") != "ltrb_input_pixels":
        output.refuse(
            "box", f"is '{output.text('box')}', only 'ltrb_input_pixels' is known: export again"
        )
    output_name = output.text("name")

    known = {input_spec.tensor.name: input_spec.tensor}
    segments: list[SegmentSpec] = []
    for node in manifest.children("segments"):
        segments.append(_segment(node, len(segments), root, classes, output_name, known))
    if not 1 <= len(segments) <= MAX_SEGMENTS:
        manifest.refuse(
            "segments", f"holds {len(segments)} segments: 1 to {MAX_SEGMENTS} are possible"
        )

    labels = _labels(manifest.child("labels"), root, classes)
    for segment in segments:
        segment.read()
    return Model(
        directory=root,
        name=manifest.text("name"),
        version=manifest.text("version"),
        manifest_sha256=hashlib.sha256(text).hexdigest(),
        input=input_spec,
        output_name=output_name,
        classes=classes,
        labels=labels,
        segments=tuple(segments),
        licence=manifest.text("licence"),
        origin=manifest.text("origin"),
        training=dict(manifest.child("training").value),
    )


class _Node:
    """A JSON object of the manifest; getters refuse with the file and the key's full name."""

    def __init__(self, value: dict[str, Any], path: Path, where: str) -> None:
        self.value = value
        self.path = path
        self.where = where

    def refuse(self, key: str, problem: str) -> NoReturn:
        raise ModelError(f"{self.path}: {self.where}{key} {problem}")

    def get(self, key: str) -> Any:
        if key not in self.value:
            self.refuse(key, "is missing: export the model again")
        return self.value[key]

    def child(self, key: str) -> _Node:
        return self._node(key, self.get(key))

    def children(self, key: str) -> list[_Node]:
        return [self._node(f"{key}[{i}]", item) for i, item in enumerate(self._list(key))]

    def _node(self, key: str, value: Any) -> _Node:
        if not isinstance(value, dict):
            self.refuse(key, f"must be an object, got {_shown(value)}")
        return _Node(value, self.path, f"{self.where}{key}.")

    def _list(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            self.refuse(key, f"must be a list, got {_shown(value)}")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not value:
            self.refuse(key, f"must be a text that is not empty, got {_shown(value)}")
        return value

    def integer(self, key: str) -> int:
        value = self.get(key)
        if not _is_int(value):
            self.refuse(key, f"must be an integer, got {_shown(value)}")
        return int(value)

    def positive(self, key: str) -> int:
        value = self.integer(key)
        if value <= 0:
            self.refuse(key, f"must be above 0, got {value}")
        return value

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        values = self._list(key)
        if not values or not all(_is_int(v) and low <= v <= high for v in values):
            self.refuse(
                key, f"must be a list of integers from {low} to {high}, got {_shown(values)}"
            )
        return tuple(values)

    def per_channel(self, key: str) -> tuple[float, float, float]:
        values = self._list(key)
        if len(values) != 3 or not all(_is_number(v) for v in values):
            self.refuse(key, f"must be 3 finite numbers (B, G, R), got {_shown(values)}")
        return float(values[0]), float(values[1]), float(values[2])

    def tensor(self) -> TensorSpec:
        dtype = self.text("dtype")
        if dtype != "float32":
            self.refuse("dtype", f"is '{dtype}', only 'float32' is known: export again")
        return TensorSpec(self.text("name"), self.integers("shape", 1, 2**31 - 1), dtype)

    def file(self, root: Path) -> Path:
        name = self.text("file")
        # A manifest comes from elsewhere: it must not name a file outside its own directory.
        if name in (".", "..") or Path(name).name != name or "\\" in name or "\0" in name:
            self.refuse(
                "file", f"is '{name}': it must be the plain name of a file beside the manifest"
            )
        return root / name

    def sha256(self) -> str:
        digest = self.text("sha256")
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            self.refuse(
                "sha256", f"must be 64 lower-case hexadecimal digits, got {_shown(digest)}"
            )
        return digest


def _input(node: _Node) -> InputSpec:
    tensor = node.tensor()
    if len(tensor.shape) != 4 or tensor.shape[:2] != (1, 3):
        node.refuse("shape", f"must be [1, 3, height, width], got {list(tensor.shape)}")
    if node.text("color") != "BGR":
        node.refuse(
            "color", f"is '{node.text('color')}', only 'BGR' is known: export again for BGR"
        )
    std = node.per_channel("std")
    if min(std) <= 0:
        node.refuse("std", f"must be above 0, got {list(std)}")
    pad_value = node.integer("pad_value")
    if not 0 <= pad_value <= 255:
        node.refuse("pad_value", f"must be from 0 to 255, got {pad_value}")
    return InputSpec(tensor, node.per_channel("mean"), std, pad_value)


def _segment(
    node: _Node,
    index: int,
    root: Path,
    classes: int,
    output_name: str,
    known: dict[str, TensorSpec],
) -> SegmentSpec:
    """Read a segment, check its cut against ``known`` tensors, add its features to them."""
    inputs = tuple(n.tensor() for n in node.children("inputs"))
    if not inputs or len({t.name for t in inputs}) != len(inputs):
        node.refuse("inputs", "must name at least one tensor, and each only once")
    for tensor in inputs:
        source = known.get(tensor.name)
        if source is None:
            node.refuse(
                "inputs",
                f"names '{tensor.name}': neither the image nor a feature of an earlier segment",
            )
        if source != tensor:
            node.refuse(
                "inputs",
                f"has '{tensor.name}' as {_form(tensor)}, but it is produced as {_form(source)}",
            )
    features = tuple(n.tensor() for n in node.children("features"))
    for tensor in features:
        if tensor.name in known or tensor.name == output_name:
            node.refuse(
                "features", f"names '{tensor.name}' a second time: names must be unique in a model"
            )
        known[tensor.name] = tensor
    exit_spec = _exit(node.child("exit"), classes)
    return SegmentSpec(
        index=index,
        path=node.file(root),
        sha256=node.sha256(),
        size_bytes=node.positive("size_bytes"),
        inputs=inputs,
        features=features,
        output=TensorSpec(output_name, (1, exit_spec.anchors, 4 + classes), "float32"),
        exit=exit_spec,
    )


def _exit(node: _Node, classes: int) -> ExitSpec:
    cost = node.get("cost_ms_median")
    if cost is not None and not (_is_number(cost) and cost > 0):
        node.refuse("cost_ms_median", f"must be null or milliseconds above 0, got {_shown(cost)}")
    ap50 = node.child("ap50").value
    if not all(_is_number(v) and 0 <= v <= 1 for v in ap50.values()):
        node.refuse("ap50", f"must hold numbers from 0 to 1, got {_shown(ap50)}")
    return ExitSpec(
        anchors=node.positive("anchors"),
        strides=node.integers("strides", 1, 2**15),
        trained_classes=node.integers("trained_classes", 0, classes - 1),
        cost_ms_median=None if cost is None else float(cost),
        ap50={name: float(v) for name, v in ap50.items()},
    )


def _labels(node: _Node, root: Path, classes: int) -> tuple[str, ...]:
    path = node.file(root)
    data = _read_checked(path, node.sha256(), None)
    try:
        labels = tuple(line.strip() for line in data.decode("utf-8").splitlines())
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}): write it again"
        ) from None
    if len(labels) != classes or not all(labels):
        raise ModelError(
            f"{path}: expected {classes} labels, one a line and none empty, found "
            f"{sum(map(bool, labels))} of {len(labels)} lines: make it match output.classes"
        )
    return labels


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: is not JSON ({error}): restore it or export the model again"
        ) from None
    if not isinstance(value, dict):
        raise ModelError(
            f"{path}: must be a JSON object, got {_shown(value)}: export the model again"
        )
    return value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file: restore it or export the model again") from None
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror}): check the file and its rights"
        ) from None


def _read_checked(path: Path, sha256: str, size_bytes: int | None) -> bytes:
    data = _read(path)
    if size_bytes is not None and len(data) != size_bytes:
        raise ModelError(
            f"{path}: expected {size_bytes} bytes by {MANIFEST}, found {len(data)}: "
            "restore the file or export again"
        )
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ModelError(
            f"{path}: expected sha256 {sha256} by {MANIFEST}, found {found}: "
            "restore the file or export again"
        )
    return data


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _form(tensor: TensorSpec) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _shown(value: object) -> str:
    """A value as JSON, cut to a length that fits in a message."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
