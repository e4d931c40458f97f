"""Names and steps of the reset, seen by a real lifecycle node without a worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")

import rclpy
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn

from perception_rt.core.errors import UnavailableError, UsageError
from perception_rt.ros.lifecycle_client import reset


class Steps(LifecycleNode):
    """Keeps the transitions that it was asked for."""

    def __init__(self, context: Context) -> None:
        super().__init__("steps", context=context, enable_rosout=False)
        self.taken: list[str] = []

    def _take(self, name: str) -> TransitionCallbackReturn:
        self.taken.append(name)
        return TransitionCallbackReturn.SUCCESS

    def on_configure(self, _state: LifecycleState) -> TransitionCallbackReturn:
        return self._take("configure")

    def on_activate(self, _state: LifecycleState) -> TransitionCallbackReturn:
        return self._take("activate")

    def on_deactivate(self, _state: LifecycleState) -> TransitionCallbackReturn:
        return self._take("deactivate")


@pytest.fixture
def node(domain: int) -> Iterator[Any]:
    context = Context()
    rclpy.init(args=[], context=context, domain_id=domain)
    steps = Steps(context)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(steps)
    thread = threading.Thread(target=executor.spin)
    thread.start()
    yield steps
    executor.shutdown()
    thread.join()
    steps.destroy_node()
    context.try_shutdown()


@pytest.mark.integration
def test_reset_ends_with_an_activation_whatever_the_state(node: Steps) -> None:
    assert reset("/steps") == ("configure", "activate")
    assert reset("/steps") == ("deactivate", "activate")
    node.trigger_deactivate()
    node.taken.clear()
    assert reset("/steps") == ("activate",)
    assert node.taken == ["activate"]
    node.trigger_shutdown()
    with pytest.raises(UnavailableError, match=r"/steps is finalized: .*start it again"):
        reset("/steps")


@pytest.mark.parametrize("name", ["", "/", "bad name", "/a//b", "/1a", "/a/", "{a}/b"])
def test_what_cannot_be_a_name_is_refused(domain: int, name: str) -> None:
    with pytest.raises(UsageError, match="is no node name: give one like /detector") as caught:
        reset(name)
    assert "\n" not in str(caught.value)
