"""Asks a lifecycle node for transitions, from outside: for ``reset`` and for the demo."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import rclpy
from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.exceptions import InvalidServiceNameException
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from perception_rt.core.errors import UnavailableError, UsageError

CONFIGURE = Transition.TRANSITION_CONFIGURE
ACTIVATE = Transition.TRANSITION_ACTIVATE
DEACTIVATE = Transition.TRANSITION_DEACTIVATE

_NAMES = {CONFIGURE: "configure", ACTIVATE: "activate", DEACTIVATE: "deactivate"}
_STEPS = {
    "active": (DEACTIVATE, ACTIVATE),
    "inactive": (ACTIVATE,),
    "unconfigured": (CONFIGURE, ACTIVATE),
}
_SLICE_S = 0.1
_PRESENT_S = 10.0
"""How long a node that is running may take to be discovered."""


class LifecycleClient:
    """Calls the lifecycle services of one node.

    Args:
        node: makes the calls; spun here while an answer is awaited, by nobody else.
        target: fully qualified name of the lifecycle node.
        check: called while waiting; may raise to give up.

    Raises:
        UsageError: ``target`` cannot be a name.
    """

    def __init__(self, node: Node, target: str, check: Callable[[], None] = lambda: None) -> None:
        self._node = node
        self._target = target
        self._check = check
        try:
            if not target:
                raise ValueError("empty")
            self._change = node.create_client(ChangeState, f"{target}/change_state")
            self._get = node.create_client(GetState, f"{target}/get_state")
        except (InvalidServiceNameException, ValueError) as error:
            raise UsageError(
                f"'{target}' is no node name: give one like /detector or /left/eye"
            ) from error

    def wait(self, timeout_s: float) -> None:
        """Wait until the node is there.

        Raises:
            UnavailableError: it is not, within ``timeout_s`` seconds.
        """
        end = time.monotonic() + timeout_s
        while not (self._change.service_is_ready() and self._get.service_is_ready()):
            if time.monotonic() > end:
                raise UnavailableError(
                    f"no lifecycle node {self._target} within {timeout_s:g} s:"
                    " is it running, under this name and in this ROS_DOMAIN_ID?"
                )
            self._check()
            rclpy.spin_once(self._node, timeout_sec=0.05)

    def change(self, transition: int, timeout_s: float) -> None:
        """Ask for one transition and wait for its end.

        Raises:
            UnavailableError: refused, failed, or no answer within ``timeout_s`` seconds.
        """
        request = ChangeState.Request()
        request.transition.id = transition
        try:
            answer = self._call(self._change, request, timeout_s)
        except UnavailableError as error:
            raise UnavailableError(
                f"{error}; it was asked to {_NAMES[transition]} and may still do so, the permit"
                " may then come back: a new worker takes its warm-up, give it longer"
            ) from error
        if not answer.success:
            raise UnavailableError(
                f"{self._target} refused or failed to {_NAMES[transition]}"
                f" (it is {self.state(timeout_s)}): see its log"
            )

    def state(self, timeout_s: float) -> str:
        """The label of the node's present state, as lifecycle_msgs calls it.

        Raises:
            UnavailableError: no answer within ``timeout_s`` seconds.
        """
        state: State = self._call(self._get, GetState.Request(), timeout_s).current_state
        return str(state.label)

    def _call(
        self, client: rclpy.client.Client, request: object, timeout_s: float
    ) -> ChangeState.Response:
        future = client.call_async(request)
        end = time.monotonic() + timeout_s
        while not future.done() and time.monotonic() < end:
            # In slices: a signal waits for the end of one.
            self._check()
            rclpy.spin_until_future_complete(self._node, future, timeout_sec=_SLICE_S)
        if not future.done():
            client.remove_pending_request(future)
            raise UnavailableError(f"{client.srv_name} gave no answer within {timeout_s:g} s")
        return future.result()


def reset(target: str, timeout_s: float = 60.0) -> Sequence[str]:
    """Deactivate and activate ``target``: the one way out of the watchdog's EXPIRED.

    A node that was deactivated already is activated, one that gave its worker up is configured
    before. It waits for a worker that is being restarted.

    Args:
        target: fully qualified name of the detector node.
        timeout_s: for each step; a worker that starts again takes its warm-up.

    Returns:
        The steps taken, in order.

    Raises:
        UnavailableError: no such node, or it refused.
    """
    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    try:
        node = rclpy.create_node("perception_rt_reset")
        client = LifecycleClient(node, target)
        client.wait(min(timeout_s, _PRESENT_S))
        state = client.state(timeout_s)
        if state not in _STEPS:
            raise UnavailableError(
                f"{target} is {state}: correct what its log names, then start it again"
            )
        for step in _STEPS[state]:
            client.change(step, timeout_s)
        return tuple(_NAMES[step] for step in _STEPS[state])
    finally:
        rclpy.try_shutdown()
