"""The watchdog's loop on a clock of its own, and its node against real messages and a real
socket.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")

import rclpy
from perception_rt_msgs.msg import FrameTiming, SafetyStatus, SupervisionStatus, WorkerHeartbeat
from rclpy.qos import QoSProfile, ReliabilityPolicy

from perception_rt.core.errors import UsageError
from perception_rt.ros.watchdog_node import WatchdogNode, run_cycles
from perception_rt.safety.e2e import DEFAULT_DATA_ID, Checker, E2EStatus
from perception_rt.safety.pdu import AGE_UNKNOWN_US, SafetyPdu
from perception_rt.safety.transports import UdpReceiver

PERIOD = 20
RELIABLE = QoSProfile(depth=64, reliability=ReliabilityPolicy.RELIABLE)


def play(delays: list[int]) -> list[tuple[int, int]]:
    """Run cycles that take ``delays``; returns (instant, lateness) of each."""
    clock = [1000]
    seen: list[tuple[int, int]] = []

    def sleep(seconds: float) -> None:
        clock[0] += round(seconds * 1e9)

    def cycle(now_ns: int, lateness_ns: int) -> None:
        seen.append((now_ns, lateness_ns))
        clock[0] += delays[len(seen) - 1]

    run_cycles(cycle, PERIOD, lambda: len(seen) == len(delays), lambda: clock[0], sleep)
    return seen


def test_cycles_keep_their_schedule() -> None:
    assert play([0, 5, 19, 0]) == [(1020, 0), (1040, 0), (1060, 0), (1080, 0)]


def test_overslept_periods_are_skipped_and_never_caught_up() -> None:
    assert play([50, 0, 0]) == [(1020, 0), (1070, 30), (1080, 0)]
    assert play([20, 0]) == [(1020, 0), (1040, 0)]
    assert play([2000, 0, 0]) == [(1020, 0), (3020, 1980), (3040, 0)]


@given(st.lists(st.integers(0, 200), min_size=1, max_size=50))
def test_cycles_stay_on_the_grid_of_the_first(delays: list[int]) -> None:
    for now_ns, lateness_ns in play(delays):
        assert lateness_ns >= 0
        assert (now_ns - lateness_ns - 1000) % PERIOD == 0


class Bench:
    """A watchdog, somebody who plays the detector, and a socket that hears the PDUs."""

    def __init__(self, ros: Any, *parameters: str) -> None:
        self.receiver = UdpReceiver("127.0.0.1", 0)
        words = [f"pdu.port:={self.receiver.port}", *parameters]
        ros(*[word for p in words for word in ("-p", p)])
        self.watchdog = WatchdogNode()
        self.detector = rclpy.create_node("detector")
        make = self.detector.create_publisher
        self.beats = make(WorkerHeartbeat, "/detector/heartbeat", RELIABLE)
        self.frames = make(FrameTiming, "/detector/frame_timing", RELIABLE)
        self.status: list[SupervisionStatus] = []
        self.safety: list[SafetyStatus] = []
        hear = self.detector.create_subscription
        hear(SupervisionStatus, "/watchdog/status", self.status.append, 10)
        hear(SafetyStatus, "/watchdog/safety_status", self.safety.append, 10)
        self.checker = Checker(DEFAULT_DATA_ID)
        self.sequence = 0
        wait_until(
            lambda: (
                self.beats.get_subscription_count()
                and self.frames.get_subscription_count()
                and self.watchdog.count_subscribers("/watchdog/status")
                and self.watchdog.count_subscribers("/watchdog/safety_status")
            )
        )

    def beat(self, state: int = WorkerHeartbeat.STATE_ACTIVE, **fields: Any) -> None:
        self.sequence += 1
        n = self.sequence
        counts = {"capture_count": n, "deadline_count": n, "inference_count": n}
        message = WorkerHeartbeat(
            session_id=5,
            node_session_id=6,
            activation_count=1,
            state=state,
            sequence=n,
            stamp_source=WorkerHeartbeat.STAMP_SIMULATED,
            **counts,
        )
        for name, value in fields.items():
            setattr(message, name, value)
        self.beats.publish(message)
        self._arrived(self.watchdog._beats)

    def frame(self, frame_id: int, outcome: int = FrameTiming.OUTCOME_OK) -> None:
        now = time.monotonic_ns()
        self.frames.publish(
            FrameTiming(
                session_id=5,
                frame_id=frame_id,
                outcome=outcome,
                exit_head=2 if outcome <= FrameTiming.OUTCOME_OVERRUN else -1,
                capture_stamp_ns=now - 50_000_000,
                deadline_ns=now + 50_000_000,
                left_ns=now if outcome <= FrameTiming.OUTCOME_OVERRUN else 0,
            )
        )
        self._arrived(self.watchdog._frames)

    def cycle(self, lateness_ns: int = 0) -> SafetyPdu:
        """One cycle; the PDU that it sent."""
        self.watchdog.cycle(time.monotonic_ns(), lateness_ns)
        assert self.receiver.wait(5_000_000_000)
        datagram = self.receiver.receive()
        assert datagram is not None
        checked = self.checker.check(datagram)
        # A receiver that starts at the sender's counter 0 holds it for the first of a sequence.
        assert checked.status is E2EStatus.OK
        assert self.receiver.receive() is None
        return SafetyPdu.decode(checked.payload)

    def _arrived(self, subscription: Any) -> None:
        executor_free_wait(self.watchdog, subscription)

    def close(self) -> None:
        self.watchdog.close()
        self.watchdog.destroy_node()
        self.detector.destroy_node()
        self.receiver.close()


def executor_free_wait(node: Any, subscription: Any) -> None:
    """Wait until a message lies in ``subscription`` without taking it."""
    from rclpy.impl.implementation_singleton import rclpy_implementation as _rclpy

    wait_set = _rclpy.WaitSet(1, 0, 0, 0, 0, 0, node.context.handle)
    wait_set.clear_entities()
    wait_set.add_subscription(subscription.handle)
    wait_set.wait(5_000_000_000)
    assert wait_set.get_ready_entities("subscription"), "the message did not arrive"


def wait_until(condition: Any, timeout_s: float = 20.0) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "did not happen in time"
        time.sleep(0.002)


@pytest.fixture
def bench(ros):
    made: list[Bench] = []

    def make(*parameters: str) -> Bench:
        made.append(Bench(ros, *parameters))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_silence_of_a_detector_that_never_came_is_said_in_every_cycle(bench) -> None:
    watch = bench()
    for _ in range(3):
        pdu = watch.cycle()
        assert pdu.state == 0
        assert not pdu.permit
        assert not pdu.simulated_source
        assert pdu.last_met_age_us == AGE_UNKNOWN_US


def test_degraded_is_a_flag_of_the_pdu_a_cause_of_the_status_and_no_fault(bench) -> None:
    watch = bench()
    watch.beat(degraded=True)
    watch.frame(1)
    pdu = watch.cycle()
    assert (pdu.state, pdu.permit, pdu.degraded, pdu.causes) == (1, True, True, 0)
    watch.beat(degraded=False)
    pdu = watch.cycle()
    assert (pdu.state, pdu.permit, pdu.degraded, pdu.causes) == (1, True, False, 0)
    wait_until(lambda: rclpy.spin_once(watch.detector, timeout_sec=0.1) or len(watch.status) >= 2)
    wait_until(lambda: rclpy.spin_once(watch.detector, timeout_sec=0.1) or watch.safety)
    assert [status.causes for status in watch.status[:2]] == [SupervisionStatus.CAUSE_DEGRADED, 0]
    assert watch.status[0].reason == "the detector runs on its fallback backend"
    assert watch.safety[0].degraded


def test_permit_from_the_first_met_frame_on(bench) -> None:
    watch = bench()
    watch.beat()
    pdu = watch.cycle()
    assert (pdu.state, pdu.permit) == (1, False)
    watch.beat()
    watch.frame(1)
    pdu = watch.cycle()
    assert (pdu.state, pdu.causes, pdu.permit) == (1, 0, True)
    assert pdu.simulated_source
    assert pdu.session_id == 5
    assert pdu.last_frame_id == 1
    assert 50_000 <= pdu.last_met_age_us < 10_000_000


def test_misses_take_the_permit_and_are_counted(bench) -> None:
    watch = bench()
    for frame_id in range(1, 4):
        watch.frame(frame_id, FrameTiming.OUTCOME_LATE)
    watch.beat(outcome_totals=[0, 0, 0, 3, 0, 0, 0])
    pdu = watch.cycle()
    assert (pdu.state, pdu.causes, pdu.permit) == (3, 2, False)
    assert pdu.consecutive_misses == pdu.window_misses == pdu.total_misses == 3


def test_lost_heartbeats_lead_to_expired(bench) -> None:
    watch = bench("supervision.lost_heartbeats:=2")
    watch.beat()
    watch.frame(1)
    assert watch.cycle().permit
    wait_until(lambda: not watch.cycle().permit)
    watch.beat()
    watch.frame(2)
    pdu = watch.cycle()
    assert (pdu.state, pdu.permit) == (3, False)


def test_own_lateness_is_named_and_blames_nobody(bench) -> None:
    watch = bench()
    watch.beat()
    watch.frame(1)
    assert watch.cycle().permit
    pdu = watch.cycle(lateness_ns=2_000_000_000)
    assert (pdu.state, pdu.causes, pdu.permit) == (4, 16, False)
    watch.beat()
    watch.frame(2)
    assert watch.cycle().state == 1


def test_status_is_published_every_cycle_and_safety_status_now_and_then(bench) -> None:
    watch = bench()
    for _ in range(3):
        watch.cycle()
    executor = rclpy.executors.SingleThreadedExecutor()
    executor.add_node(watch.detector)
    limit = time.monotonic() + 20
    while len(watch.status) < 3 or not watch.safety:
        assert time.monotonic() < limit
        executor.spin_once(timeout_sec=0.1)
    executor.shutdown()
    assert [s.sequence for s in watch.status] == [1, 2, 3]
    assert watch.status[0].state == SupervisionStatus.STATE_DEACTIVATED
    assert len(watch.safety) == 1
    assert watch.safety[0].data_id == DEFAULT_DATA_ID
    assert watch.safety[0].sent_pdus == 1
    assert watch.safety[0].counter == 0


def test_the_detector_s_name_can_be_chosen(ros) -> None:
    ros("-r", "__ns:=/left", "-p", "detector:=eye")
    watchdog = WatchdogNode()
    names = {subscription.topic_name for subscription in watchdog.subscriptions}
    assert {"/left/eye/heartbeat", "/left/eye/frame_timing"} <= names
    watchdog.close()
    watchdog.destroy_node()


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        ("pdu.prot:=1", "'pdu.prot' \\(nearest: pdu.port"),
        ("pdu.port:=0", "pdu.port must lie between 1 and 65535"),
        ("supervision.window_failed:=10", "window_failed <= window_expired"),
    ],
)
def test_parameters_that_cannot_be_used(ros, parameter: str, words: str) -> None:
    ros("-p", parameter)
    with pytest.raises(UsageError, match=words):
        WatchdogNode()
