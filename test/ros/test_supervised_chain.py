"""Detector, worker and watchdog as processes; the test holds the safety controller's end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")

from perception_rt.ros.graph import GraphOptions, describe, to_command
from perception_rt.safety.e2e import DEFAULT_DATA_ID, Checker, E2EStatus
from perception_rt.safety.pdu import SafetyPdu
from perception_rt.safety.transports import UdpReceiver

pytestmark = pytest.mark.integration

MS = 1_000_000


class Heard(NamedTuple):
    """One PDU, the instant of its receipt (CLOCK_MONOTONIC), and what E2E says of it."""

    at_ns: int
    status: E2EStatus
    pdu: SafetyPdu


class Chain:
    """The graph's processes, and a thread that keeps every PDU."""

    def __init__(self, model: Path, repository: Path, log: Path, **detector: str) -> None:
        self.log = log
        self.heard: list[Heard] = []
        self._receiver = UdpReceiver("127.0.0.1", 0)
        self._stop = False
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        options = GraphOptions(
            bag=str(repository / "test" / "data" / "pedestrians_mcap"),
            model=str(model),
            deadline_ms="100",
            detector={"loop": True, "warmup_runs": 50, **detector},
            watchdog={"pdu.port": self._receiver.port},
        )
        self._file = log.open("w")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for spec in describe(options, repository):
            module = f"perception_rt.ros.{spec.executable}"
            command = [sys.executable, "-m", module, *to_command(spec, repository)[1:]]
            self.processes[spec.name] = subprocess.Popen(
                command, stdout=self._file, stderr=self._file
            )

    def _listen(self) -> None:
        checker = Checker(DEFAULT_DATA_ID)
        while not self._stop:
            if self._receiver.wait(50 * MS) and (datagram := self._receiver.receive()):
                at_ns = time.monotonic_ns()
                checked = checker.check(datagram)
                self.heard.append(Heard(at_ns, checked.status, SafetyPdu.decode(checked.payload)))

    def wait(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        limit = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < limit, f"not in time; log:\n{self.log.read_text()}"
            time.sleep(0.005)

    def after(self, since_ns: int, condition: Callable[[SafetyPdu], bool]) -> Heard:
        """The first PDU after ``since_ns`` of which ``condition`` holds."""

        def find() -> list[Heard]:
            return [h for h in list(self.heard) if h.at_ns > since_ns and condition(h.pdu)][:1]

        self.wait(find)
        return find()[0]

    def permitted(self) -> None:
        self.after(time.monotonic_ns(), lambda pdu: pdu.permit)

    def worker(self) -> int:
        pid = self.processes["detector"].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            process.wait(20)
        self._stop = True
        self._thread.join()
        self._receiver.close()
        self._file.close()


@pytest.fixture
def chain(domain: int, tiny_model: Path, repository: Path, tmp_path: Path):
    chain = Chain(tiny_model, repository, tmp_path / "log")
    try:
        chain.permitted()
        yield chain
    finally:
        chain.close()


def test_a_failing_backend_is_reported_as_degraded_and_keeps_the_permit(
    domain: int,
    tiny_model: Path,
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(repository / "test"))
    # Frames are counted from the warm-up's 50 on; 30 a second.
    monkeypatch.setenv("PERCEPTION_RT_TEST_BACKEND", json.dumps({"raise_frames": [110, 111]}))
    names = {
        "backend": "support.backends:FaultyBackend",
        "fallback_backend": "support.backends:ScriptedBackend",
    }
    chain = Chain(tiny_model, repository, tmp_path / "log", **names)
    try:
        chain.permitted()
        degraded = chain.after(0, lambda pdu: pdu.degraded)
        assert (degraded.pdu.state, degraded.pdu.permit) == (1, True)
        assert degraded.pdu.causes == 0
        back = chain.after(degraded.at_ns, lambda pdu: not pdu.degraded)
        assert back.pdu.permit
        between = [h.pdu for h in chain.heard if degraded.at_ns <= h.at_ns < back.at_ns]
        assert len(between) > 50
        assert all(pdu.permit for pdu in between)
    finally:
        chain.close()
    log = chain.log.read_text()
    assert "-> OK (permit) judged at " in log
    assert "DEGRADED: the detector runs on its fallback backend" in log
    assert "backend: DEGRADED, support.backends:FaultyBackend: 2 bad frames in a row" in log
    assert "backend: the primary runs again at " in log


def test_a_killed_worker_costs_the_permit_until_reset(chain: Chain) -> None:
    assert chain.heard[-1].pdu.simulated_source
    old, session = chain.worker(), chain.heard[-1].pdu.session_id
    killed_ns = time.monotonic_ns()
    os.kill(old, signal.SIGKILL)
    left_ok = chain.after(killed_ns, lambda pdu: pdu.state != 1)
    assert left_ok.at_ns - killed_ns < 200 * MS
    withdrawn = chain.after(killed_ns, lambda pdu: not pdu.permit)
    assert withdrawn.at_ns - killed_ns < 200 * MS
    assert withdrawn.pdu.state == 3
    back = chain.after(killed_ns, lambda pdu: pdu.session_id not in (0, session))
    assert not back.pdu.permit
    count = len(chain.heard)
    chain.wait(lambda: len(chain.heard) >= count + 50)
    assert not any(h.pdu.permit for h in chain.heard if h.at_ns > withdrawn.at_ns)
    reset(chain)
    log = chain.log.read_text()
    assert f"worker {old} was ended by signal 9 (noticed at " in log
    assert "-> EXPIRED (no permit) judged at " in log


def reset(chain: Chain) -> None:
    """Reset by a process of its own; ends with the permit."""
    code = "from perception_rt.ros.lifecycle_client import reset; print(*reset('/detector'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout == "deactivate activate\n", done.stderr + chain.log.read_text()
    chain.permitted()


@pytest.mark.parametrize("pause_s", [0.0, 0.3, 0.8, 1.2])
def test_one_reset_is_enough_at_whatever_stage_of_a_restart(chain: Chain, pause_s: float) -> None:
    killed_ns = time.monotonic_ns()
    os.kill(chain.worker(), signal.SIGKILL)
    chain.after(killed_ns, lambda pdu: not pdu.permit)
    time.sleep(pause_s)  # what is tested: the stages follow one another within about a second
    reset(chain)


def test_a_killed_watchdog_is_silence(chain: Chain) -> None:
    chain.processes["watchdog"].kill()
    chain.processes["watchdog"].wait()
    last = len(chain.heard)
    time.sleep(0.1)
    assert len(chain.heard) - last <= 1


def test_a_stopped_watchdog_names_its_own_lateness(chain: Chain) -> None:
    watchdog = chain.processes["watchdog"]
    watchdog.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    woken_ns = time.monotonic_ns()
    watchdog.send_signal(signal.SIGCONT)
    first = chain.after(woken_ns, lambda pdu: True)
    assert (first.pdu.state, first.pdu.permit) == (4, False)
    chain.permitted()
    assert "no permit" in chain.log.read_text()


def test_both_nodes_end_with_status_0(chain: Chain) -> None:
    for process in chain.processes.values():
        process.send_signal(signal.SIGTERM)
    assert [process.wait(20) for process in chain.processes.values()] == [0, 0]
    assert "Traceback" not in chain.log.read_text()
