"""The detector node as a process of its own, with a real worker, a tiny model and the demo bag."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")

import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from perception_rt_msgs.msg import FrameTiming, WorkerHeartbeat
from rcl_interfaces.msg import Parameter as ParameterMessage
from rcl_interfaces.srv import SetParameters
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image
from vision_msgs.msg import Detection2DArray

from perception_rt.ros.graph import NodeSpec, to_command

pytestmark = pytest.mark.integration

T = Transition
READY_S = 60.0


class Detector:
    """A detector_node process and a client node that hears and steers it."""

    def __init__(self, domain: int, model: Path, bag: Path, log: Path, **parameters: Any) -> None:
        given = {
            "model_path": str(model),
            "source": "bag",
            "source_uri": str(bag),
            "loop": True,
            "warmup_runs": 50,
            "deadline_ms": 80.0,
            **parameters,
        }
        spec = NodeSpec("detector_node", "eye", "/left", parameters=given)
        command = [
            sys.executable,
            "-m",
            "perception_rt.ros.detector_node",
            *to_command(spec, log)[1:],
        ]
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stderr=file, stdout=file)
        rclpy.init(args=[], domain_id=domain)
        self.node = rclpy.create_node("client")
        self.executor = SingleThreadedExecutor()
        self.executor.add_node(self.node)
        self.detections: list[Detection2DArray] = []
        self.timing: list[FrameTiming] = []
        self.beats: list[WorkerHeartbeat] = []
        self.diagnostics: list[DiagnosticArray] = []
        depth = QoSProfile(depth=1000, reliability=ReliabilityPolicy.RELIABLE)
        hear = self.node.create_subscription
        hear(Detection2DArray, "/left/eye/detections", self.detections.append, depth)
        hear(FrameTiming, "/left/eye/frame_timing", self.timing.append, depth)
        hear(WorkerHeartbeat, "/left/eye/heartbeat", self.beats.append, depth)
        hear(DiagnosticArray, "/diagnostics", self.diagnostics.append, depth)
        self._change = self.node.create_client(ChangeState, "/left/eye/change_state")
        self._set = self.node.create_client(SetParameters, "/left/eye/set_parameters")

    def spin_until(self, condition: Any, timeout_s: float = READY_S) -> None:
        limit = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < limit, f"not in time; log:\n{self.log.read_text()}"
            self.executor.spin_once(timeout_sec=0.05)

    def spin_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.executor.spin_once(timeout_sec=0.02)

    def call(self, client: Any, request: Any) -> Any:
        self.spin_until(client.service_is_ready)
        future = client.call_async(request)
        self.spin_until(future.done)
        return future.result()

    def change(self, transition: int) -> bool:
        request = ChangeState.Request()
        request.transition.id = transition
        return bool(self.call(self._change, request).success)

    def set(self, name: str, value: Any) -> str:
        parameter: ParameterMessage = Parameter(name, value=value).to_parameter_msg()
        result = self.call(self._set, SetParameters.Request(parameters=[parameter])).results[0]
        assert result.successful == (not result.reason)
        return str(result.reason)

    def status(self, aspect: str) -> Any:
        """The newest status on an aspect; None before the first."""
        for array in reversed(self.diagnostics):
            for status in array.status:
                if status.name == f"left/eye: {aspect}":
                    return status
        return None

    def workers(self) -> list[int]:
        """Process ids of the node's children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.executor.shutdown()
        self.node.destroy_node()
        rclpy.try_shutdown()


@pytest.fixture
def detector(domain: int, tiny_model: Path, repository: Path, tmp_path: Path):
    started: list[Detector] = []

    def start(**parameters: Any) -> Detector:
        bag = repository / "test" / "data" / "pedestrians_mcap"
        started.append(Detector(domain, tiny_model, bag, tmp_path / "log", **parameters))
        return started[-1]

    yield start
    for one in started:
        one.close()


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_frames_flow_and_every_met_one_is_received(detector) -> None:
    node = detector(autostart=False)
    assert node.change(T.TRANSITION_CONFIGURE)
    node.spin_until(
        lambda: all(
            node.node.count_publishers(f"/left/eye/{t}") for t in ("detections", "frame_timing")
        )
    )
    # This side of the match is seen here; the worker's side follows within milliseconds.
    node.spin_for(0.5)
    assert node.change(T.TRANSITION_ACTIVATE)
    node.spin_until(lambda: len(node.timing) >= 30)
    (worker,) = node.workers()
    node.process.send_signal(signal.SIGINT)
    node.spin_until(lambda: node.process.poll() is not None)
    assert node.process.returncode == 0
    assert gone(worker)
    node.spin_for(0.3)
    ids = [timing.frame_id for timing in node.timing]
    assert sorted(ids) == list(range(1, len(ids) + 1))
    met = {
        (t.header.stamp.sec, t.header.stamp.nanosec)
        for t in node.timing
        if t.outcome <= FrameTiming.OUTCOME_OVERRUN
    }
    received = {(d.header.stamp.sec, d.header.stamp.nanosec) for d in node.detections}
    assert met
    assert received == met
    newest = node.timing[-1]
    assert sum(newest.outcome_totals) == len(ids)
    assert newest.stamp_source == FrameTiming.STAMP_SIMULATED
    assert newest.budget_ns == 80_000_000
    assert newest.session_id == node.beats[-1].session_id
    assert node.detections[-1].header.frame_id == newest.header.frame_id != ""
    first = node.detections[-1].detections[0]
    assert first.results[0].hypothesis.class_id in ("person", "car", "dog")
    assert first.header == node.detections[-1].header
    last = node.beats[-1]
    assert last.state in (WorkerHeartbeat.STATE_INACTIVE, WorkerHeartbeat.STATE_STOPPING)


def test_transitions_a_hundred_times_and_invalid_ones(detector) -> None:
    node = detector(autostart=False)
    assert not node.change(T.TRANSITION_ACTIVATE)
    assert not node.change(99)
    for _ in range(2):
        assert node.change(T.TRANSITION_CONFIGURE)
        assert not node.change(T.TRANSITION_CONFIGURE)
        assert node.change(T.TRANSITION_CLEANUP)
        assert node.workers() == []
    assert node.change(T.TRANSITION_CONFIGURE)
    (worker,) = node.workers()
    for turn in range(100):
        assert node.change(T.TRANSITION_ACTIVATE)
        assert node.change(T.TRANSITION_DEACTIVATE)
        if turn == 50:  # by then every buffer has been used once
            before = footprint(node.process.pid), footprint(worker)
    after = footprint(node.process.pid), footprint(worker)
    for (threads, kib), (threads_before, kib_before) in zip(after, before):
        assert threads == threads_before
        assert kib - kib_before < 1024
    assert node.workers() == [worker]
    assert node.change(T.TRANSITION_ACTIVATE)
    node.spin_until(lambda: node.timing and node.beats[-1].activation_count == 101)
    assert node.change(T.TRANSITION_ACTIVE_SHUTDOWN)
    node.spin_until(lambda: node.process.poll() is not None)
    assert node.process.returncode == 0
    assert "Traceback" not in node.log.read_text()


def footprint(pid: int) -> tuple[int, int]:
    """Threads and resident KiB of a process."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(fields["Threads"]), int(fields["VmRSS"].split()[0])


def test_an_inactive_node_is_silent(detector) -> None:
    node = detector()
    node.spin_until(lambda: len(node.timing) >= 5)
    assert node.change(T.TRANSITION_DEACTIVATE)
    node.spin_until(lambda: node.beats[-1].state == WorkerHeartbeat.STATE_INACTIVE)
    node.spin_for(0.3)
    before = len(node.timing), len(node.detections), len(node.beats)
    reports = len(node.diagnostics)
    node.spin_until(lambda: len(node.diagnostics) >= reports + 2)
    assert (len(node.timing), len(node.detections), len(node.beats)) == before
    assert node.status("worker").values[0].value == "inactive"


def test_a_runtime_parameter_counts_from_the_next_frame_on(detector) -> None:
    node = detector()
    node.spin_until(lambda: len(node.timing) >= 3)
    assert node.set("deadline_ms", 70) == ""
    node.spin_until(lambda: node.timing[-1].budget_ns == 70_000_000)
    assert node.set("max_det", 1) == ""
    node.spin_until(lambda: node.timing[-1].detection_count == 1)
    assert node.set("max_det", 100) == ""
    node.spin_until(lambda: node.timing[-1].detection_count > 1)
    assert "max_det above 100 takes effect at configure" in node.set("max_det", 200)
    assert "deadline_ms" in node.set("deadline_ms", 0.0)
    assert "source_uri takes effect at configure" in node.set("source_uri", "elsewhere")
    assert "autostart" in node.set("autostart", False)
    assert node.set("frame_skip", True) == ""
    assert node.process.poll() is None


def test_a_killed_worker_is_replaced_and_said(detector) -> None:
    node = detector()
    node.spin_until(lambda: len(node.timing) >= 3)
    (worker,) = node.workers()
    session = node.beats[-1].session_id
    os.kill(worker, signal.SIGKILL)
    node.spin_until(lambda: node.beats[-1].session_id != session)
    node.spin_until(lambda: node.timing[-1].session_id == node.beats[-1].session_id)
    assert node.beats[-1].activation_count == 1
    node.spin_until(lambda: "restarted 1 times" in node.status("worker").message)
    log = node.log.read_text()
    assert f"worker {worker} was ended by signal 9 (noticed at " in log
    assert "active again: no permit until reset" in log


def test_a_stopped_worker_is_replaced(detector) -> None:
    node = detector()
    node.spin_until(lambda: len(node.timing) >= 3)
    (worker,) = node.workers()
    os.kill(worker, signal.SIGSTOP)
    node.spin_until(lambda: "gave no sign of life for" in node.log.read_text())
    assert gone(worker)
    node.spin_until(lambda: node.workers() not in ([], [worker]))


def test_a_killed_node_takes_its_worker_with_it(detector) -> None:
    node = detector()
    node.spin_until(lambda: len(node.timing) >= 3)
    (worker,) = node.workers()
    node.process.kill()
    node.spin_until(lambda: gone(worker), 5.0)


def test_a_stop_while_getting_ready_is_a_clean_end(detector) -> None:
    node = detector(warmup_runs=10_000)
    node.spin_until(node.workers)
    (worker,) = node.workers()
    node.process.send_signal(signal.SIGTERM)
    node.spin_until(lambda: node.process.poll() is not None, 10.0)
    assert node.process.returncode == 0
    assert gone(worker)
    assert "error:" not in node.log.read_text()


def test_a_subscriber_with_other_qos_is_named(detector) -> None:
    node = detector()
    qos = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    node.node.create_subscription(Detection2DArray, "/left/eye/detections", print, qos)
    node.spin_until(lambda: node.status("qos") is not None and node.status("qos").values)
    (pair,) = node.status("qos").values
    assert pair.value.startswith("/client on /left/eye/detections: ")
    assert "incompatible QoS" in node.log.read_text()


def test_images_of_a_topic_keep_their_header(detector) -> None:
    node = detector(source="topic", source_uri="/camera/image", deadline_ms=1000.0)
    images = node.node.create_publisher(
        Image, "/camera/image", QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
    )
    node.spin_until(lambda: node.beats and node.beats[-1].state == WorkerHeartbeat.STATE_ACTIVE)
    node.spin_until(images.get_subscription_count)
    message = Image(height=48, width=64, encoding="bgr8", step=200)
    message.header.frame_id = "left_camera"
    message.header.stamp.sec, message.header.stamp.nanosec = 1_700_000_000, 123_456_789
    message.data.frombytes(np.full((48, 200), 30, np.uint8).tobytes())

    def answered() -> bool:
        images.publish(message)
        return bool(node.detections)

    node.spin_until(answered)
    node.spin_until(lambda: node.timing)
    assert node.detections[-1].header == message.header
    assert node.timing[-1].stamp_source == FrameTiming.STAMP_RECEIPT
    # A frame that cannot be decoded is a miss with a reason; the node lives on.
    message.step = 10
    node.spin_until(lambda: (images.publish(message), node.timing[-1].outcome == 6)[1])
    assert "step" in node.timing[-1].reason
    message.step = 200
    node.detections.clear()
    node.spin_until(answered)


def run(domain: int, *arguments: str, timeout_s: float = 60.0) -> tuple[int, str]:
    """Exit status and standard error of a detector node with these arguments."""
    command = [sys.executable, "-m", "perception_rt.ros.detector_node", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-p", "deadline_ms:=0"], 64, "deadline_ms must lie between 1 and 60000, got 0"),
        (["-p", "deadline_ms:=-5.0"], 64, "got -5"),
        (["-p", "deadline_ms:=soon"], 64, "deadline_ms must be a number, got 'soon'"),
        (["-p", "sorce:=bag"], 64, "'sorce' (nearest: source"),
        (["--params-file", "none.yaml"], 64, "none.yaml"),
        (["-p", "source:=bag", "-p", "source_uri:=/no/such/bag"], 65, "/no/such/bag"),
        (
            ["-p", "source:=topic", "-p", "source_uri:='bad topic'"],
            64,
            "'bad topic' is no topic name",
        ),
        (["-p", "model_path:=/no/such/model"], 65, "/no/such/model"),
        (["--no-such-flag"], 64, "ROS arguments cannot be used"),
    ],
)
def test_bad_input_is_one_line(domain: int, arguments: list[str], code: int, words: str) -> None:
    status, text = run(domain, "--ros-args", *arguments)
    assert status == code
    assert text.startswith("error: ")
    assert words in text
    assert text.count("\n") == 1, text


def test_arguments_that_nobody_reads_are_refused(domain: int) -> None:
    status, text = run(domain, "deadline_ms:=300")
    assert status == 64
    assert text == (
        "error: unexpected argument 'deadline_ms:=300': "
        "parameters are given as --ros-args -p name:=value\n"
    )
