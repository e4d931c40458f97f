"""Bags as a source: what can be wrong with them, and their schedule."""

from __future__ import annotations

import shutil
import sqlite3
from itertools import pairwise

import cv2
import numpy as np
import pytest
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin

from perception_rt.capture.bag import Bag, BagSource
from perception_rt.capture.source import SourceEvent
from perception_rt.core.clock import ManualClock
from perception_rt.core.config import SourceConfig
from perception_rt.core.errors import InputError
from perception_rt.core.frame import FrameBuffer, StampSource

IMAGE = "sensor_msgs/msg/Image"
COMPRESSED = "sensor_msgs/msg/CompressedImage"
TOPIC = ("/camera/image_raw", IMAGE)
MS = 1_000_000
END = 10**18


def opened(path, topic="", clock=None, limit=1 << 20, **config):
    """An open source on a clock that its own sleeping moves."""
    clock = clock or ManualClock()
    source = BagSource(
        SourceConfig("bag", str(path), topic, **config),
        limit,
        clock.now,
        lambda s: clock.advance(round(s * 1e9)),
    )
    source.open()
    return source


def error_of(path, topic=""):
    with pytest.raises(InputError) as caught:
        opened(path, topic)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def played(source, buffer=None):
    """(grey level, stamp) of every frame until the source ends; events between them by name."""
    buffer = buffer or FrameBuffer()
    out = []
    while (event := source.read(buffer, END)) != SourceEvent.ENDED:
        if event == SourceEvent.FRAME:
            assert buffer.error == ""
            out.append((int(buffer.image[0, 0, 0]), buffer.capture_stamp_ns))
        else:
            out.append(event.name)
    return out


# Schedule


@pytest.mark.parametrize("plugin", [StoragePlugin.MCAP, StoragePlugin.SQLITE3])
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("limit", [1 << 20, 0])
def test_plays_on_the_recorded_schedule(write_bag, grey_frames, plugin, bare, limit):
    path = write_bag({TOPIC: grey_frames(3)}, plugin=plugin)
    if bare:
        path = next(p for p in path.iterdir() if p.suffix in (".mcap", ".db3"))
    source = opened(path, limit=limit)
    assert source.stamp_source == StampSource.SIMULATED
    assert source.schedule() == [
        (0, 1_000_000_000),
        (100_000_000, 1_100_000_000),
        (200_000_000, 1_200_000_000),
    ]
    source.start(5_000)
    assert played(source) == [(0, 5_000), (1, 100_005_000), (2, 200_005_000)]
    assert source.read(FrameBuffer(), END) == SourceEvent.ENDED
    source.start(END)  # again, from the first frame
    assert source.read(FrameBuffer(), 0) == SourceEvent.TIMEOUT
    source.close()
    source.close()


def test_everything_but_ids_is_filled_in(write_bag, grey_frames):
    clock = ManualClock()
    source = opened(write_bag({TOPIC: grey_frames(2)}), clock=clock)
    source.start(40)
    buffer = FrameBuffer()
    buffer.frame_id, buffer.epoch, buffer.error = 9, 8, "old"
    assert source.read(buffer, END) == SourceEvent.FRAME
    assert (buffer.frame_id, buffer.epoch, buffer.error) == (9, 8, "")
    assert (buffer.header_stamp_ns, buffer.header_frame_id) == (1_000_000_000, "cam")
    assert buffer.stamp_source == StampSource.SIMULATED
    assert buffer.capture_stamp_ns == buffer.capture_start_ns == buffer.capture_end_ns == 40


def test_read_returns_at_until_and_stamps_do_not_follow_a_late_player(write_bag, grey_frames):
    clock = ManualClock()
    source = opened(write_bag({TOPIC: grey_frames(3)}), clock=clock)
    source.start(0)
    buffer = FrameBuffer()
    assert source.read(buffer, 0) == SourceEvent.FRAME
    assert source.read(buffer, 99 * MS) == SourceEvent.TIMEOUT
    assert clock.now() == 99 * MS
    clock.advance_to(350 * MS)
    for stamp_ns in (100 * MS, 200 * MS):
        # Due long ago: taken up now, even where the time to wait is used up.
        assert source.read(buffer, 0) == SourceEvent.FRAME
        assert (buffer.capture_stamp_ns, buffer.capture_start_ns) == (stamp_ns, 350 * MS)


def test_rate_scales_the_schedule_and_not_the_header(write_bag, grey_frames):
    source = opened(write_bag({TOPIC: grey_frames(3)}), rate=4.0)
    assert [offset for offset, _ in source.schedule()] == [0, 25 * MS, 50 * MS]
    source.start(0)
    assert played(source) == [(0, 0), (1, 25 * MS), (2, 50 * MS)]


@pytest.mark.parametrize("limit", [1 << 20, 0])
def test_loop_jumps_back_after_one_median_period(write_bag, grey_frames, limit):
    frames = grey_frames(4)
    frames[3] = (frames[3][0] + 400 * MS, frames[3][1])  # one long gap: periods 100, 100, 500
    source = opened(write_bag({TOPIC: frames}), loop=True, rate=2.0, limit=limit)
    source.start(1)
    buffer = FrameBuffer()
    events = [source.read(buffer, END) for _ in range(5)]
    assert events == [SourceEvent.FRAME] * 4 + [SourceEvent.JUMP]
    assert buffer.capture_stamp_ns == 350 * MS + 1
    for lap_start_ns in (400 * MS + 1, 800 * MS + 1):
        for grey, offset_ns in ((0, 0), (1, 50 * MS), (2, 100 * MS), (3, 350 * MS)):
            assert source.read(buffer, END) == SourceEvent.FRAME
            assert buffer.capture_stamp_ns == lap_start_ns + offset_ns
            assert buffer.image[0, 0, 0] == grey
        assert source.read(buffer, END) == SourceEvent.JUMP


def test_one_frame_loops_ten_times_a_second(write_bag, grey_frames):
    source = opened(write_bag({TOPIC: grey_frames(1)}), loop=True)
    source.start(0)
    buffer = FrameBuffer()
    for lap in range(3):
        assert source.read(buffer, END) == SourceEvent.FRAME
        assert buffer.capture_stamp_ns == lap * 100 * MS
        assert source.read(buffer, END) == SourceEvent.JUMP


def test_equal_log_times_are_delivered_without_pause(write_bag, grey_frames):
    frames = [(10**9, raw) for _, raw in grey_frames(3)]
    source = opened(write_bag({TOPIC: frames}))
    source.start(0)
    assert played(source) == [(0, 0), (1, 0), (2, 0)]


def test_log_times_that_go_back_between_files_do_not_run_backwards(write_bag, grey_frames):
    frames = grey_frames(4)
    first = write_bag({TOPIC: frames[2:]}, "first")
    second = write_bag({TOPIC: frames[:2]}, "second")
    shutil.copy(second / "second.mcap", first)
    file = first / "metadata.yaml"
    text = file.read_text().replace("message_count: 2", "message_count: 4")
    lines = [
        f"{line}\n{line.replace('first', 'second')}" if line.strip() == "- first.mcap" else line
        for line in text.splitlines()
    ]
    file.write_text("\n".join(lines) + "\n")
    source = opened(first)
    source.start(0)
    assert played(source) == [(2, 0), (3, 100 * MS), (0, 100 * MS), (1, 100 * MS)]


@pytest.mark.parametrize(
    ("step_ns", "text"),
    [
        (3600 * 10**9 + 1, "forward by 3600.0 s"),
        (10**18, "forward by 1000000000.0 s"),
    ],
)
def test_a_gap_of_more_than_an_hour_is_refused(write_bag, grey_frames, step_ns, text):
    frames = grey_frames(3)
    frames[2] = (frames[1][0] + step_ns, frames[2][1])
    message = error_of(write_bag({TOPIC: frames}))
    assert f"log time goes {text} from message 2 to message 3 on /camera/image_raw" in message
    assert "cut the recording" in message


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("limit", [1 << 20, 0])
def test_an_hour_either_way_is_still_played(write_bag, grey_frames, monkeypatch, sign, limit):
    path = write_bag({TOPIC: grey_frames(2)})
    raws = [raw for _, raw in grey_frames(2)]
    start_ns, hour_ns = 10**18, 3600 * 10**9

    def play(step_ns):
        times = [start_ns, start_ns + step_ns]
        monkeypatch.setattr(Bag, "messages", lambda _: iter(list(zip(times, raws))))
        return opened(path, limit=limit).schedule()

    assert [offset for offset, _ in play(sign * hour_ns)] == [0, max(0, sign * hour_ns)]
    way = "forward" if sign > 0 else "back"
    with pytest.raises(InputError, match=f"goes {way} by 3601.0 s from message 1 to message 2"):
        play(sign * (hour_ns + 10**9))


# Topics


def test_other_topics_and_unknown_types_do_not_matter(write_bag, grey_frames, string_cdr):
    path = write_bag(
        {
            ("/odd", "made_up_msgs/msg/Nothing"): [
                (5 * 10**8, b"\x00\x01\x00\x00\x01\x00\x00\x00")
            ],
            ("/chatter", "std_msgs/msg/String"): [(6 * 10**8, string_cdr("hello"))],
            TOPIC: grey_frames(2),
        }
    )
    source = opened(path)
    assert source.bag.topic == "/camera/image_raw"
    source.start(0)
    assert played(source) == [(0, 0), (1, 100 * MS)]


def test_several_image_topics_are_listed_and_one_can_be_chosen(
    write_bag, grey_frames, compressed_cdr
):
    jpeg = cv2.imencode(".jpg", np.full((8, 8, 3), 77, np.uint8))[1].tobytes()
    path = write_bag(
        {TOPIC: grey_frames(2), ("/rear/compressed", COMPRESSED): [(3, compressed_cdr(jpeg))]}
    )
    assert "several image topics; choose one of them: /camera/image_raw, /rear/compressed" in (
        error_of(path)
    )
    source = opened(path, "/rear/compressed")
    source.start(0)
    assert played(source) == [(77, 0)]
    message = error_of(path, "/front")
    assert "no image topic /front" in message
    assert f"/camera/image_raw ({IMAGE}, 2 messages)" in message


def test_no_image_topic_lists_what_is_there(write_bag, string_cdr):
    path = write_bag({("/chatter", "std_msgs/msg/String"): [(1, string_cdr("a"))]})
    assert "no image topic" in error_of(path)
    assert "/chatter (std_msgs/msg/String, 1 messages)" in error_of(path)
    assert "no image topic /chatter" in error_of(path, "/chatter")


# What can be wrong


def test_missing_path_and_what_is_no_bag(tmp_path):
    assert "no such bag" in error_of(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("hello")
    assert "is not a bag" in error_of(tmp_path / "notes.txt")
    (tmp_path / "ros1.bag").write_bytes(b"#ROSBAG V2.0\n")
    assert "rosbags-convert" in error_of(tmp_path / "ros1.bag")
    (tmp_path / "empty").mkdir()
    assert "has no metadata.yaml" in error_of(tmp_path / "empty")


@pytest.mark.parametrize("suffix", ["mcap", "db3"])
@pytest.mark.parametrize("content", [b"", b"garbage" * 100])
def test_files_of_garbage(tmp_path, suffix, content):
    file = tmp_path / f"x.{suffix}"
    file.write_bytes(content)
    assert "is truncated or damaged" in error_of(file)


def test_empty_bags(write_bag):
    for plugin in (StoragePlugin.MCAP, StoragePlugin.SQLITE3):
        path = write_bag({TOPIC: []}, plugin.name, plugin)
        assert "is empty" in error_of(path)


def test_an_image_topic_without_messages(write_bag, string_cdr):
    path = write_bag(
        {TOPIC: [], ("/chatter", "std_msgs/msg/String"): [(1, string_cdr("a"))]},
        plugin=StoragePlugin.SQLITE3,
    )
    assert "holds no message on /camera/image_raw" in error_of(path)


@pytest.mark.parametrize("suffix", ["mcap", "db3"])
def test_truncated_anywhere_is_one_line(write_bag, grey_frames, suffix):
    plugin = StoragePlugin.MCAP if suffix == "mcap" else StoragePlugin.SQLITE3
    path = write_bag({TOPIC: grey_frames(40)}, plugin=plugin)
    file = path / f"bag.{suffix}"
    whole = file.read_bytes()
    for share in (0.01, 0.2, 0.6, 0.99):
        file.write_bytes(whole[: int(len(whole) * share)])
        assert "damaged" in error_of(file)
        assert "damaged" in error_of(path)


def test_damage_inside_is_never_a_traceback(write_bag, grey_frames):
    path = write_bag({TOPIC: grey_frames(20)})
    file = path / "bag.mcap"
    whole = file.read_bytes()
    refused = []
    for position in range(0, len(whole) - 64, 97):
        file.write_bytes(whole[:position] + b"\xff" * 64 + whole[position + 64 :])
        try:
            opened(path)  # damage to pixels, or to text that does not matter, is not noticed here
        except InputError as error:
            refused.append(str(error))
    assert refused
    assert not [message for message in refused if "\n" in message]


def test_metadata_that_promises_more_than_can_be_read(write_bag, grey_frames):
    path = write_bag({TOPIC: grey_frames(3)})
    file = path / "metadata.yaml"
    text = file.read_text()
    file.write_text(text.replace("message_count: 3", "message_count: 20"))
    assert "promises 20 messages, but only 3 can be read" in error_of(path)
    # Only the topic's own count is wrong.
    head, tail = text.split("topics_with_message_count")
    file.write_text(
        head + "topics_with_message_count" + tail.replace("message_count: 3", "message_count: 20")
    )
    assert "promises 20 messages on /camera/image_raw, but only 3 can be read" in error_of(path)


def test_rows_lost_from_a_database(write_bag, grey_frames):
    path = write_bag({TOPIC: grey_frames(5)}, plugin=StoragePlugin.SQLITE3)
    with sqlite3.connect(path / "bag.db3") as database:
        database.execute("delete from messages where id > 3")
    database.close()
    assert "promises 5 messages, but only 3 can be read" in error_of(path)
    assert [grey for grey, _ in _play(path / "bag.db3")] == [0, 1, 2]


def _play(path):
    source = opened(path)
    source.start(0)
    return played(source)


def test_qos_text_that_differs_between_metadata_and_file_hides_nothing(write_bag, grey_frames):
    # rosbags' own directory reader yields 0 messages here, without a word.
    path = write_bag({TOPIC: grey_frames(3)})
    file = path / "metadata.yaml"
    qos = (
        '"- history: 3\\n  depth: 0\\n  reliability: 1\\n  durability: 2\\n  deadline:\\n'
        "    sec: 0\\n    nsec: 0\\n  lifespan:\\n    sec: 0\\n    nsec: 0\\n  liveliness: 1\\n"
        "  liveliness_lease_duration:\\n    sec: 0\\n    nsec: 0\\n"
        '  avoid_ros_namespace_conventions: false"'
    )
    text = file.read_text()
    assert "offered_qos_profiles: ''" in text
    file.write_text(text.replace("offered_qos_profiles: ''", f"offered_qos_profiles: {qos}"))
    assert [grey for grey, _ in _play(path)] == [0, 1, 2]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "rosbag2_bagfile_information: 3",
        "rosbag2_bagfile_information: {relative_file_paths: [a.mcap]}",
    ],
)
def test_metadata_that_cannot_be_understood(write_bag, grey_frames, text):
    path = write_bag({TOPIC: grey_frames(1)})
    (path / "metadata.yaml").write_text(text)
    assert "cannot be understood" in error_of(path)


def test_a_file_that_metadata_names_is_missing(write_bag, grey_frames):
    path = write_bag({TOPIC: grey_frames(1)})
    (path / "bag.mcap").rename(path / "other.mcap")
    assert "lacks bag.mcap" in error_of(path)


@pytest.mark.parametrize("mode", [CompressionMode.FILE, CompressionMode.MESSAGE])
def test_compressed_bags(write_bag, grey_frames, mode):
    path = write_bag(
        {TOPIC: grey_frames(3)},
        plugin=StoragePlugin.SQLITE3,
        mode=mode,
        fmt=CompressionFormat.ZSTD,
    )
    assert [grey for grey, _ in _play(path)] == [0, 1, 2]


# Bad frames


def test_an_undecodable_frame_is_delivered_with_its_reason_and_play_goes_on(
    write_bag, grey_frames
):
    frames = grey_frames(3)
    frames[0] = (frames[0][0], b"\x00\x01\x00\x00broken")
    frames[1] = (frames[1][0], frames[1][1][:-4])
    source = opened(write_bag({TOPIC: frames}))
    assert source.schedule()[0] == (0, 0)
    source.start(0)
    buffer = FrameBuffer()
    assert source.read(buffer, END) == SourceEvent.FRAME
    assert "too short for a header" in buffer.error
    assert source.read(buffer, END) == SourceEvent.FRAME
    assert "data should have 24 bytes, 20 are there" in buffer.error
    assert (buffer.header_stamp_ns, buffer.capture_stamp_ns) == (1_100_000_000, 100 * MS)
    assert source.read(buffer, END) == SourceEvent.FRAME
    assert (buffer.error, buffer.image[0, 0, 0]) == ("", 2)


def test_sample_is_the_first_frame_that_decodes(write_bag, grey_frames):
    frames = grey_frames(2)
    path = write_bag({TOPIC: [(1, b"broken"), *frames]})
    source = opened(path)
    buffer = FrameBuffer()
    assert source.sample(buffer)
    assert buffer.image.tolist() == [[[0] * 3] * 4] * 2
    source = opened(write_bag({TOPIC: [(1, b"broken")]}, "bad"))
    assert not source.sample(buffer)


def test_a_file_that_vanishes_during_play_gives_frames_with_an_error(write_bag, grey_frames):
    path = write_bag({TOPIC: grey_frames(2)})
    source = opened(path, limit=0)
    (path / "bag.mcap").unlink()
    source.start(0)
    buffer = FrameBuffer()
    for _ in range(2):
        assert source.read(buffer, END) == SourceEvent.FRAME
        assert buffer.error == "message of 0 bytes is too short for a header"
    assert source.read(buffer, END) == SourceEvent.ENDED


# Recordings


def test_demo_bag(repository):
    path = repository / "test/data/pedestrians_mcap"
    assert sum(file.stat().st_size for file in path.iterdir()) <= 5_000_000
    source = opened(path)
    assert source.bag.topic == "/camera/image_raw/compressed"
    schedule = source.schedule()
    assert len(schedule) == 60
    assert [stamp for _, stamp in schedule] == [
        1_700_000_000_000_000_000 + k * 100 * MS for k in range(60)
    ]
    gaps = [b - a for (a, _), (b, _) in pairwise(schedule)]
    assert 90 * MS < min(gaps) < 100 * MS < max(gaps) < 110 * MS
    source.start(0)
    buffer = FrameBuffer()
    for _ in range(60):
        assert source.read(buffer, END) == SourceEvent.FRAME
        assert (buffer.error, buffer.image.shape) == ("", (576, 768, 3))
        assert buffer.header_frame_id == "camera"
    assert source.read(buffer, END) == SourceEvent.ENDED


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "frames", "shape"),
    [("udacity_dash_mcap", 75, (540, 960, 3)), ("udacity_dash_raw_small_mcap", 20, (180, 320, 3))],
)
def test_recordings(shared_data, name, frames, shape):
    for path in (shared_data / "bags" / name, shared_data / "bags" / name / f"{name}.mcap"):
        source = opened(path, limit=1 << 28)
        assert len(source.schedule()) == frames
        buffer = FrameBuffer()
        assert source.sample(buffer)
        assert buffer.image.shape == shape


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken/truncated_60pct.mcap", "is truncated or damaged"),
        ("rosbag2_fixtures/empty_bag", "is empty"),
        ("rosbag2_fixtures/talker_mcap", "/topic (std_msgs/msg/String, 10 messages)"),
        ("rosbag2_fixtures/talker_sqlite3", "/topic (std_msgs/msg/String, 10 messages)"),
        ("rosbag2_fixtures/wbag", "AAA (std_msgs/msg/String, 804 messages)"),
    ],
)
def test_bags_that_others_use(shared_data, name, reason):
    assert reason in error_of(shared_data / "bags" / name)


def test_bag_counts_without_reading(write_bag, grey_frames):
    bag = Bag(str(write_bag({TOPIC: grey_frames(3)})))
    bag.open()
    assert (bag.topic, bag.message_type, bag.promised) == ("/camera/image_raw", IMAGE, 3)
