"""Built engines on disk: built once, found again, rebuilt with the reason when they do not fit.

An entry is ``<slot>-<digest>.plan`` (the bytes) and ``<slot>-<digest>.json`` (the whole key, size
and sha256 of the bytes, what the builder said). The digest is that of the key, so engines of
several GPUs and TensorRT versions lie side by side. Both are written to a temporary file, synced
and renamed, the JSON last: a reader sees an entry whole or not at all, and needs no lock. Builders
hold an exclusive flock of ``.lock``, which the kernel releases when its holder dies; it is one for
the whole folder because two builders at once would spoil each other's timings.

The bytes of an engine are code for the GPU's runtime: the folder is created for its owner only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perception_rt.core.errors import UnavailableError

FORMAT_VERSION = 1
LOCK_TIMEOUT_S = 3600.0
_LOCK_POLL_S = 0.1
_DIGEST_CHARS = 16


@dataclass(frozen=True)
class EngineKey:
    """Everything that decides whether an engine fits.

    Attributes:
        slot: what it is for: model, segment, precision, device; part of the file name.
        source_sha256: of the ONNX file (or kernel source) that it is built from.
        gpu: name of the GPU.
        sm: compute capability times ten.
        driver: version text of the driver.
        builder: name and version of what built it, as ``tensorrt 10.3.0``.
        options: of the build, as one text.
    """

    slot: str
    source_sha256: str
    gpu: str
    sm: int
    driver: str
    builder: str
    options: str = ""

    @property
    def stem(self) -> str:
        """Name of its files without suffix."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.slot}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]}"


@dataclass(frozen=True)
class Built:
    """What a builder returns: the bytes, and a JSON-ready record of how they were built."""

    data: bytes
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """An engine that fits.

    Attributes:
        data: its bytes, checked against their sha256.
        info: the builder's record.
        path: its .plan file.
        built: True when this call built it.
        reason: why it was built; empty when it was found.
    """

    data: bytes
    info: dict[str, Any]
    path: Path
    built: bool
    reason: str


class EngineCache:
    """A folder of engines; for any number of processes at once.

    Args:
        directory: the folder; made by the first build.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load(self, key: EngineKey) -> Entry | str:
        """The engine of this key, or the reason why there is none; never blocks, never writes."""
        plan, meta = self._paths(key)
        try:
            record = json.loads(meta.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if plan.exists():
                return "the engine is half-written: its build was interrupted"
            return self._why_missing(key)
        except (OSError, ValueError):
            return "the engine's record is damaged"
        if not isinstance(record, dict) or record.get("key") != asdict(key):
            return "the engine's record belongs to another engine"
        if record.get("format_version") != FORMAT_VERSION:
            return "the engine's record has another format"
        size = record.get("size_bytes")
        try:
            data = plan.read_bytes()
        except OSError:
            return "the engine's file is missing or unreadable"
        if len(data) != size:
            return f"the engine is truncated: {len(data)} of {size} bytes"
        if hashlib.sha256(data).hexdigest() != record.get("sha256"):
            return "the engine is damaged: its sha256 differs"
        info = record.get("info")
        return Entry(data, info if isinstance(info, dict) else {}, plan, False, "")

    def get_or_build(
        self,
        key: EngineKey,
        build: Callable[[], Built],
        on_wait: Callable[[str], None] | None = None,
        refuse: Callable[[dict[str, Any]], str] | None = None,
        timeout_s: float = LOCK_TIMEOUT_S,
    ) -> Entry:
        """Find the engine, or build and keep it; of several processes one builds, the others wait.

        Args:
            key: of the engine.
            build: called under the lock; what it raises leaves the cache as it was.
            on_wait: called once with a line of text when another process holds the lock.
            refuse: given the record of an engine that fits, the reason to build another one;
                empty: none.
            timeout_s: longest wait for that process.

        Raises:
            UnavailableError: the folder cannot be written, or the wait was too long.
        """
        found = self._accepted(key, refuse)
        if isinstance(found, Entry):
            return found
        with self._lock(on_wait, timeout_s):
            found = self._accepted(key, refuse)
            if isinstance(found, Entry):
                return found
            built = build()
            self._store(key, built)
            self._prune(key)
        return Entry(built.data, built.info, self._paths(key)[0], True, found)

    def _accepted(
        self, key: EngineKey, refuse: Callable[[dict[str, Any]], str] | None
    ) -> Entry | str:
        found = self.load(key)
        if isinstance(found, Entry) and refuse is not None:
            return refuse(found.info) or found
        return found

    def read_note(self, name: str) -> bytes:
        """A small file that goes with the engines (timing cache, choice); empty where none is."""
        try:
            return (self.directory / name).read_bytes()
        except OSError:
            return b""

    def write_note(self, name: str, data: bytes) -> None:
        """Replace such a file as a whole; the last writer wins.

        Raises:
            UnavailableError: the folder cannot be written.
        """
        with self._writing():
            _write(self.directory / name, data)

    def _paths(self, key: EngineKey) -> tuple[Path, Path]:
        stem = key.stem
        return self.directory / f"{stem}.plan", self.directory / f"{stem}.json"

    def _store(self, key: EngineKey, built: Built) -> None:
        plan, meta = self._paths(key)
        record = {
            "format_version": FORMAT_VERSION,
            "key": asdict(key),
            "size_bytes": len(built.data),
            "sha256": hashlib.sha256(built.data).hexdigest(),
            "info": built.info,
        }
        with self._writing():
            # The old record must not promise the new bytes, nor outlive them.
            meta.unlink(missing_ok=True)
            _write(plan, built.data)
            _write(meta, (json.dumps(record, indent=1) + "\n").encode())

    def _prune(self, key: EngineKey) -> None:
        """Drop what the new engine replaces: of the same slot, GPU, driver, TensorRT and options,
        from another version of the model. Engines for anything else stay.
        """
        same = ("gpu", "sm", "driver", "builder", "options")
        for stem, other in self._siblings(key):
            if stem != key.stem and all(other.get(name) == getattr(key, name) for name in same):
                for suffix in (".json", ".plan"):
                    (self.directory / (stem + suffix)).unlink(missing_ok=True)

    def _siblings(self, key: EngineKey) -> Iterator[tuple[str, dict[str, Any]]]:
        """File stem and key of every recorded engine of the same slot."""
        for path in sorted(self.directory.glob(f"{key.slot}-{'?' * _DIGEST_CHARS}.json")):
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            other = record.get("key") if isinstance(record, dict) else None
            if isinstance(other, dict) and other.get("slot") == key.slot:
                yield path.stem, other

    def _why_missing(self, key: EngineKey) -> str:
        """Name what differs from the engine that comes nearest."""
        differences = [
            [name for name, value in asdict(key).items() if other.get(name) != value]
            for _, other in self._siblings(key)
        ]
        others = [other for _, other in self._siblings(key)]
        if not differences:
            return "no engine was built yet"
        nearest = min(range(len(differences)), key=lambda i: len(differences[i]))
        return "the engine there is for another " + " and another ".join(
            _difference(name, others[nearest].get(name), getattr(key, name))
            for name in differences[nearest]
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Make the folder; an OSError inside becomes one line that says what to do."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            yield
        except OSError as error:
            raise UnavailableError(
                f"engine cache {self.directory} cannot be written "
                f"({error.strerror or error}): make room there or name another folder "
                "(--engine-cache-dir, parameter engine_cache_dir)"
            ) from error

    @contextmanager
    def _lock(self, on_wait: Callable[[str], None] | None, timeout_s: float) -> Iterator[None]:
        with self._writing():
            descriptor = os.open(
                self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        try:
            self._acquire(descriptor, on_wait, timeout_s)
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            # Only the lock's holder writes entries: a temporary file of one is of a dead writer.
            for suffix in ("plan", "json"):
                for leftover in self.directory.glob(f"*-{'?' * _DIGEST_CHARS}.{suffix}.*.tmp"):
                    leftover.unlink(missing_ok=True)
            yield
        finally:
            os.close(descriptor)

    def _acquire(
        self, descriptor: int, on_wait: Callable[[str], None] | None, timeout_s: float
    ) -> None:
        until = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = os.pread(descriptor, 20, 0).decode("ascii", "replace") or "unknown"
            except OSError as error:
                raise UnavailableError(
                    f"engine cache {self.directory} cannot be locked ({error.strerror}): name a "
                    "folder on a local disk (--engine-cache-dir, parameter engine_cache_dir)"
                ) from error
            if on_wait is not None:
                on_wait(f"process {holder} is building engines in {self.directory}: waiting")
                on_wait = None
            if time.monotonic() >= until:
                raise UnavailableError(
                    f"process {holder} has been building engines in {self.directory} for more "
                    f"than {timeout_s:g} s: wait for it or end it, then try again"
                )
            time.sleep(_LOCK_POLL_S)


def default_cache_dir() -> Path:
    """``perception_rt/engines`` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if named.startswith("/") else Path.home() / ".cache"
    return base / "perception_rt" / "engines"


def _write(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` ; a crash at any instant leaves the old or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _difference(name: str, there: object, here: object) -> str:
    if name == "source_sha256":
        return "ONNX file than the present one"
    label = {"gpu": "GPU", "sm": "SM", "builder": "TensorRT"}.get(name, name)
    return f"{label} ({there}, here {here})"
