"""The DDS profiles and the environment that the nodes are started with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from perception_rt.ros.dds_settings import environment
from perception_rt.ros.graph import GraphOptions, describe
from perception_rt.ros.launcher import Command, Launcher

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "67108864",
}
IMAGE_BYTES = 1280 * 720 * 3
FASTDDS = "FASTRTPS_DEFAULT_PROFILES_FILE"
JOIN = "import rclpy; rclpy.init(); rclpy.create_node('a').destroy_node(); rclpy.shutdown()"


def test_all_of_it_where_the_user_has_set_nothing(repository: Path) -> None:
    assert environment(repository, {}) == {
        **MALLOC,
        FASTDDS: str(repository / "config" / "fastdds.xml"),
        "CYCLONEDDS_URI": (repository / "config" / "cyclonedds.xml").as_uri(),
    }


@pytest.mark.parametrize(
    ("user", "left_out"),
    [
        ({FASTDDS: "/mine.xml"}, FASTDDS),
        ({"FASTDDS_DEFAULT_PROFILES_FILE": "/mine.xml"}, FASTDDS),
        ({"FASTDDS_BUILTIN_TRANSPORTS": "UDPv4"}, FASTDDS),
        ({"ROS_LOCALHOST_ONLY": "1"}, FASTDDS),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}, FASTDDS),
        ({"CYCLONEDDS_URI": "file:///mine.xml"}, "CYCLONEDDS_URI"),
        ({"MALLOC_TOP_PAD_": "0"}, "MALLOC_TOP_PAD_"),
    ],
)
def test_a_choice_of_the_user_wins(repository: Path, user: dict[str, str], left_out: str) -> None:
    everything = environment(repository, {})
    del everything[left_out]
    assert environment(repository, user) == everything


def test_without_the_files_only_memory(tmp_path: Path) -> None:
    assert environment(tmp_path, {}) == MALLOC


def test_every_process_of_the_graph_carries_it(repository: Path) -> None:
    specs = describe(GraphOptions(use_receiver=True), repository, {"MALLOC_TOP_PAD_": "0"})
    wanted = environment(repository, {"MALLOC_TOP_PAD_": "0"})
    assert [dict(s.environment) for s in specs if s.ros] == [wanted, wanted]
    # The receiver speaks UDP and no DDS.
    assert [dict(s.environment) for s in specs if not s.ros] == [{}]


def test_the_launcher_hands_it_on() -> None:
    lines: list[str] = []
    code = "import os; print(os.environ['PLACE'], os.environ['OWN'])"
    command = Command("a", (sys.executable, "-S", "-c", code), environment={"PLACE": "there"})
    launcher = Launcher([command], lines.append, {**os.environ, "OWN": "kept", "PLACE": "here"})
    launcher.run()
    assert "[a] there kept" in lines


def test_an_image_fits_shared_memory_and_a_full_socket_holds_nobody(repository: Path) -> None:
    root = ET.parse(repository / "config" / "fastdds.xml").getroot()
    space = {"d": "http://www.eprosima.com"}

    def number(name: str) -> int:
        return int(root.findtext(f".//d:{name}", "", space))

    assert number("segment_size") >= 4 * IMAGE_BYTES
    assert number("maxMessageSize") > IMAGE_BYTES
    assert root.findtext(".//d:non_blocking_send", "", space) == "true"


@pytest.mark.integration
def test_fast_dds_takes_the_profile(repository: Path, tmp_path: Path, domain: int) -> None:
    pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")

    def join(profile: Path) -> subprocess.CompletedProcess[str]:
        own = {k: v for k, v in os.environ.items() if k != "FASTDDS_BUILTIN_TRANSPORTS"}
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", JOIN],
            env={**own, FASTDDS: str(profile)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=True,
        )

    shipped = repository / "config" / "fastdds.xml"
    assert join(shipped).stdout == ""
    # That it would complain is what makes the line above worth something.
    broken = tmp_path / "broken.xml"
    broken.write_text(shipped.read_text().replace("segment_size", "segment_sise"))
    assert "XMLPARSER" in join(broken).stdout


@pytest.mark.integration
def test_cyclone_dds_takes_the_profile(repository: Path) -> None:
    pytest.importorskip("cyclonedds", reason="cyclonedds is not installed")
    code = (
        "from cyclonedds.domain import DomainParticipant\n"
        "import sys; DomainParticipant(int(sys.argv[1]))"
    )

    def join(uri: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, "91"],
            env={**os.environ, "CYCLONEDDS_URI": uri},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    shipped = repository / "config" / "cyclonedds.xml"
    taken = join(shipped.as_uri())
    assert (taken.returncode, taken.stdout, taken.stderr) == (0, "", "")
    assert join(shipped.read_text().replace("WhcHigh", "WhcHihg")).returncode != 0
