from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perception_rt.core.errors import BackendError, UnavailableError
from perception_rt.detector.engine_cache import (
    Built,
    EngineCache,
    EngineKey,
    Entry,
    default_cache_dir,
)

ROOT = Path(__file__).resolve().parents[2]
KEY = EngineKey(
    slot="net.segment_0.fp16.gpu",
    source_sha256="a" * 64,
    gpu="Orin",
    sm=87,
    driver="CUDA 12.6, L4T 36.4.3",
    builder="tensorrt 10.3.0",
    options="fp16",
)
ENGINE = bytes(range(256)) * 4


@pytest.fixture
def cache(tmp_path: Path) -> EngineCache:
    return EngineCache(tmp_path / "engines")


def put(cache: EngineCache, key: EngineKey = KEY, data: bytes = ENGINE) -> Entry:
    return cache.get_or_build(key, lambda: Built(data, {"layer_types": {"HALF": 3}}))


def never() -> Built:
    raise AssertionError("built again")


def test_the_first_call_builds_and_the_second_finds(cache: EngineCache) -> None:
    first = put(cache)
    assert (first.data, first.built, first.reason) == (ENGINE, True, "no engine was built yet")
    second = cache.get_or_build(KEY, never)
    assert second == Entry(ENGINE, {"layer_types": {"HALF": 3}}, first.path, False, "")
    assert first.path.read_bytes() == ENGINE  # the plain plan, as other tools read it
    assert first.path.parent.stat().st_mode & 0o777 == 0o700
    record = json.loads(first.path.with_suffix(".json").read_text())
    assert record["key"]["gpu"] == "Orin"
    assert record["size_bytes"] == 1024
    names = sorted(path.name for path in cache.directory.iterdir())
    assert names == sorted([".lock", first.path.name, first.path.stem + ".json"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source_sha256": "b" * 64}, "for another ONNX file than the present one"),
        (
            {"sm": 110, "gpu": "Thor"},
            "another GPU (Orin, here Thor) and another SM (87, here 110)",
        ),
        ({"builder": "tensorrt 10.13.3"}, "TensorRT (tensorrt 10.3.0, here tensorrt 10.13.3)"),
        ({"driver": "CUDA 13.0"}, "another driver (CUDA 12.6, L4T 36.4.3, here CUDA 13.0)"),
        ({"options": "fp16 dla=0"}, "another options (fp16, here fp16 dla=0)"),
    ],
)
def test_an_engine_that_does_not_fit_is_rebuilt_with_the_reason(
    change: dict[str, Any], words: str, cache: EngineCache
) -> None:
    put(cache)
    key = replace(KEY, **change)
    found = cache.load(key)
    assert isinstance(found, str)
    assert words in found
    again = put(cache, key, b"another")
    assert again.built
    assert words in again.reason
    assert cache.get_or_build(key, never).data == b"another"


def test_the_nearest_engine_is_the_one_that_is_explained(cache: EngineCache) -> None:
    put(cache, replace(KEY, gpu="Thor", sm=110, driver="CUDA 13.0"))
    put(cache)
    assert cache.load(replace(KEY, source_sha256="c" * 64)) == (
        "the engine there is for another ONNX file than the present one"
    )


def test_a_new_engine_replaces_its_own_gpus_and_leaves_the_others(cache: EngineCache) -> None:
    thor = replace(KEY, gpu="Thor", sm=110)
    older = replace(KEY, builder="tensorrt 8.6.2")
    other_slot = replace(KEY, slot="net.segment_1.fp16.gpu")
    for key in (thor, older, other_slot, KEY):
        put(cache, key)
    new = replace(KEY, source_sha256="b" * 64)
    put(cache, new)
    assert isinstance(cache.load(KEY), str)
    for key in (thor, older, other_slot, new):
        assert isinstance(cache.load(key), Entry)
    assert len(list(cache.directory.glob("*.plan"))) == 4
    assert len(list(cache.directory.glob("*.json"))) == 4


@pytest.mark.parametrize(
    ("size", "words"), [(0, "truncated: 0 of 1024 bytes"), (1000, "truncated: 1000 of 1024 bytes")]
)
def test_a_truncated_engine_is_rebuilt(size: int, words: str, cache: EngineCache) -> None:
    os.truncate(put(cache).path, size)
    again = put(cache)
    assert again.built
    assert words in again.reason
    assert cache.get_or_build(KEY, never).data == ENGINE


def test_a_damaged_engine_is_rebuilt(cache: EngineCache) -> None:
    put(cache).path.write_bytes(ENGINE[:-1] + b"\0")
    assert "its sha256 differs" in put(cache).reason


def test_a_half_written_engine_is_rebuilt_and_leftovers_go(cache: EngineCache) -> None:
    path = put(cache).path
    path.with_suffix(".json").unlink()
    leftover = path.with_name(f"{path.name}.4242.tmp")
    leftover.write_bytes(b"half")
    assert "half-written: its build was interrupted" in put(cache).reason
    assert not leftover.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"key": 3}', "\x00"])
def test_a_damaged_record_is_rebuilt(text: str, cache: EngineCache) -> None:
    record = put(cache).path.with_suffix(".json")
    record.write_text(text)
    assert isinstance(cache.load(KEY), str)
    assert put(cache).built
    assert cache.get_or_build(KEY, never).data == ENGINE


def test_a_record_under_a_wrong_name_is_refused(cache: EngineCache) -> None:
    """As after copying and renaming the engine of another machine."""
    foreign = put(cache, replace(KEY, gpu="Thor", sm=110))
    for suffix in (".plan", ".json"):
        foreign.path.with_suffix(suffix).rename(cache.directory / (KEY.stem + suffix))
    assert cache.load(KEY) == "the engine's record belongs to another engine"
    assert put(cache, data=b"own").data == b"own"


def test_a_missing_engine_file_is_rebuilt(cache: EngineCache) -> None:
    put(cache).path.unlink()
    assert "missing" in put(cache).reason


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_whatever_is_damaged_only_the_true_bytes_are_ever_handed_out(
    data: st.DataObject, cache: EngineCache
) -> None:
    path = put(cache).path
    path = data.draw(st.sampled_from([path, path.with_suffix(".json")]))
    content = bytearray(path.read_bytes())
    cut = data.draw(st.integers(0, len(content)))
    if data.draw(st.booleans()):
        del content[cut:]
    else:
        content[cut % len(content)] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    found = cache.load(KEY)
    assert isinstance(found, str) or found.data == ENGINE
    assert put(cache).data == ENGINE


def test_a_build_that_fails_leaves_the_cache_as_it_was(cache: EngineCache) -> None:
    before = put(cache)

    def fails() -> Built:
        raise BackendError("no")

    with pytest.raises(BackendError):
        cache.get_or_build(replace(KEY, source_sha256="b" * 64), fails)
    assert cache.load(KEY) == replace(before, built=False, reason="")
    assert not list(cache.directory.glob("*.tmp"))
    assert put(cache, replace(KEY, source_sha256="b" * 64)).built  # the lock is free again


def test_the_caller_may_refuse_an_engine_by_its_record(cache: EngineCache) -> None:
    put(cache)
    entry = cache.get_or_build(
        KEY, lambda: Built(b"new"), refuse=lambda info: "other frames" if info else ""
    )
    assert (entry.built, entry.data, entry.reason) == (True, b"new", "other frames")


def test_notes_are_replaced_as_a_whole_and_missing_ones_are_empty(cache: EngineCache) -> None:
    assert cache.read_note("timing.cache") == b""
    cache.write_note("timing.cache", b"1")
    cache.write_note("timing.cache", b"22")
    assert cache.read_note("timing.cache") == b"22"
    assert [path.name for path in cache.directory.iterdir()] == ["timing.cache"]


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UnavailableError, match=r"file/engines cannot be written \(Not a dir.*name"
    ):
        put(EngineCache(tmp_path / "file" / "engines"))


def test_a_full_disk_is_one_clear_error_and_no_half_entry(
    cache: EngineCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnavailableError, match=r"\(No space left on device\): make room"):
        put(cache)
    monkeypatch.undo()
    assert cache.load(KEY) == "no engine was built yet"
    assert [path.name for path in cache.directory.iterdir()] == [".lock"]


def test_the_default_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert default_cache_dir() == Path("/var/cache/me/perception_rt/engines")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, as the XDG rules say
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "perception_rt" / "engines"


# Two real processes. Each says what it does on standard output and builds only after a line on
# standard input.
CHILD = """
import sys
from pathlib import Path
from test_key import KEY
from perception_rt.detector.engine_cache import Built, EngineCache

def build():
    print("building", flush=True)
    assert sys.stdin.readline() == "go\\n"
    return Built(sys.argv[2].encode() * 1000)

entry = EngineCache(Path(sys.argv[1])).get_or_build(
    KEY, build, lambda line: print(line, flush=True), timeout_s=float(sys.argv[3])
)
print(entry.built, entry.data[:1].decode(), len(entry.data), entry.reason, flush=True)
"""


class Child:
    def __init__(self, cache: EngineCache, letter: str, timeout_s: float = 60) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(cache.directory), letter, str(timeout_s)],
            env={**os.environ, "PYTHONPATH": f"{cache.directory.parent}:{ROOT}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@pytest.fixture
def children(cache: EngineCache):
    """Starts children; none of them outlives the test."""
    key = f"from perception_rt.detector.engine_cache import EngineKey\nKEY = {KEY!r}\n"
    (cache.directory.parent / "test_key.py").write_text(key)
    started: list[Child] = []

    def start(letter: str, timeout_s: float = 60) -> Child:
        started.append(Child(cache, letter, timeout_s))
        return started[-1]

    yield start
    for child in started:
        if child.process.poll() is None:
            child.process.kill()
        child.process.communicate()


@pytest.mark.integration
def test_of_two_processes_one_builds_and_the_other_waits_and_loads(cache, children) -> None:
    first = children("a")
    assert first.line() == "building"
    second = children("b")
    waiting = f"process {first.process.pid} is building engines in {cache.directory}: waiting"
    assert second.line() == waiting
    assert isinstance(cache.load(KEY), str)  # a reader meets nothing half-written, and no lock
    first.go()
    assert first.line() == "True a 1000 no engine was built yet"
    assert second.line() == "False a 1000"
    assert first.end() == (0, "")
    assert second.end() == (0, "")


@pytest.mark.integration
def test_a_builder_that_is_killed_does_not_lock_out_the_next(cache, children) -> None:
    first = children("a")
    assert first.line() == "building"
    second = children("b")
    assert "waiting" in second.line()
    first.process.send_signal(signal.SIGKILL)
    assert second.line() == "building"
    second.go()
    assert second.line() == "True b 1000 no engine was built yet"
    assert second.end() == (0, "")


@pytest.mark.integration
def test_waiting_has_an_end_and_says_for_whom(cache, children) -> None:
    first = children("a")
    assert first.line() == "building"
    second = children("b", timeout_s=0)
    assert "waiting" in second.line()
    code, err = second.end()
    assert code == 1
    assert f"process {first.process.pid} has been building engines" in err
