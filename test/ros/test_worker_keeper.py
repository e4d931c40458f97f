"""The keeper against a scripted worker and a clock that is moved by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")

from perception_rt.core.clock import ManualClock
from perception_rt.core.config import GpuOptions, SourceConfig, WorkerConfig
from perception_rt.core.errors import InputError, UnavailableError
from perception_rt.ros.worker_keeper import BACKOFF_NS, MAX_RESTARTS, Phase, WorkerKeeper
from perception_rt.runtime.shared_state import WorkerState

MS = 1_000_000
CONFIG = WorkerConfig("model", SourceConfig("bag", "x"), budget_ns=100 * MS, warmup_runs=50)


class State:
    def __init__(self) -> None:
        self.worker_state = int(WorkerState.STARTING)
        self.active = 0
        self.stop = 0
        self.heartbeat_ns = 0
        self.capture_count = 0
        self.warmup_done = self.warmup_total = 0
        self.message = ""


class FakeWorker:
    """A worker that does what the test tells it."""

    def __init__(self, world: World, config: WorkerConfig, pid: int) -> None:
        self.world = world
        self.config = config
        self.pid = pid
        self.state = State()
        self.code: int | None = None
        self.calls: list[Any] = []

    def start(self) -> None:
        self.calls.append("start")
        if self.world.refuse:
            raise UnavailableError("no memory")

    def wait_ready(self, timeout_s: float, progress: Any) -> None:
        self.calls.append("wait")
        self.ready_limit_s = timeout_s
        progress(0, 50)
        if self.world.broken:
            raise InputError("no such bag")
        self.ready()

    def ready(self) -> None:
        self.state.worker_state = int(WorkerState.INACTIVE)
        self.beat()

    def beat(self) -> None:
        self.state.heartbeat_ns = self.world.clock.now()
        self.state.capture_count += not self.world.stuck

    def activate(self, count: int) -> None:
        self.calls.append(("activate", count))
        self.state.active = 1
        self.state.worker_state = int(WorkerState.ACTIVE)

    def deactivate(self) -> None:
        if self.world.deaf:
            raise UnavailableError("did not become inactive within 3 s")
        self.calls.append("deactivate")
        self.state.worker_state = int(WorkerState.INACTIVE)

    def set_runtime(self, **values: Any) -> None:
        self.calls.append(("set", values))

    def poll(self) -> int | None:
        return self.code

    def stop(self, timeout_s: float) -> int:
        self.calls.append(("stop", timeout_s))
        return 0

    def close(self) -> None:
        self.calls.append("close")


class World:
    """A keeper with its clock, its log and the workers it started."""

    def __init__(self, config: WorkerConfig = CONFIG) -> None:
        self.clock = ManualClock(1_000 * MS)
        self.workers: list[FakeWorker] = []
        self.log: list[tuple[str, str]] = []
        self.refuse = self.broken = self.deaf = self.stuck = False
        self.keeper = WorkerKeeper(config, self, self.spawn, self.clock.now)  # type: ignore[arg-type]

    def spawn(self, config: WorkerConfig) -> FakeWorker:
        self.workers.append(FakeWorker(self, config, 100 + len(self.workers)))
        return self.workers[-1]

    def info(self, message: str) -> None:
        self.log.append(("info", message))

    def warning(self, message: str) -> None:
        self.log.append(("warning", message))

    def error(self, message: str) -> None:
        self.log.append(("error", message))

    def running(self, active: bool = True) -> FakeWorker:
        self.keeper.start(lambda done, total: None)
        if active:
            self.keeper.activate(1)
        return self.workers[-1]

    def pass_time(self, ms: int, beating: bool = True) -> None:
        """``ms`` milliseconds in steps of the node's supervision timer."""
        for _ in range(ms // 50):
            self.clock.advance(50 * MS)
            worker = self.workers[-1]
            if beating and worker.code is None:
                worker.beat()
            self.keeper.check()


@pytest.fixture
def world() -> World:
    return World()


def test_a_worker_that_cannot_start_speaks_for_itself(world: World) -> None:
    world.broken = True
    with pytest.raises(InputError, match="no such bag"):
        world.running()
    assert world.workers[0].calls == ["start", "wait", ("stop", 0.0), "close"]
    assert world.keeper.process is None


def test_a_stop_while_getting_ready_ends_the_worker(world: World) -> None:
    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.keeper.start(interrupt)
    assert world.workers[0].calls[-2:] == [("stop", 0.0), "close"]


def test_a_killed_worker_is_noticed_restarted_and_activated_again(world: World) -> None:
    worker = world.running()
    world.pass_time(1000)
    worker.code = -9
    world.pass_time(50)
    assert world.keeper.phase is Phase.WAITING
    severity, words = world.log[-1]
    assert severity == "error"
    assert words == (
        "worker 100 was ended by signal 9 (noticed at 2050000000 ns); "
        "starting another one in 0.5 s"
    )
    assert worker.calls[-1] == "close"
    world.pass_time(450)
    assert len(world.workers) == 1
    world.pass_time(50)
    assert len(world.workers) == 2
    assert world.keeper.phase is Phase.STARTING
    world.pass_time(3000)
    assert world.keeper.phase is Phase.STARTING
    world.workers[1].ready()
    world.pass_time(50)
    assert world.keeper.phase is Phase.RUNNING
    assert ("activate", 1) in world.workers[1].calls
    assert world.log[-1][1].endswith("active again: no permit until reset")
    assert world.keeper.restarts == 1


def test_a_worker_restarted_while_inactive_stays_inactive(world: World) -> None:
    worker = world.running(active=False)
    worker.code = 0
    world.pass_time(600)
    world.workers[1].ready()
    world.pass_time(50)
    assert world.keeper.phase is Phase.RUNNING
    assert world.workers[1].state.worker_state == WorkerState.INACTIVE


def test_the_words_of_a_failed_worker_are_passed_on(world: World) -> None:
    worker = world.running()
    worker.state.worker_state = int(WorkerState.FAILED)
    worker.state.message = "the bag is gone"
    worker.code = 65
    world.pass_time(50)
    assert world.keeper.last_end == "worker 100 ended: the bag is gone"


def test_a_silent_worker_is_killed(world: World) -> None:
    world.running()
    world.pass_time(200, beating=False)
    assert world.keeper.phase is Phase.RUNNING
    world.pass_time(50, beating=False)
    assert world.keeper.phase is Phase.WAITING
    assert world.workers[0].calls[-2:] == [("stop", 0.0), "close"]
    assert "gave no sign of life for 250 ms: killed" in world.log[-1][1]


def test_a_node_that_was_stopped_itself_blames_nobody_at_once(world: World) -> None:
    worker = world.running()
    world.clock.advance(2_000 * MS)
    world.keeper.check()
    assert world.keeper.phase is Phase.RUNNING
    worker.beat()
    world.pass_time(500)
    assert world.keeper.phase is Phase.RUNNING
    world.clock.advance(2_000 * MS)
    world.keeper.check()
    world.pass_time(50, beating=False)
    assert world.keeper.phase is Phase.WAITING


def test_back_off_grows_and_ends(world: World) -> None:
    world.running().code = -11
    delays = []
    while world.keeper.phase is not Phase.GIVEN_UP:
        world.pass_time(50)
        if world.keeper.phase is Phase.WAITING:
            began = world.clock.now()
            while world.keeper.phase is Phase.WAITING:
                world.pass_time(50)
            delays.append(world.clock.now() - began)
            world.workers[-1].code = 70
    assert delays == [500 * MS, 1000 * MS, 2000 * MS, 4000 * MS, 4000 * MS]
    assert len(world.workers) == 1 + MAX_RESTARTS
    assert "given up after 5 restarts in 60 s" in world.log[-1][1]
    before = len(world.workers)
    world.pass_time(10_000)
    assert len(world.workers) == before
    with pytest.raises(UnavailableError, match="given up"):
        world.keeper.activate(2)


def test_rare_ends_are_restarted_for_ever(world: World) -> None:
    world.running()
    for _ in range(12):
        world.workers[-1].code = -9
        world.pass_time(2600)
        world.workers[-1].ready()
        world.pass_time(20_000)
        assert world.keeper.phase is Phase.RUNNING
    assert world.keeper.restarts == 12


def test_building_engines_gets_its_time_at_configure_alone(world: World) -> None:
    assert world.running().ready_limit_s == 110.0
    building = dataclasses.replace(CONFIG, gpu=GpuOptions(build_on_configure=True))
    patient = World(building)
    assert patient.running().ready_limit_s == 3710.0
    assert patient.keeper.ready_timeout_s == 110.0


def test_a_worker_that_never_gets_ready_is_replaced(world: World) -> None:
    world.running().code = -9
    world.pass_time(550)
    world.pass_time(int(world.keeper.ready_timeout_s * 1000))
    assert world.keeper.phase is Phase.STARTING
    world.pass_time(100)
    assert world.keeper.phase is Phase.WAITING
    assert "was not ready within 110 s" in world.keeper.last_end


def test_a_worker_that_cannot_be_spawned_again_counts_as_a_restart(world: World) -> None:
    world.running().code = -9
    world.refuse = True
    world.pass_time(20_000)
    assert world.keeper.phase is Phase.GIVEN_UP
    assert world.keeper.last_end == "no memory"


def test_a_worker_that_does_not_deactivate_is_replaced(world: World) -> None:
    worker = world.running()
    world.deaf = True
    world.keeper.deactivate()
    assert world.keeper.phase is Phase.WAITING
    assert ("stop", 0.0) in worker.calls
    world.pass_time(600)
    world.workers[1].ready()
    world.pass_time(50)
    assert world.workers[1].state.worker_state == WorkerState.INACTIVE


def test_a_refused_activation_leaves_no_wish_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = world.running(active=False)
    monkeypatch.setattr("perception_rt.ros.worker_keeper.ACTIVATE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(type(worker), "activate", lambda *_: None)  # it does not follow
    with pytest.raises(UnavailableError, match="did not become active"):
        world.keeper.activate(1)
    assert worker.state.active == 0
    worker.code = -9
    world.pass_time(600)
    world.workers[1].ready()
    world.pass_time(50)
    assert world.workers[1].state.worker_state == WorkerState.INACTIVE


def test_activation_waits_for_a_worker(world: World) -> None:
    world.running(active=False).code = -9
    world.pass_time(50)
    with pytest.raises(UnavailableError, match="no worker is running, waiting to start again"):
        world.keeper.activate(1)
    world.pass_time(500)
    with pytest.raises(UnavailableError, match="the worker is starting again"):
        world.keeper.activate(1)


def test_awaiting_a_restart_ends_with_a_worker_that_can_be_activated(world: World) -> None:
    first = world.running()
    world.keeper.deactivate()
    first.code = -9  # not noticed yet

    def progress(_done: int, _total: int) -> None:
        world.clock.advance(50 * MS)
        if world.keeper.phase is Phase.STARTING:
            world.workers[-1].ready()

    world.keeper.await_restart(progress)
    assert world.keeper.phase is Phase.RUNNING
    world.keeper.activate(2)
    assert world.workers[1].calls[-1] == ("activate", 2)


def test_a_stop_ends_the_wait_for_a_restart(world: World) -> None:
    world.running().code = -9

    def interrupt(_done: int, _total: int) -> None:
        raise UnavailableError("stopped")

    with pytest.raises(UnavailableError, match="stopped"):
        world.keeper.await_restart(interrupt)


def test_a_worker_lost_while_active_comes_back_under_the_new_activation(world: World) -> None:
    world.running().code = -9
    world.pass_time(50)
    world.keeper.deactivate()
    world.pass_time(600)
    worker = world.workers[1]
    worker.ready()
    world.pass_time(50)
    assert worker.state.worker_state == WorkerState.INACTIVE
    world.keeper.activate(2)
    assert [call for call in worker.calls if "activate" in call[0]] == [("activate", 2)]


def test_a_capture_thread_that_stands_still_ends_an_active_worker(world: World) -> None:
    world.running(active=False)
    world.stuck = True
    world.pass_time(5000)
    world.keeper.activate(1)
    world.pass_time(2000)
    assert world.keeper.phase is Phase.RUNNING
    world.pass_time(100)
    assert world.keeper.phase is Phase.WAITING
    assert world.keeper.last_end == (
        "the capture thread of worker 100 stands still for more than 2 s: killed"
    )


def test_a_worker_that_ends_by_itself_may_take_a_while_but_not_for_ever(world: World) -> None:
    worker = world.running()
    world.pass_time(1000)
    worker.state.stop = 1
    world.pass_time(2000, beating=False)
    assert world.keeper.phase is Phase.RUNNING
    world.pass_time(100, beating=False)
    assert world.keeper.phase is Phase.WAITING
    assert world.keeper.last_end == (
        "worker 100 lost a thread and has not ended for more than 2 s: killed"
    )


def test_changed_settings_outlive_a_worker_and_its_buffers_do_not_shrink(world: World) -> None:
    worker = world.running()
    world.keeper.set_runtime(max_det=10, budget_ns=5 * MS)
    world.keeper.set_runtime(budget_ns=6 * MS)
    assert worker.calls[-2:] == [
        ("set", {"max_det": 10, "budget_ns": 5 * MS}),
        ("set", {"budget_ns": 6 * MS}),
    ]
    worker.code = -9
    world.pass_time(600)
    assert world.workers[1].config == CONFIG
    assert world.workers[1].calls[1] == ("set", {"max_det": 10, "budget_ns": 6 * MS})
    assert world.keeper.max_det == 100


def test_stop_ends_the_worker_for_good(world: World) -> None:
    worker = world.running()
    world.keeper.stop()
    assert worker.calls[-2:] == [("stop", 3.0), "close"]
    world.pass_time(5000)
    assert len(world.workers) == 1


@given(
    st.lists(
        st.sampled_from(["die", "ready", "silent", "wait", "wait long", "deactivate", "activate"]),
        max_size=60,
    )
)
def test_never_two_workers_and_never_more_restarts_than_allowed(steps: list[str]) -> None:
    world = World()
    world.running()
    spawned: list[int] = []
    for step in steps:
        worker = world.workers[-1]
        if step == "die":
            worker.code = -9
        elif step == "ready" and world.keeper.phase is Phase.STARTING:
            worker.ready()
        elif step == "deactivate":
            world.keeper.deactivate()
        elif step == "activate" and world.keeper.phase is Phase.RUNNING and worker.code is None:
            world.keeper.activate(2)
        count = len(world.workers)
        world.pass_time({"silent": 300, "wait long": 5000}.get(step, 100), step != "silent")
        spawned += [world.clock.now()] * (len(world.workers) - count)
        assert all("close" in old.calls for old in world.workers[:-1])
        recent = [at for at in spawned if world.clock.now() - at <= 60_000 * MS]
        # The time of a restart is known here to one step.
        assert len(recent) <= MAX_RESTARTS + 1
    assert max(BACKOFF_NS) == 4_000 * MS
