"""Video files as a source."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from perception_rt.capture.source import SourceEvent
from perception_rt.capture.video import VideoSource
from perception_rt.core.clock import ManualClock
from perception_rt.core.config import SourceConfig
from perception_rt.core.errors import InputError
from perception_rt.core.frame import FrameBuffer, StampSource

MS = 1_000_000
END = 10**18
LEVELS = (40, 120, 200)


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """Three uniform frames of 64 x 48 pixels at 20 frames a second, in Motion JPEG."""
    path = tmp_path_factory.mktemp("video") / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 20.0, (64, 48))
    assert writer.isOpened()
    for level in LEVELS:
        writer.write(np.full((48, 64, 3), level, np.uint8))
    writer.release()
    return path


def opened(path, **config):
    clock = ManualClock()
    source = VideoSource(
        SourceConfig("video", str(path), **config),
        clock.now,
        lambda s: clock.advance(round(s * 1e9)),
    )
    source.open()
    return source


def level_of(buffer):
    return min(LEVELS, key=lambda level: abs(level - int(buffer.image[20, 20, 1])))


def test_plays_at_its_own_frame_rate(video):
    source = opened(video)
    assert source.stamp_source == StampSource.SIMULATED
    for _ in range(2):  # start begins anew
        source.start(7)
        buffer = FrameBuffer()
        for k, level in enumerate(LEVELS):
            buffer.error = "old"
            assert source.read(buffer, END) == SourceEvent.FRAME
            assert level_of(buffer) == level
            assert buffer.image.shape == (48, 64, 3)
            assert buffer.image.base is buffer.storage
            assert buffer.capture_stamp_ns == 7 + k * 50 * MS
            assert buffer.header_stamp_ns == k * 50 * MS
            assert (buffer.header_frame_id, buffer.error) == ("camera", "")
            assert buffer.stamp_source == StampSource.SIMULATED
            assert buffer.capture_start_ns >= buffer.capture_stamp_ns
        assert source.read(buffer, END) == SourceEvent.ENDED
        assert source.read(buffer, END) == SourceEvent.ENDED
    source.close()
    source.close()


def test_read_returns_at_until(video):
    source = opened(video)
    source.start(10 * MS)
    assert source.read(FrameBuffer(), 9 * MS) == SourceEvent.TIMEOUT
    assert source.read(FrameBuffer(), 11 * MS) == SourceEvent.FRAME


def test_loop_and_rate(video):
    source = opened(video, loop=True, rate=2.0)
    source.start(0)
    buffer = FrameBuffer()
    stamps = []
    for _ in range(2):
        for k, level in enumerate(LEVELS):
            assert source.read(buffer, END) == SourceEvent.FRAME
            assert (level_of(buffer), buffer.header_stamp_ns) == (level, k * 50 * MS)
            stamps.append(buffer.capture_stamp_ns)
        assert source.read(buffer, END) == SourceEvent.JUMP
    assert stamps == [0, 25 * MS, 50 * MS, 75 * MS, 100 * MS, 125 * MS]


@pytest.mark.parametrize("content", [None, b"", b"cut off" * 20])
def test_a_looped_file_that_goes_is_lost_and_tried_once_a_second(
    video, tmp_path, monkeypatch, content
):
    path = tmp_path / "clip.avi"
    whole = video.read_bytes()
    path.write_bytes(whole)
    clock = ManualClock()
    source = VideoSource(
        SourceConfig("video", str(path), loop=True),
        clock.now,
        lambda s: clock.advance(round(s * 1e9)),
    )
    source.open()
    source.start(0)
    opens = []
    real = cv2.VideoCapture

    def counting(name):
        opens.append(clock.now())
        return real(name)

    monkeypatch.setattr(cv2, "VideoCapture", counting)
    buffer = FrameBuffer()
    events = [source.read(buffer, END) for _ in LEVELS]
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    events += [source.read(buffer, END) for _ in range(2)]
    assert events == [SourceEvent.FRAME] * 3 + [SourceEvent.JUMP, SourceEvent.LOST]
    assert clock.now() == 150 * MS
    for k in range(1, 126):  # every read sleeps until it has to be back, in slices as at run time
        assert source.read(buffer, (150 + 20 * k) * MS) == SourceEvent.LOST
        assert clock.now() == (150 + 20 * k) * MS
    assert opens == [150 * MS, 1150 * MS, 2150 * MS]
    path.write_bytes(whole)
    for k, level in enumerate(LEVELS):  # plays from its first frame, catching up on nothing
        assert source.read(buffer, END) == SourceEvent.FRAME
        assert level_of(buffer) == level
        assert (buffer.capture_stamp_ns, buffer.header_stamp_ns) == (
            (3150 + k * 50) * MS,
            k * 50 * MS,
        )
    assert source.read(buffer, END) == SourceEvent.JUMP


def test_start_after_a_loss_begins_anew(video, tmp_path):
    path = tmp_path / "clip.avi"
    path.write_bytes(video.read_bytes())
    source = opened(path, loop=True)
    source.start(0)
    buffer = FrameBuffer()
    path.unlink()
    while source.read(buffer, END) != SourceEvent.LOST:
        pass
    path.write_bytes(video.read_bytes())
    source.start(400 * MS)
    assert source.read(buffer, END) == SourceEvent.FRAME
    assert buffer.capture_stamp_ns == 400 * MS


def test_a_fault_of_the_decoder_is_a_frame_with_an_error(video, monkeypatch):
    faults = [None, MemoryError(), cv2.error("no\nmemory"), None]

    class Capture:
        def __init__(self, _):
            pass

        def read(self, *_):
            if (fault := faults.pop(0)) is not None:
                raise fault
            return True, np.zeros((48, 64, 3), np.uint8)

        def get(self, _):
            return 20.0

        def release(self):
            pass

    monkeypatch.setattr(cv2, "VideoCapture", Capture)
    source = opened(video)
    source.start(0)
    buffer = FrameBuffer()
    seen = []
    for _ in range(3):
        assert source.read(buffer, END) == SourceEvent.FRAME
        seen.append((buffer.capture_stamp_ns, buffer.error))
    assert seen == [
        (0, "image cannot be decoded: MemoryError"),
        (50 * MS, "image cannot be decoded: no memory"),
        (100 * MS, ""),
    ]


def test_sample_is_the_first_frame(video):
    source = opened(video)
    buffer = FrameBuffer()
    assert source.sample(buffer)
    assert level_of(buffer) == 40
    source.start(0)
    assert source.read(buffer, END) == SourceEvent.FRAME
    assert level_of(buffer) == 40


@pytest.mark.parametrize("content", [None, b"", b"no video at all" * 50])
def test_what_is_no_video(tmp_path, content):
    path = tmp_path / "clip.mp4"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"no such video|is not a video that OpenCV can decode"):
        opened(path)


@pytest.mark.parametrize("fps", [0.0, -1.0, 1e9, float("nan")])
def test_a_video_without_a_frame_rate(video, monkeypatch, fps):
    class Capture:
        def __init__(self, path):
            assert path == str(video)

        def read(self):
            return True, np.zeros((48, 64, 3), np.uint8)

        def get(self, _):
            return fps

        def release(self):
            pass

    monkeypatch.setattr(cv2, "VideoCapture", Capture)
    with pytest.raises(InputError, match="states no usable frame rate"):
        opened(video)


@pytest.mark.data
def test_recording(shared_data):
    source = opened(shared_data / "video/vtest_pedestrians_768x576_10fps.avi")
    source.start(0)
    buffer = FrameBuffer()
    for k in range(5):
        assert source.read(buffer, END) == SourceEvent.FRAME
        assert buffer.capture_stamp_ns == k * 100 * MS
    assert buffer.image.shape == (576, 768, 3)
