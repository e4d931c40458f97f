"""Random lives of a node, its worker and the watchdog: what must hold after every cycle."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.frame import Outcome
from perception_rt.core.supervision import (
    Cause,
    FrameFacts,
    HeartbeatFacts,
    SourceState,
    State,
    SupervisionConfig,
    Supervisor,
    WorkerState,
)

CYCLE = 20 * NS_PER_MS
LIMITS = SupervisionConfig(grace_ns=200 * NS_PER_MS)
PERMITTED = (State.OK, State.FAILED)


class Life(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.supervisor = Supervisor(LIMITS)
        self.now = 5_000 * NS_PER_MS
        self.session = self.node = 1
        self.activations = 0
        self.worker_state = WorkerState.INACTIVE
        self.sequence = self.counter = self.frame_id = self.epoch = 0
        self.degraded = False
        # what the test itself knows
        self.latched = False
        self.may_leave = False  # an explicit reset was heard since it latched
        self.active_sessions: set[int] = set()
        self.heard_activation = (0, 0)  # the newest: node, count
        self.met_since_activation = False
        self.misses: list[bool] = []
        self.beat_ns = self.blind_ns = -1
        self.result = self.supervisor.cycle(self.now, 0)

    def judge(self, lateness_ns=0):
        self.now += CYCLE + lateness_ns
        before = self.result
        result = self.result = self.supervisor.cycle(self.now, lateness_ns)
        late = lateness_ns > 2 * CYCLE
        if late:
            self.blind_ns = self.now

        assert result.permit <= (result.state in PERMITTED)
        assert result.permit <= self.met_since_activation
        if result.permit:
            assert self.now - self.beat_ns < 3 * CYCLE
            assert self.beat_ns >= self.blind_ns, "permit from what was heard before own lag"
            assert result.consecutive_misses < 3
            assert result.window_misses <= 4
        said = bool(result.causes & Cause.DEGRADED)
        assert said is (result.state in PERMITTED and self.heard_degraded)
        if result.state == State.OK:
            assert result.causes & ~Cause.DEGRADED == 0
            assert result.window_misses <= 2
        if result.state in (State.FAILED, State.EXPIRED, State.SELF_LAG):
            assert result.causes != 0
            assert result.reason
        if result.state == State.SELF_LAG:
            assert result.causes == Cause.SELF_LAG
        if late:
            assert result.causes & Cause.SELF_LAG
            assert result.state != State.FAILED
            if before.state in (State.OK, State.FAILED) and not self.heard_anything:
                assert result.state == State.SELF_LAG
        if self.latched and not self.may_leave:
            assert result.state == State.EXPIRED
        self.latched = result.state == State.EXPIRED
        if self.latched and before.state != State.EXPIRED:
            self.may_leave = False
        if before.state == State.DEACTIVATED and not self.heard_anything:
            assert result.state == State.DEACTIVATED, "nothing heard, nothing changes"
        if self.misses:
            assert result.window_length == min(len(self.misses), 20)
            assert result.window_misses == sum(self.misses[-20:])
        self.heard_anything = False

    heard_anything = False
    heard_degraded = False

    def beat(self, moving=True, source_state=SourceState.OK):
        self.heard_anything = True
        self.sequence += 1
        self.counter += moving
        beat = HeartbeatFacts(
            self.session, self.node, self.activations, self.worker_state, self.sequence,
            self.counter, self.counter, self.counter, source_state, self.degraded,
        )  # fmt: skip
        self.heard_degraded = self.degraded
        self.supervisor.on_heartbeat(self.now, beat)
        self.beat_ns = self.now
        if self.worker_state == WorkerState.ACTIVE:
            self.active_sessions.add(self.session)
            node, count = self.heard_activation
            self.may_leave |= node == self.node and self.activations > count
            self.heard_activation = (self.node, self.activations)
        elif self.worker_state == WorkerState.INACTIVE and self.session in self.active_sessions:
            self.may_leave = True

    @rule(count=st.integers(1, 8), moving=st.booleans())
    def live(self, count, moving):
        for _ in range(count):
            self.beat(moving)
            self.judge()

    @rule(count=st.integers(1, 4))
    def silence(self, count):
        for _ in range(count):
            self.judge()

    @rule()
    def switch_backend(self):
        """Running on the fallback is said, and costs nothing."""
        self.degraded = not self.degraded

    @rule()
    def lose_source(self):
        self.beat(source_state=SourceState.LOST)
        self.judge()

    @rule(cycles=st.integers(0, 100))
    def oversleep(self, cycles):
        self.judge(lateness_ns=cycles * CYCLE)

    @precondition(lambda self: self.worker_state == WorkerState.ACTIVE)
    @rule(
        outcomes=st.lists(st.sampled_from(Outcome), min_size=1, max_size=6),
        skip=st.booleans(),
        gap=st.sampled_from([0, 0, 0, 1, 100]),
        jump=st.booleans(),
    )
    def frames(self, outcomes, skip, gap, jump):
        self.beat()
        self.epoch += jump
        self.frame_id += gap
        heard = self.supervisor.cycle(self.now, 0).state != State.DEACTIVATED
        for outcome in outcomes:
            self.frame_id += 1
            self.supervisor.on_frame(
                self.now,
                FrameFacts(
                    self.session, self.frame_id, self.epoch, outcome, 0 if outcome.met else -1,
                    self.now + NS_PER_MS, self.now if outcome.met else 0, self.now - NS_PER_MS,
                    skip,
                ),
            )  # fmt: skip
            if heard and not (skip and outcome is Outcome.REPLACED):
                self.misses.append(not outcome.met)
                self.met_since_activation |= outcome.met
        self.judge()

    def activated_now(self):
        """Whether the supervisor took the heartbeat just sent for an activation."""
        return self.supervisor.cycle(self.now, 0).state in PERMITTED

    @rule()
    def activate(self):
        if self.worker_state != WorkerState.ACTIVE:
            self.activations += 1
            self.worker_state = WorkerState.ACTIVE
            self.beat()
            if self.activated_now():
                self.misses.clear()
                self.met_since_activation = False
            self.judge()

    @precondition(lambda self: self.worker_state == WorkerState.ACTIVE)
    @rule()
    def deactivate(self):
        self.worker_state = WorkerState.INACTIVE
        self.beat()
        self.judge()
        assert self.result.state == State.DEACTIVATED

    @precondition(lambda self: self.worker_state == WorkerState.ACTIVE)
    @rule(meanwhile=st.booleans())
    def reset_unheard(self, meanwhile):
        """Deactivated and activated between two heartbeats, also while the worker starts again."""
        if meanwhile:
            self.session += 1
            self.sequence = self.counter = self.frame_id = self.epoch = 0
        self.activations += 1
        self.beat()
        assert self.activated_now()
        self.misses.clear()
        self.met_since_activation = False
        self.judge()

    @rule(node_too=st.booleans())
    def restart(self, node_too):
        """The worker (or the node) dies and comes back by itself, active again if it was."""
        self.session += 1
        if node_too:
            self.node += 1
            self.activations = int(self.worker_state == WorkerState.ACTIVE)
        self.sequence = self.counter = self.frame_id = self.epoch = 0
        permitted_before = self.result.permit
        self.beat()
        self.judge()
        if permitted_before:
            assert self.result.state == State.EXPIRED

    @rule(field=st.sampled_from(HeartbeatFacts._fields), value=st.sampled_from([-1, 10**9]))
    def corrupt(self, field, value):
        """One heartbeat with a wild value: no crash, and never a permit out of it."""
        self.heard_anything = True
        beat = HeartbeatFacts(
            self.session, self.node, self.activations, self.worker_state, self.sequence + 1,
            self.counter + 1, self.counter + 1, self.counter + 1, SourceState.OK, False,
        )._replace(**{field: value})  # fmt: skip
        if value == 10**9 and not field.endswith("state"):
            return  # a value that can be
        self.supervisor.on_heartbeat(self.now, beat)
        self.judge()
        assert self.result.state == State.EXPIRED
        assert self.result.permit is False


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase
