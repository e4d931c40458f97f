from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perception_rt.core.errors import ModelError
from perception_rt.detector.model import ExitSpec, Model, TensorSpec, load_model

FILES = ("segment_0.onnx", "segment_1.onnx", "segment_2.onnx", "labels.txt")


def read_manifest(directory: Path) -> Any:
    return json.loads((directory / "manifest.json").read_text(encoding="utf-8"))


def write_manifest(directory: Path, manifest: Any) -> None:
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def refused(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_tiny_model_is_read_in_full(tiny_dir: Path) -> None:
    model = load_model(tiny_dir)
    manifest = (tiny_dir / "manifest.json").read_bytes()
    assert (model.name, model.version, model.directory) == ("tiny", "1.2.3", tiny_dir)
    assert model.manifest_sha256 == hashlib.sha256(manifest).hexdigest()
    assert model.input.tensor == TensorSpec("image", (1, 3, 32, 32), "float32")
    assert (model.input.width, model.input.height, model.input.pad_value) == (32, 32, 114)
    assert (model.input.mean, model.input.std) == ((0.0, 0.0, 0.0), (255.0, 255.0, 255.0))
    assert (model.output_name, model.classes) == ("detections", 3)
    assert model.labels == ("person", "car", "dog")
    assert (model.licence, model.origin, model.training) == (
        "Apache-2.0",
        "made by a test",
        {"steps": 0},
    )
    f0 = TensorSpec("f0", (1, 3, 4, 4), "float32")
    f1 = TensorSpec("f1", (1, 3, 4, 4), "float32")
    assert [s.index for s in model.segments] == [0, 1, 2]
    assert [s.path for s in model.segments] == [tiny_dir / f for f in FILES[:3]]
    assert [s.inputs for s in model.segments] == [(model.input.tensor,), (f0,), (f0, f1)]
    assert [s.features for s in model.segments] == [(f0,), (f1,), ()]
    assert {s.output for s in model.segments} == {TensorSpec("detections", (1, 20, 7), "float32")}
    assert model.segments[1].exit == ExitSpec(20, (8, 16), (0, 1), 0.5, {"nowhere": 0.25})
    assert model.segments[2].exit.cost_ms_median is None
    assert model.segments[0].read() == (tiny_dir / "segment_0.onnx").read_bytes()


def test_the_model_of_the_repository_loads(nanodet: Model) -> None:
    assert len(nanodet.segments) == 3
    assert nanodet.input.tensor.shape == (1, 3, 416, 416)
    assert nanodet.classes == len(nanodet.labels) == 80
    assert nanodet.labels[0] == "person"
    assert {s.exit.anchors for s in nanodet.segments} == {3549}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "append", "replace"])
def test_a_damaged_file_is_refused_with_expected_and_found(
    tiny_dir: Path, name: str, damage: str
) -> None:
    path = tiny_dir / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "truncate":
        del data[-1]
    elif damage == "empty":
        data.clear()
    elif damage == "append":
        data += b"\n"
    else:
        data = bytearray((tiny_dir / FILES[FILES.index(name) - 1]).read_bytes())
    path.write_bytes(data)
    message = refused(tiny_dir)
    assert str(path) in message
    assert "expected" in message
    assert "found" in message
    assert "restore the file or export again" in message
    digest = hashlib.sha256(data).hexdigest()
    assert digest in message or f"found {len(data)}:" in message


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_missing_file_is_refused(tiny_dir: Path, name: str) -> None:
    (tiny_dir / name).unlink()
    message = refused(tiny_dir)
    assert str(tiny_dir / name) in message
    assert "no such file" in message


def test_a_directory_in_place_of_a_file_is_refused(tiny_dir: Path) -> None:
    (tiny_dir / "segment_1.onnx").unlink()
    (tiny_dir / "segment_1.onnx").mkdir()
    assert "segment_1.onnx: cannot be read" in refused(tiny_dir)


def test_no_directory_is_refused(tmp_path: Path) -> None:
    assert "does not exist: give a directory that holds manifest.json" in refused(tmp_path / "no")


def test_a_file_replaced_after_loading_is_refused_when_it_is_read(tiny_dir: Path) -> None:
    model = load_model(tiny_dir)
    path = tiny_dir / "segment_1.onnx"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(ModelError, match=r"segment_1\.onnx: expected sha256"):
        model.segments[1].read()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "must be a JSON object, got []"),
        (b"null", "must be a JSON object, got null"),
        (b"{}", "format_version is missing"),
        (b'{"format_version": 2}', "is 2, this program reads 1"),
        (b'{"format_version": true}', "must be an integer, got true"),
        (b'{"format_version": "1"}', 'must be an integer, got "1"'),
    ],
)
def test_a_manifest_that_is_none_is_refused(tiny_dir: Path, text: bytes, part: str) -> None:
    (tiny_dir / "manifest.json").write_bytes(text)
    message = refused(tiny_dir)
    assert message.startswith(str(tiny_dir / "manifest.json"))
    assert part in message


def edits() -> Iterator[Any]:
    """Every kind of wrong content: an edit of the manifest, and words of the message."""

    def case(name: str, edit: Callable[[Any], object], *parts: str) -> Any:
        return pytest.param(edit, parts, id=name)

    def segment(k: int, **changes: Any) -> Callable[[Any], object]:
        return lambda m: m["segments"][k].update(changes)

    def tensor(k: int, where: str, i: int, **changes: Any) -> Callable[[Any], object]:
        return lambda m: m["segments"][k][where][i].update(changes)

    def exit_value(key: str, value: Any) -> Callable[[Any], object]:
        return lambda m: m["segments"][1]["exit"].update({key: value})

    yield case("no segments", lambda m: m.update(segments=[]), "segments", "1 to 8 are possible")
    yield case(
        "unknown input", tensor(1, "inputs", 0, name="f9"), "segments[1].inputs", "'f9'", "neither"
    )
    yield case(
        "feature of a later segment",
        tensor(0, "inputs", 0, name="f1"),
        "segments[0].inputs",
        "'f1'",
    )
    yield case(
        "own feature", tensor(1, "inputs", 0, name="f1"), "segments[1].inputs", "'f1'", "neither"
    )
    yield case(
        "shape across a cut",
        tensor(2, "inputs", 1, shape=[1, 3, 4, 5]),
        "segments[2].inputs",
        "[1, 3, 4, 5]",
        "[1, 3, 4, 4]",
    )
    yield case("image shape", tensor(0, "inputs", 0, shape=[1, 3, 32, 33]), "[1, 3, 32, 33]")
    yield case("half floats", tensor(1, "features", 0, dtype="float16"), "float16", "features[0]")
    yield case("open shape", tensor(0, "features", 0, shape=[-1, 3, 4, 4]), "features[0].shape")
    yield case("feature twice", tensor(1, "features", 0, name="f0"), "'f0'", "unique")
    yield case("feature named image", tensor(1, "features", 0, name="image"), "unique")
    yield case("feature named as output", tensor(1, "features", 0, name="detections"), "unique")
    yield case("no inputs", segment(1, inputs=[]), "segments[1].inputs", "at least one")
    yield case(
        "input twice",
        lambda m: m["segments"][1]["inputs"].append(dict(m["segments"][1]["inputs"][0])),
        "only once",
    )
    for name in ("../segment_0.onnx", "/etc/hostname", "a/b", "..", ".", "a\\b", "a\0b"):
        yield case(f"path {name!r}", segment(0, file=name), "segments[0].file", "plain name")
    yield case("sha256 upper case", segment(0, sha256="A" * 64), "segments[0].sha256")
    yield case("sha256 short", segment(0, sha256="a" * 63), "64 lower-case")
    yield case("size 0", segment(0, size_bytes=0), "size_bytes must be above 0")
    yield case("rgb", lambda m: m["input"].update(color="RGB"), "input.color", "BGR")
    yield case("std 0", lambda m: m["input"].update(std=[1, 0, 1]), "input.std", "above 0")
    yield case("mean NaN", lambda m: m["input"].update(mean=[0, float("nan"), 0]), "input.mean")
    yield case("two means", lambda m: m["input"].update(mean=[0, 0]), "input.mean")
    yield case("pad 256", lambda m: m["input"].update(pad_value=256), "input.pad_value")
    yield case("grey input", lambda m: m["input"].update(shape=[1, 1, 32, 32]), "input.shape")
    yield case("flat input", lambda m: m["input"].update(shape=[1, 3, 32]), "input.shape")
    yield case("xywh", lambda m: m["output"].update(box="xywh"), "output.box", "xywh")
    yield case("no classes", lambda m: m["output"].update(classes=0), "output.classes")
    yield case("classes against labels", lambda m: m["output"].update(classes=4), "4 labels")
    for key, value in (
        ("anchors", 0),
        ("strides", [0]),
        ("strides", []),
        ("trained_classes", [3]),
        ("trained_classes", [-1]),
        ("cost_ms_median", 0),
        ("cost_ms_median", "1"),
        ("ap50", {"x": 1.5}),
        ("ap50", {"x": None}),
    ):
        yield case(
            f"{key} {value}",
            exit_value(key, value),
            f"segments[1].exit.{key}",
        )


@pytest.mark.parametrize(("edit", "parts"), list(edits()))
def test_wrong_content_is_refused_by_name(
    tiny_dir: Path, edit: Callable[[Any], object], parts: tuple[str, ...]
) -> None:
    manifest = read_manifest(tiny_dir)
    edit(manifest)
    write_manifest(tiny_dir, manifest)
    message = refused(tiny_dir)
    for part in parts:
        assert part in message


def test_nine_segments_are_refused(tiny_dir: Path) -> None:
    manifest = read_manifest(tiny_dir)
    last = manifest["segments"][2]
    manifest["segments"] += [copy.deepcopy(last) for _ in range(6)]
    write_manifest(tiny_dir, manifest)
    assert "holds 9 segments: 1 to 8 are possible" in refused(tiny_dir)


@pytest.mark.parametrize(
    "labels", [b"person\ncar\n", b"person\n\ndog\n", b"a\nb\nc\nd\n", b"", b"\xff\nb\nc\n"]
)
def test_labels_that_do_not_match_are_refused(tiny_dir: Path, labels: bytes) -> None:
    (tiny_dir / "labels.txt").write_bytes(labels)
    manifest = read_manifest(tiny_dir)
    manifest["labels"]["sha256"] = hashlib.sha256(labels).hexdigest()
    write_manifest(tiny_dir, manifest)
    assert str(tiny_dir / "labels.txt") in refused(tiny_dir)


def keys_of(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in the manifest, but for the free-form ones."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        if key == "training" or path[-1:] == ("ap50",):
            continue
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from keys_of(value, (*path, key))


def test_every_key_is_needed(tiny_dir: Path) -> None:
    manifest = read_manifest(tiny_dir)
    tried = 0
    for path in keys_of(manifest):
        if not isinstance(path[-1], str):
            continue
        damaged = copy.deepcopy(manifest)
        parent = damaged
        for key in path[:-1]:
            parent = parent[key]
        del parent[path[-1]]
        write_manifest(tiny_dir, damaged)
        assert f"{path[-1]} is missing" in refused(tiny_dir)
        tried += 1
    assert tried > 60


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(data=st.data())
def test_any_other_value_anywhere_loads_or_is_refused(tiny_dir: Path, data: st.DataObject) -> None:
    original = tiny_dir / "original.json"
    if not original.exists():
        original.write_bytes((tiny_dir / "manifest.json").read_bytes())
    manifest = json.loads(original.read_text(encoding="utf-8"))
    path = data.draw(st.sampled_from(list(keys_of(manifest))))
    parent = manifest
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = data.draw(JSON)
    write_manifest(tiny_dir, manifest)
    try:
        model = load_model(tiny_dir)
    except ModelError as error:
        assert str(tiny_dir) in str(error)  # noqa: PT017 (both endings are right)
    else:
        assert len(model.segments) == 3
