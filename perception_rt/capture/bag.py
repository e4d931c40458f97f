"""rosbag2 recordings as a frame source: a directory, or a bare .mcap or .db3 file.

Only the raw bytes of one image topic are read, so types in the bag that nobody knows do not
matter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import rosbags.rosbag2 as rosbag2
from ruamel.yaml import YAML

from perception_rt.capture.decode import DECODERS, header_stamp_ns
from perception_rt.capture.pacing import Pacer
from perception_rt.capture.source import SourceEvent
from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.config import SourceConfig
from perception_rt.core.errors import InputError
from perception_rt.core.frame import FrameBuffer, StampSource

PRELOAD_LIMIT_BYTES = 256 << 20
"""Recordings up to this size are held in memory; larger ones are read one message ahead."""

FALLBACK_GAP_NS = 100 * NS_PER_MS
"""Gap between two laps of a recording that has no period of its own (one frame)."""

MAX_GAP_NS = 3600 * NS_PER_S
"""Largest step of log time, either way, between two messages: a larger one is a wrong clock, and
would be replayed as a silent wait.
"""

_SUFFIXES = (".mcap", ".db3")
_REPAIR = "repair it (`mcap recover`, `ros2 bag reindex`) or record it again"


class Bag:
    """The image topic of one recording.

    Attributes (after ``open``):
        topic: its name.
        message_type: a key of ``decode.DECODERS``.
        promised: messages that metadata.yaml (or the file's own index) says are on it.
    """

    def __init__(self, path: str, topic: str = "") -> None:
        self.path = Path(path)
        self.topic = topic
        self.message_type = ""
        self.promised = 0
        self._parts: list[Path] = []

    def open(self) -> None:
        """Find the files, the topic and the promised counts; reads indexes only.

        Raises:
            InputError: no such path, not a bag, damaged, empty, no such topic or no single image
                topic, fewer messages in the files than metadata.yaml promises.
        """
        if not self.path.exists():
            raise InputError(
                f"no such bag: {self.path}; give a rosbag2 directory, or an .mcap or .db3 file"
            )
        total_promised, topics_promised = self._find_parts()
        counts: dict[tuple[str, str], int] = {}
        for part in self._parts:
            with _Opened(part) as reader:
                for connection in reader.connections:
                    key = (connection.topic, connection.msgtype)
                    counts[key] = counts.get(key, 0) + connection.msgcount
        total = sum(counts.values())
        if total_promised > total:
            raise self._short(total_promised, total, "messages")
        if total == 0:
            raise InputError(f"bag {self.path} is empty: it holds no message; record it again")
        self.topic, self.message_type = self._choose(counts)
        self.promised = max(
            topics_promised.get(self.topic, 0), counts[self.topic, self.message_type]
        )

    def messages(self) -> Iterator[tuple[int, bytes]]:
        """Log time (nanoseconds) and serialized bytes of every image message, as recorded.

        Raises:
            InputError: damaged data, or fewer messages than promised (names both numbers).
        """
        found = 0
        for part in self._parts:
            with _Opened(part) as reader:
                chosen = [
                    c
                    for c in reader.connections
                    if (c.topic, c.msgtype) == (self.topic, self.message_type)
                ]
                if not chosen:
                    continue
                stream = reader.messages(chosen)
                while True:
                    try:
                        _, log_ns, raw = next(stream)
                    except StopIteration:
                        break
                    except Exception as error:  # damaged bytes fail in any way there is
                        raise InputError(
                            f"bag {self.path} is damaged after message {found} of "
                            f"{self.promised} on {self.topic} ({_brief(error)}); {_REPAIR}"
                        ) from error
                    found += 1
                    yield log_ns, raw
        if found < self.promised:
            raise self._short(self.promised, found, f"messages on {self.topic}")

    def _short(self, promised: int, found: int, what: str) -> InputError:
        return InputError(
            f"bag {self.path} promises {promised} {what}, but only {found} can be read; "
            "copy it again from its origin, or rebuild its metadata with `ros2 bag reindex`"
        )

    def _find_parts(self) -> tuple[int, dict[str, int]]:
        """Fill ``_parts``; what metadata.yaml promises: messages in all, and on each topic."""
        if not self.path.is_dir():
            if self.path.suffix not in _SUFFIXES:
                raise InputError(
                    f"{self.path} is not a bag: give a rosbag2 directory, or an .mcap or .db3 "
                    "file (a ROS 1 .bag is converted by `rosbags-convert`)"
                )
            self._parts = [self.path]
            return 0, {}
        file = self.path / "metadata.yaml"
        if not file.is_file():
            raise InputError(
                f"{self.path} has no metadata.yaml: give the .mcap or .db3 file in it, "
                "or run `ros2 bag reindex` on it"
            )
        try:
            content = YAML(typ="safe").load(file.read_text(encoding="utf-8"))
            info = content["rosbag2_bagfile_information"]
            names = [Path(name).name for name in info["relative_file_paths"]]
            total = int(info["message_count"])
            topics = {
                t["topic_metadata"]["name"]: int(t["message_count"])
                for t in info["topics_with_message_count"]
            }
            compressed = (info.get("compression_mode") or "none").lower() != "none"
        except Exception as error:  # YAML, type or key: all mean the same to the user
            raise InputError(
                f"{file} cannot be understood ({_brief(error)}); "
                "rebuild it with `ros2 bag reindex`"
            ) from error
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing or not names:
            raise InputError(
                f"bag {self.path} lacks {missing[0] if missing else 'any data file'}, which its "
                "metadata.yaml should name; copy the whole directory, or run `ros2 bag reindex`"
            )
        # Read through the directory only where that must undo a compression: its reader silently
        # skips topics whose QoS text differs between metadata.yaml and the file.
        self._parts = [self.path] if compressed else [self.path / name for name in names]
        return total, topics

    def _choose(self, counts: dict[tuple[str, str], int]) -> tuple[str, str]:
        there = "; ".join(
            f"{topic} ({kind}, {count} messages)"
            for (topic, kind), count in sorted(counts.items())
        )
        images = [key for key in counts if key[1] in DECODERS]
        if self.topic:
            named = [key for key in images if key[0] == self.topic]
            if not named:
                raise InputError(
                    f"bag {self.path} has no image topic {self.topic}; there is: {there}"
                )
            images = named
        if not images:
            raise InputError(
                f"bag {self.path} has no image topic (Image or CompressedImage); there is: {there}"
            )
        if len(images) > 1:
            names = ", ".join(sorted({topic for topic, _ in images}))
            raise InputError(
                f"bag {self.path} has several image topics; choose one of them: {names}"
            )
        if counts[images[0]] == 0:
            raise InputError(
                f"bag {self.path} holds no message on {images[0][0]}; there is: {there}"
            )
        return images[0]


class _Opened:
    """A rosbags reader of one file, with everything that can go wrong said in one line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> rosbag2.Reader:
        try:
            self._reader = rosbag2.Reader(self._path)
            self._reader.open()
        except Exception as error:  # damaged bytes fail in any way there is
            raise InputError(
                f"bag {self._path} is truncated or damaged ({_brief(error)}); {_REPAIR}"
            ) from error
        return self._reader

    def __exit__(self, *_: object) -> None:
        self._reader.close()


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__


class BagSource:
    """Plays the image topic of a bag on its recorded schedule (log time).

    The capture stamp is the scheduled instant (SIMULATED), however late the player is, and every
    frame is delivered; the capture span starts when the frame was really taken up, and includes
    decoding. Times that go back within a recording are delivered without pause. With ``loop`` the
    first frame follows the last by one median period, and a JUMP comes between them.

    Args:
        config: ``uri`` is the bag, ``topic`` its image topic (empty: the only one), with ``loop``
            and ``rate``.
        preload_limit_bytes: largest recording to hold in memory.
        now, sleep: clock (CLOCK_MONOTONIC, nanoseconds) and sleep (seconds).
    """

    stamp_source = StampSource.SIMULATED

    def __init__(
        self,
        config: SourceConfig,
        preload_limit_bytes: int = PRELOAD_LIMIT_BYTES,
        now: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bag = Bag(config.uri, config.topic)
        self._loop = config.loop
        self._limit = preload_limit_bytes
        self._pacer = Pacer(config.rate, now, sleep)
        self._offsets_ns: list[int] = []
        self._header_stamps_ns: list[int] = []
        self._preloaded: list[bytes] | None = []
        self._stream: Iterator[tuple[int, bytes]] | None = None
        self._ahead: bytes | None = None
        self._sample = b""
        self._index = 0
        self._lap_ns = 0

    def open(self) -> None:
        """Read the whole recording once: the schedule, the count, the messages where they fit.

        Raises:
            InputError: as ``Bag.open`` and ``Bag.messages``; log times of two consecutive
                messages further apart than ``MAX_GAP_NS``.
        """
        self.bag.open()
        self._offsets_ns, self._header_stamps_ns = [], []
        self._sample = b""
        kept: list[bytes] | None = []
        size = 0
        first_ns = last_ns = before_ns = 0
        trial = FrameBuffer()
        for log_ns, raw in self.bag.messages():
            if not self._offsets_ns:
                first_ns = last_ns = before_ns = log_ns
            self._check_gap(log_ns - before_ns)
            before_ns = log_ns
            last_ns = max(last_ns, log_ns)
            self._offsets_ns.append(last_ns - first_ns)
            self._header_stamps_ns.append(header_stamp_ns(raw))
            if not self._sample and self._decodes(raw, trial):
                self._sample = raw
            size += len(raw)
            if size > self._limit:
                kept = None
            if kept is not None:
                kept.append(raw)
        self._preloaded = kept
        periods = [b - a for a, b in zip(self._offsets_ns, self._offsets_ns[1:]) if b > a]
        gap_ns = round(statistics.median(periods)) if periods else FALLBACK_GAP_NS
        self._lap_ns = self._offsets_ns[-1] + gap_ns

    def schedule(self) -> list[tuple[int, int]]:
        """When each frame of one lap is due after ``start_ns``, and its header stamp."""
        return [
            (self._pacer.scaled_ns(o), s) for o, s in zip(self._offsets_ns, self._header_stamps_ns)
        ]

    def start(self, start_ns: int) -> None:
        """Begin with the first frame, due at ``start_ns``."""
        self._pacer.start(start_ns)
        self._rewind()

    def read(self, buffer: FrameBuffer, until_ns: int) -> SourceEvent:
        """Wait for the next frame and decode it into ``buffer``; see ``Source.read``."""
        if self._index == len(self._offsets_ns):
            if not self._loop:
                return SourceEvent.ENDED
            self._pacer.next_lap(self._lap_ns)
            self._rewind()
            return SourceEvent.JUMP
        due_ns = self._pacer.due_ns(self._offsets_ns[self._index])
        if self._ahead is None:
            self._ahead = self._next_raw()
        if not self._pacer.wait(due_ns, until_ns):
            return SourceEvent.TIMEOUT
        buffer.capture_stamp_ns = due_ns
        buffer.capture_start_ns = self._pacer.now()
        buffer.stamp_source = StampSource.SIMULATED
        DECODERS[self.bag.message_type](self._ahead, buffer)
        buffer.capture_end_ns = self._pacer.now()
        self._ahead = None
        self._index += 1
        return SourceEvent.FRAME

    def sample(self, buffer: FrameBuffer) -> bool:
        """Decode the first frame that can be decoded into ``buffer``; False when none can."""
        return bool(self._sample) and self._decodes(self._sample, buffer)

    def close(self) -> None:
        """Forget the recording and close its file."""
        self._preloaded, self._stream, self._ahead = [], None, None
        self._offsets_ns, self._header_stamps_ns = [], []

    def _check_gap(self, gap_ns: int) -> None:
        if abs(gap_ns) <= MAX_GAP_NS:
            return
        number = len(self._offsets_ns) + 1
        raise InputError(
            f"bag {self.bag.path}: log time goes {'forward' if gap_ns > 0 else 'back'} by "
            f"{abs(gap_ns) / NS_PER_S:.1f} s from message {number - 1} to message {number} on "
            f"{self.bag.topic} (at most {MAX_GAP_NS // NS_PER_S} s are replayed); correct the log "
            "times, or cut the recording there"
        )

    def _decodes(self, raw: bytes, buffer: FrameBuffer) -> bool:
        DECODERS[self.bag.message_type](raw, buffer)
        return not buffer.error

    def _rewind(self) -> None:
        self._index = 0
        self._ahead = None
        self._stream = self.bag.messages() if self._preloaded is None else None

    def _next_raw(self) -> bytes:
        if self._preloaded is not None:
            return self._preloaded[self._index]
        try:
            assert self._stream is not None, "start() comes before read()"
            return next(self._stream)[1]
        except (InputError, StopIteration):
            # The file changed since open() read it. An empty message is a frame with an error.
            return b""
