from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path

import cv2
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
SETS = (
    "the source's frames are the disjoint union of the seven outcomes",
    "epoch and header stamp are the source's own",
    "the worker's totals agree with what was received",
    "every met frame was received, and nothing else",
)


def test_boxes_are_drawn_inside_the_picture_and_the_frame_stays_as_it_is() -> None:
    pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")
    from perception_rt.ros.demo import draw_boxes

    image = np.zeros((100, 120, 3), np.uint8)
    edges = [[-5.0, -5.0, 30.0, 40.0, 0.5, "person"], [100.0, 60.0, 130.0, 120.0, 1.0, "person"]]
    picture = draw_boxes(image, edges)
    assert picture.shape == image.shape
    assert not image.any()
    assert picture[30, 30].tolist() == [0, 220, 0]
    assert picture[80, 100].tolist() == [0, 220, 0]
    assert picture[70, 60].tolist() == [0, 0, 0]


def test_a_failed_permit_check_names_the_missing_right() -> None:
    pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")
    from perception_rt.ros.demo import verdict

    permit = "permit in at least 95% of the receiver's cycles after the first"
    right = "thread capture: SCHED_FIFO refused"

    def said(ok: bool, name: str, rights: list[str]) -> str:
        checks = [{"name": name, "ok": ok, "found": ""}]
        return verdict({"ok": ok, "rights_missing": rights, "main": {"checks": checks}})

    assert said(True, permit, [right]) == "demo: every check holds"
    assert said(False, permit, []) == "demo: FAILED, see the checks above"
    assert said(False, SETS[0], [right]) == "demo: FAILED, see the checks above"
    assert said(False, permit, [right]) == (
        "demo: FAILED, the permit likely for want of a real-time right: " + right
    )


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")
    from perception_rt.core.errors import UnavailableError
    from perception_rt.ros import demo

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(demo, "_run", full)
    with pytest.raises(UnavailableError, match="No space left on device; make room"):
        demo.demo(demo.DemoOptions(out=tmp_path), lambda _: None, lambda *_: None)


@pytest.mark.integration
def test_the_demo_accounts_for_every_frame_and_draws_three(tmp_path: Path) -> None:
    """Shorter than the demo itself; what depends on the machine's load is not asserted here."""
    pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")
    result_file, out = tmp_path / "demo.json", tmp_path / "out"
    command = [str(ROOT / ".venv" / "bin" / "perception_rt"), "demo", "--seconds", "3"]
    done = subprocess.run(
        [*command, "--out", str(out), "--json", str(result_file)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(result_file.read_text())
    assert result["ok"] is (done.returncode == 0)
    for name in ("main", "forced_miss"):
        holds = {check["name"]: check["ok"] for check in result[name]["checks"]}
        found = {check["name"]: check["found"] for check in result[name]["checks"]}
        assert all(holds[name] for name in SETS), found
        assert result[name]["delivered"] >= 20
    misses = {check["name"]: check["ok"] for check in result["forced_miss"]["checks"]}
    assert misses["every frame is reported as a miss"]
    assert misses["no permit, neither given nor granted"]
    assert result["main"]["receiver"]["accepted"] > 100
    assert result["main"]["budget_ns"] == 100_000_000
    assert result["forced_miss"]["budget_ns"] == 1_000_000
    assert "second run: every frame is forced to miss" in done.stderr
    assert len(result["pictures"]) == 3
    for path in result["pictures"]:
        assert cv2.imread(path).shape == (576, 768, 3)  # type: ignore[union-attr]
    assert "Checks" in done.stdout
    assert "Traceback" not in done.stderr
