"""Fixtures of the tests that need ROS."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TEST = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TEST))  # makes `support` importable

try:
    with warnings.catch_warnings():
        # rclpy imports lark with its first message type, and lark still imports sre_parse.
        warnings.simplefilter("ignore", DeprecationWarning)
        import lark  # noqa: F401
except ImportError:
    pass


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """A DDS domain for this test, in its own and its children's environment."""
    number = 60 + hash(request.node.nodeid) % 30
    monkeypatch.setenv("ROS_DOMAIN_ID", str(number))
    # These tests kill processes with SIGKILL, which leaves Fast DDS's shared memory half-written
    # for the next one (seen once: a crash in destroy_node of the test's own process). The demo's
    # test runs over the default transports.
    monkeypatch.setenv("FASTDDS_BUILTIN_TRANSPORTS", "UDPv4")
    return number


@pytest.fixture
def ros(domain: int) -> Iterator[Any]:
    """Join ROS with the given arguments, for nodes that live in the test's own process."""
    rclpy = pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")

    def join(*arguments: str) -> None:
        rclpy.init(args=["test", "--ros-args", *arguments] if arguments else [], domain_id=domain)

    yield join
    rclpy.try_shutdown()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that loads in a moment; not to be damaged."""
    from support.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
