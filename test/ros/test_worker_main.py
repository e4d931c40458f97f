"""What a worker that cannot join ROS, or ends without words, tells its parent."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")

from perception_rt.core.config import RosConfig, SourceConfig, WorkerConfig
from perception_rt.core.errors import InputError, RealtimeError, UnavailableError, UsageError
from perception_rt.runtime.worker_process import WorkerProcess

pytestmark = pytest.mark.integration

CONFIG = WorkerConfig("model", SourceConfig("bag", "x"), budget_ns=100_000_000)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (64, UsageError),
        (65, InputError),
        (69, UnavailableError),
        (77, RealtimeError),
        (1, UnavailableError),
    ],
)
def test_a_status_without_words_keeps_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    (tmp_path / "wordless.py").write_text(f"import sys\nsys.stdin.read()\nsys.exit({code})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = WorkerProcess(CONFIG, module="wordless")
    try:
        worker.start()
        with pytest.raises(kind, match=f"ended with status {code}: see its output") as caught:
            worker.wait_ready(30.0)
        assert caught.type is kind
    finally:
        worker.close()


def test_words_of_a_worker_that_cannot_join_ros(domain: int) -> None:
    config = WorkerConfig(
        "model",
        SourceConfig("bag", "x"),
        budget_ns=100_000_000,
        ros=RosConfig(node_name="bad name"),
    )
    worker = WorkerProcess(config)
    try:
        worker.start()
        with pytest.raises(UnavailableError, match="worker cannot join ROS: Invalid node name"):
            worker.wait_ready(30.0)
    finally:
        worker.close()
