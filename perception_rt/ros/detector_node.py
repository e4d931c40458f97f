"""The detector's lifecycle node: parameters, transitions, diagnostics, and care for its worker
process.

It runs nothing in real time; frames never pass through it. The worker publishes under names
resolved here.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.qos import QoSCompatibility, qos_check_compatible

from perception_rt.core.config import RosConfig
from perception_rt.core.errors import PerceptionRtError, UsageError
from perception_rt.ros import parameters
from perception_rt.ros.conversions import runtime_settings, worker_config
from perception_rt.ros.diagnostics import Diagnostics
from perception_rt.ros.graph import default_model_dir
from perception_rt.ros.program import StopRequest, one_line, run_node
from perception_rt.ros.worker_keeper import Phase, WorkerKeeper
from perception_rt.runtime.shared_state import SharedState

SUPERVISION_PERIOD_S = 0.05
DIAGNOSTICS_PERIOD_S = 1.0
SUCCESS, FAILURE, ERROR = (
    TransitionCallbackReturn.SUCCESS,
    TransitionCallbackReturn.FAILURE,
    TransitionCallbackReturn.ERROR,
)


class _InterruptedError(PerceptionRtError):
    """A stop was asked for while a worker was getting ready."""


class DetectorNode(LifecycleNode):
    """The lifecycle node ``detector``.

    Attributes:
        failure: what the last failed transition failed of; None after a good one.
        finished: the lifecycle has reached its end.

    Raises:
        UsageError: a parameter that cannot be used.
    """

    def __init__(self) -> None:
        super().__init__("detector", automatically_declare_parameters_from_overrides=True)
        self._values: dict[str, Any] = dict(parameters.declare(self, parameters.DETECTOR))
        self.failure: PerceptionRtError | None = None
        self.finished = False
        self.stop = StopRequest()
        self._quiet = False
        self._keeper: WorkerKeeper | None = None
        self._active = False
        self._activation_count = 0
        self._given_up = ""
        self._source_state = 0
        self._backend_fault = ""
        self._frame_fault = ""
        self._alone = True
        self._session_id = secrets.randbits(62) | 1
        self._incompatible: dict[bytes, str] = {}
        self._diagnostics = Diagnostics(self.get_fully_qualified_name())
        self._diagnostics_publisher = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self._topics = {
            name: self.resolve_topic_name(f"~/{name}")
            for name in ("detections", "frame_timing", "heartbeat")
        }
        self._image_topic = self.resolve_topic_name("~/image_raw")
        self.add_on_set_parameters_callback(
            parameters.on_set_callback(
                parameters.DETECTOR, lambda: self._keeper is not None, self._take_parameters
            )
        )
        self._answer_every_request()
        self.create_timer(SUPERVISION_PERIOD_S, self._supervise)
        self.create_timer(DIAGNOSTICS_PERIOD_S, self._report)

    def autostart(self) -> None:
        """Configure and activate.

        Raises:
            PerceptionRtError: why one of them failed.
        """
        self._quiet = True
        try:
            for trigger in (self.trigger_configure, self.trigger_activate):
                if trigger() != SUCCESS:
                    raise self.failure or PerceptionRtError("transition failed: see the log")
        finally:
            self._quiet = False

    # --- transitions -----------------------------------------------------------------------------

    def on_configure(self, _state: LifecycleState) -> TransitionCallbackReturn:
        """Check everything, start the worker, wait until it is ready."""
        return self._attempt("configure", self._configure)

    def on_activate(self, _state: LifecycleState) -> TransitionCallbackReturn:
        """Let frames flow."""
        return self._attempt("activate", self._activate)

    def on_deactivate(self, _state: LifecycleState) -> TransitionCallbackReturn:
        """Stop frames; the worker stays ready."""
        return self._attempt("deactivate", self._deactivate)

    def on_cleanup(self, _state: LifecycleState) -> TransitionCallbackReturn:
        """End the worker."""
        return self._attempt("clean up", self.drop_worker)

    def on_shutdown(self, _state: LifecycleState) -> TransitionCallbackReturn:
        """End the worker; the process ends after this."""
        self.finished = True
        return self._attempt("shut down", self.drop_worker)

    def on_error(self, _state: LifecycleState) -> TransitionCallbackReturn:
        """End the worker after an error inside a transition; the node is unconfigured then."""
        return self._attempt("recover", self.drop_worker)

    def _attempt(self, name: str, step: Callable[[], None]) -> TransitionCallbackReturn:
        """Run a step: rclpy would swallow what it raises."""
        try:
            step()
        except PerceptionRtError as error:
            self.failure = error
            if not self._quiet:
                self.get_logger().error(f"cannot {name}: {one_line(str(error))}")
            return FAILURE
        except Exception as error:  # noqa: BLE001 (a fault of ours must not end the node)
            self.failure = PerceptionRtError(f"cannot {name}: {type(error).__name__}: {error}")
            self.get_logger().error(f"cannot {name}: {traceback.format_exc()}")
            return ERROR
        self.failure = None
        return SUCCESS

    def _configure(self) -> None:
        values = self._values
        uri = values["source_uri"]
        image_topic = self._image_topic
        if values["source"] == "topic" and uri:
            try:
                image_topic = self.resolve_topic_name(uri)
            except RuntimeError as error:  # RCLError, which rclpy does not export
                raise UsageError(
                    f"source_uri '{uri}' is no topic name: give one like /camera/image_raw"
                ) from error
        names = RosConfig(
            node_name=f"{self.get_name()}_worker",
            namespace=self.get_namespace(),
            detections_topic=self._topics["detections"],
            timing_topic=self._topics["frame_timing"],
            heartbeat_topic=self._topics["heartbeat"],
            detections_reliable=values["detections_reliable"],
            detections_depth=values["detections_depth"],
        )
        model_dir = values["model_path"] or str(default_model_dir())
        config = worker_config(values, model_dir, image_topic, names, self._session_id)
        keeper = WorkerKeeper(config, self.get_logger())
        keeper.start(self._check_stop)
        self._given_up = ""
        self._keeper = keeper
        assert keeper.process is not None
        state = keeper.process.state
        chosen = json.loads(state.backend)
        detail = f"; {chosen['detail']}" if chosen["detail"] else ""
        self.get_logger().info(f"backend: {chosen['reason']}{detail}")
        for line in json.loads(state.report or "{}").get("missing", []):
            self.get_logger().warning(f"real-time right missing: {line}")

    def _check_stop(self, _done: int, _total: int) -> None:
        if self.stop.asked:
            raise _InterruptedError("stopped while the worker was getting ready")

    def _activate(self) -> None:
        assert self._keeper is not None
        self._keeper.await_restart(self._check_stop)
        # Counted first: the number of a refused activation is never used again.
        self._activation_count += 1
        self._keeper.activate(self._activation_count)
        self._active = True
        self.get_logger().info(
            f"active at {time.monotonic_ns()} ns, activation {self._activation_count}"
        )

    def _deactivate(self) -> None:
        assert self._keeper is not None
        self._active = False
        self._keeper.deactivate()
        self.get_logger().info(f"inactive at {time.monotonic_ns()} ns")

    def drop_worker(self) -> None:
        """End the worker, if there is one."""
        self._active = False
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.stop()

    def _answer_every_request(self) -> None:
        """An invalid transition must be answered with success false; rclpy lets its exception end
        the node.
        """
        service = self._service_change_state
        change_state = service.callback

        def answer(request: Any, response: Any) -> Any:
            try:
                return change_state(request, response)
            except Exception as error:  # noqa: BLE001 (rclpy has a type for each reason)
                self.get_logger().error(
                    f"transition {request.transition.id} refused: {one_line(str(error))}"
                )
                response.success = False
                return response

        service.callback = answer

    # --- parameters ------------------------------------------------------------------------------

    def _take_parameters(self, values: dict[str, Any]) -> str:
        """Let accepted values count; returns why they cannot, empty when they do."""
        if self._keeper is not None:
            most = self._keeper.max_det
            if values.get("max_det", 0) > most:
                return (
                    f"max_det above {most} takes effect at configure: "
                    "deactivate and clean up the node first"
                )
            settings = runtime_settings(values)
            if settings:
                self._keeper.set_runtime(**settings)
        self._values.update(values)
        return ""

    # --- supervision and diagnostics -------------------------------------------------------------

    def _supervise(self) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        keeper.check()
        if keeper.phase is Phase.GIVEN_UP:
            self._given_up = keeper.last_end
            if self._active:
                self.trigger_deactivate()
            self.trigger_cleanup()
        elif keeper.process is not None:
            self._tell_changes(keeper.process.state)

    def _tell_changes(self, state: SharedState) -> None:
        if state.source_state != self._source_state:
            self._source_state = state.source_state
            names = ("frames arrive", "lost, being reopened", "ended")
            self.get_logger().warning(
                f"source: {names[self._source_state]} at {time.monotonic_ns()} ns"
            )
        if state.backend_fault != self._backend_fault:
            self._backend_fault = state.backend_fault
            what = f"DEGRADED, {self._backend_fault}" if state.degraded else self._backend_fault
            self.get_logger().warning(
                f"backend: {what or 'the primary runs again'} at {time.monotonic_ns()} ns"
            )

    def _report(self) -> None:
        if self._keeper is not None:
            self._check_subscribers()
            self._tell_frame_fault(self._keeper)
        self._check_name()
        lifecycle = (
            "active"
            if self._active
            else ("inactive" if self._keeper is not None else "unconfigured")
        )
        source = self._values["source_uri"] or self._image_topic
        array = DiagnosticArray()
        array.header.stamp = self.get_clock().now().to_msg()
        array.status = self._diagnostics.statuses(
            time.monotonic_ns(),
            lifecycle,
            self._keeper,
            f"{self._values['source']} {source}",
            list(self._incompatible.values()),
            self._given_up,
        )
        self._diagnostics_publisher.publish(array)

    def _tell_frame_fault(self, keeper: WorkerKeeper) -> None:
        fault = keeper.process.state.frame_fault if keeper.process is not None else ""
        if fault and fault != self._frame_fault:
            self.get_logger().warning(f"frames fail: {one_line(fault)}")
        self._frame_fault = fault or self._frame_fault

    def _check_name(self) -> None:
        """Two detectors of one name answer one watchdog and one reset in turn."""
        own = (self.get_name(), self.get_namespace())
        alone = self.get_node_names_and_namespaces().count(own) <= 1
        if self._alone and not alone:
            self.get_logger().error(
                f"another node is called {self.get_fully_qualified_name()}: give one of them"
                " another namespace or ROS_DOMAIN_ID (one that was just killed lingers for 20 s)"
            )
        self._alone = alone

    def _check_subscribers(self) -> None:
        """Find subscribers that the middleware silently leaves without data; event callbacks need
        an executor.
        """
        present: dict[bytes, str] = {}
        for name in ("detections", "frame_timing"):
            topic = self._topics[name]
            # Both sides from endpoint information: it spells out what a profile made here leaves
            # to the default.
            offered = [info.qos_profile for info in self.get_publishers_info_by_topic(topic)]
            for info in self.get_subscriptions_info_by_topic(topic):
                for profile in offered:
                    verdict, reason = qos_check_compatible(profile, info.qos_profile)
                    if verdict == QoSCompatibility.ERROR:
                        who = f"{info.node_namespace.rstrip('/')}/{info.node_name}"
                        present[bytes(info.endpoint_gid)] = f"{who} on {topic}: {one_line(reason)}"
        for gid, text in present.items():
            if gid not in self._incompatible:
                self.get_logger().warning(
                    f"incompatible QoS, this subscriber gets nothing: {text}"
                )
        self._incompatible = present


def _run(node: DetectorNode, stop: StopRequest) -> int:
    node.stop = stop
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        if node.get_parameter("autostart").value:
            try:
                node.autostart()
            except PerceptionRtError:
                if not stop.asked:
                    raise
        while not stop.asked and not node.finished:
            executor.spin_once(timeout_sec=0.1)
        if not node.finished:
            node.trigger_shutdown()
        return 0
    finally:
        # Whatever ends the node, its worker must not be left to the kernel.
        node.drop_worker()
        executor.shutdown()


def main() -> int:
    """Run the node until SIGINT or SIGTERM; returns the exit status."""
    return run_node(DetectorNode, _run)


if __name__ == "__main__":
    sys.exit(main())
