"""The watchdog: judges one detector every 20 ms on its own clock and tells the safety controller,
in every state.

One loop in the main thread, no executor: messages are taken, not called back. Order of a cycle:
take, judge, send the PDU; only then status messages and log lines. Budget of a cycle: 1 ms.
Instants are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from perception_rt_msgs.msg import FrameTiming, SafetyStatus, SupervisionStatus, WorkerHeartbeat
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.subscription import Subscription

from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.config import RealtimeConfig
from perception_rt.core.frame import StampSource
from perception_rt.core.supervision import Cause, State, SupervisionResult, Supervisor
from perception_rt.ros import parameters
from perception_rt.ros.conversions import (
    fill_status,
    frame_facts,
    heartbeat_facts,
    supervision_config,
    total_misses,
)
from perception_rt.ros.middleware import raise_threads, thread_ids
from perception_rt.ros.program import StopRequest, run_node
from perception_rt.ros.worker_main import HEARTBEAT_DEPTH, TIMING_DEPTH
from perception_rt.runtime.realtime import (
    RealtimeSetup,
    choose_watchdog_core,
    isolated_cores,
    reachable_cores,
)
from perception_rt.safety.e2e import Protector
from perception_rt.safety.pdu import AGE_UNKNOWN_US, SafetyPdu
from perception_rt.safety.transports import UdpSender, can_write

SAFETY_STATUS_PERIOD_NS = NS_PER_S
NS_PER_US = 1000


class WatchdogNode(Node):
    """The node ``watchdog``. Parameters are read once, at start.

    Raises:
        UsageError: a parameter that cannot be used.
        UnavailableError: the host of the PDU cannot be resolved.
    """

    def __init__(self) -> None:
        super().__init__(
            "watchdog",
            # Services would never be answered: nothing spins. /rosout could block a cycle.
            enable_rosout=False,
            start_parameter_services=False,
            parameter_overrides=[Parameter("start_type_description_service", value=False)],
            automatically_declare_parameters_from_overrides=True,
        )
        self.values: dict[str, Any] = dict(parameters.declare(self, parameters.WATCHDOG))
        self._config = supervision_config(self.values)
        self._supervisor = Supervisor(self._config)
        self._frame_skip = self.values["supervision.frame_skip"]
        self._sim_time = bool(self.get_parameter("use_sim_time").value)
        self._protector = Protector(self.values["pdu.data_id"])
        self._sender = UdpSender(self.values["pdu.host"], self.values["pdu.port"])
        target = self.values["detector"]
        self._beats = self._subscribe(WorkerHeartbeat, f"{target}/heartbeat", HEARTBEAT_DEPTH)
        self._frames = self._subscribe(FrameTiming, f"{target}/frame_timing", TIMING_DEPTH)
        self._status_publisher = self.create_publisher(SupervisionStatus, "~/status", 10)
        self._safety_publisher = self.create_publisher(SafetyStatus, "~/safety_status", 10)
        self._status = SupervisionStatus()
        self._safety = SafetyStatus(data_id=self.values["pdu.data_id"])
        self._safety_due_ns = 0
        self._sequence = 0
        self._simulated = self._sim_time
        self._total_misses = 0
        self._told = (State.DEACTIVATED, Cause(0), False)

    @property
    def cycle_ns(self) -> int:
        """Period of ``cycle``."""
        return self._config.cycle_ns

    def cycle(self, now_ns: int, lateness_ns: int) -> None:
        """Judge once and send the PDU, then report.

        Args:
            now_ns: when this cycle began.
            lateness_ns: how long after its scheduled instant that was.
        """
        self._take(self._beats, HEARTBEAT_DEPTH, self._on_beat)
        self._take(self._frames, TIMING_DEPTH, self._on_frame)
        result = self._supervisor.cycle(now_ns, lateness_ns)
        sent_ns = self._send(result)
        self._sequence += 1
        fill_status(self._status, now_ns, self._sequence, result)
        self._status_publisher.publish(self._status)
        if sent_ns >= self._safety_due_ns:
            self._safety_due_ns = sent_ns + SAFETY_STATUS_PERIOD_NS
            self._publish_safety_status(sent_ns, result)
        if (result.state, result.causes, result.permit) != self._told:
            self._tell(now_ns, sent_ns, result)

    def close(self) -> None:
        """Stop sending."""
        self._sender.close()

    def _subscribe(self, kind: type, topic: str, depth: int) -> Subscription:
        qos = QoSProfile(depth=depth, reliability=ReliabilityPolicy.RELIABLE)
        return self.create_subscription(kind, topic, lambda _: None, qos)

    def _take(self, subscription: Subscription, most: int, use: Callable[[Any], None]) -> None:
        for _ in range(most):
            taken = subscription.handle.take_message(subscription.msg_type, False)
            if taken is None:
                return
            use(taken[0])

    def _on_beat(self, beat: WorkerHeartbeat) -> None:
        self._supervisor.on_heartbeat(time.monotonic_ns(), heartbeat_facts(beat))
        self._simulated = self._sim_time or beat.stamp_source == StampSource.SIMULATED
        self._total_misses = total_misses(beat, self._frame_skip)

    def _on_frame(self, timing: FrameTiming) -> None:
        self._supervisor.on_frame(time.monotonic_ns(), frame_facts(timing, self._frame_skip))

    def _send(self, result: SupervisionResult) -> int:
        age_ns = result.last_met_age_ns
        sent_ns = time.monotonic_ns()
        payload = SafetyPdu(
            state=int(result.state),
            causes=int(result.causes & ~Cause.DEGRADED),
            permit=result.permit,
            simulated_source=self._simulated,
            session_id=result.worker_session_id,
            sent_ns=sent_ns,
            last_frame_id=result.last_frame_id,
            last_met_age_us=AGE_UNKNOWN_US if age_ns < 0 else age_ns // NS_PER_US,
            consecutive_misses=result.consecutive_misses,
            window_misses=result.window_misses,
            total_misses=self._total_misses,
            degraded=bool(result.causes & Cause.DEGRADED),
        ).encode()
        self._sender.send(self._protector.protect(payload))
        return sent_ns

    def _publish_safety_status(self, sent_ns: int, result: SupervisionResult) -> None:
        safety = self._safety
        safety.stamp_ns = sent_ns
        safety.sent_pdus = self._sender.sent
        safety.send_errors = self._sender.errors
        safety.counter = self._protector.counter
        safety.permit = result.permit
        safety.supervision_state = int(result.state)
        safety.simulated_source = self._simulated
        safety.degraded = bool(result.causes & Cause.DEGRADED)
        self._safety_publisher.publish(safety)

    def _tell(self, now_ns: int, sent_ns: int, result: SupervisionResult) -> None:
        if not can_write(sys.stderr.fileno()):
            # Told later: a reader that has stopped reading must not stop the cycle.
            return
        before, self._told = self._told, (result.state, result.causes, result.permit)
        permit = "permit" if result.permit else "no permit"
        causes = "+".join(cause.name for cause in Cause if cause & result.causes and cause.name)
        line = (
            f"{before[0].name} -> {result.state.name} ({permit}) judged at {now_ns} ns, "
            f"PDU left at {sent_ns} ns"
            f"{', ' if causes else ''}{causes}{': ' if result.reason else ''}{result.reason}"
        )
        if result.state is State.EXPIRED:
            self.get_logger().error(line)
        elif result.state in (State.FAILED, State.SELF_LAG) or result.causes:
            self.get_logger().warning(line)
        else:
            self.get_logger().info(line)


def _take_rights(node: WatchdogNode) -> None:
    values = node.values
    setup = RealtimeSetup(
        RealtimeConfig(enabled=values["realtime.enabled"], required=values["realtime.required"])
    )
    priority = values["realtime.priority"]
    core = values["realtime.core"]
    if core < 0:
        isolated = isolated_cores() if setup.config.enabled else []
        core = choose_watchdog_core(reachable_cores(isolated), isolated)
    setup.apply_to_thread("watchdog", priority, core)
    if setup.config.enabled and priority > 1:
        refused = raise_threads(thread_ids() - {threading.get_native_id()}, priority - 1)
        setup.report.missing += [refused] if refused else []
    setup.lock_memory()
    setup.freeze_gc()
    setup.check()
    for line in setup.report.missing:
        node.get_logger().warning(f"real-time right missing: {line}")


def run_cycles(
    cycle: Callable[[int, int], None],
    period_ns: int,
    stopped: Callable[[], bool],
    now: Callable[[], int] = time.monotonic_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Call ``cycle`` on an absolute schedule; periods that were overslept are skipped, never
    caught up.

    Args:
        cycle: called with (the instant it began, its lateness), nanoseconds.
        period_ns: of the schedule.
        stopped: asked before each cycle.
        now: reads CLOCK_MONOTONIC.
        sleep: sleeps for seconds.
    """
    due_ns = now() + period_ns
    while not stopped():
        ahead_ns = due_ns - now()
        if ahead_ns > 0:
            sleep(ahead_ns / NS_PER_S)
        began_ns = now()
        lateness_ns = max(began_ns - due_ns, 0)
        cycle(began_ns, lateness_ns)
        due_ns += (1 + lateness_ns // period_ns) * period_ns


def _run(node: WatchdogNode, stop: StopRequest) -> int:
    _take_rights(node)
    target = node.resolve_topic_name(node.values["detector"])
    node.get_logger().info(f"watching {target} every {node.cycle_ns // NS_PER_MS} ms")
    try:
        run_cycles(node.cycle, node.cycle_ns, lambda: stop.asked)
    finally:
        node.close()
    return 0


def main() -> int:
    """Run the watchdog until SIGINT or SIGTERM; returns the exit status."""
    # A log file on a busy disk could block a cycle.
    return run_node(WatchdogNode, _run, ("--disable-external-lib-logs",))


if __name__ == "__main__":
    sys.exit(main())
