"""Decides on the permit from what arrives on the safety link. Pure: no socket, no clock, no ROS.

Silence is a fault: every rule here can only withdraw the permit, and only all of them together
grant it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.supervision_facts import State
from perception_rt.safety.e2e import (
    DEFAULT_DATA_ID,
    Checker,
    CheckStateMachine,
    E2EState,
    E2EStatus,
)
from perception_rt.safety.pdu import PERMITTING_STATES, PduError, SafetyPdu

CYCLE_NS = 5 * NS_PER_MS
"""Period of ``Receiver.evaluate``."""
PDU_PERIOD_NS = 20 * NS_PER_MS
"""Period of the sender."""
TIMEOUT_NS = 50 * NS_PER_MS
"""Silence that makes the link INVALID: with one cycle on top, within 55 ms of the last PDU."""

_MISSING_AFTER_NS = PDU_PERIOD_NS + PDU_PERIOD_NS // 2
"""Half a period of jitter before a PDU counts as missing."""


class Transition(NamedTuple):
    """A change of the permit, of the E2E state, or of what the detector runs on.

    ``kind`` is ``permit``, ``e2e`` or ``degraded`` (``no``, ``yes``); ``since_accepted_ns`` counts
    from the last accepted PDU, -1 without one.
    """

    monotonic_ns: int
    kind: str
    before: str
    after: str
    reason: str
    since_accepted_ns: int


class Receiver:
    """Decides on the permit. Pure: all instants are given, CLOCK_MONOTONIC ns of the receiver.

    A PDU is accepted when its E2E status is OK and its payload decodes. The permit stands while
    the E2E state is VALID, the last accepted PDU grants it, and nothing authentic said otherwise
    since:

    - the PDU's permit is set, in state OK or FAILED, with a worker session;
    - the session is the one that the permit was first given to; a new one is believed only after a
      PDU without permit;
    - the source is real, or ``accept_simulated`` is set;
    - a PDU that is authentic but out of sequence can withdraw, never grant; one that was sent
      before the newest known one is a replay and says nothing.

    Args:
        data_id: E2E data id, 32 bit.
        accept_simulated: grant for simulated sources too.
        on_transition: called with every transition, in order.

    Raises:
        UsageError: ``data_id`` outside 32 bit.
    """

    def __init__(
        self,
        data_id: int = DEFAULT_DATA_ID,
        *,
        accept_simulated: bool = False,
        on_transition: Callable[[Transition], None] = lambda _: None,
    ) -> None:
        self._checker = Checker(data_id)
        self._machine = CheckStateMachine()
        self._accept_simulated = accept_simulated
        self._on_transition = on_transition
        self._accepted_ns = -1
        self._timer_armed = False
        self._missing_at_ns = -1
        self._newest_sent_ns = -1
        self._session_id = 0
        self._refusal = "no PDU accepted yet"
        self._e2e_reason = "no PDU received yet"
        self.permit = False
        self.received = 0
        self.accepted = 0
        self.degraded = False
        self.accepted_degraded = 0
        self.lost = 0
        self.bad_payloads = 0
        self.replayed = 0
        self.timeouts = 0
        self.cycles = 0
        self.cycles_with_permit = 0
        self.cycles_since_first_permit = 0
        self.status_counts = dict.fromkeys(E2EStatus, 0)

    @property
    def state(self) -> E2EState:
        """State of the E2E link."""
        return self._machine.state

    def on_datagram(self, now_ns: int, datagram: bytes) -> None:
        """Take one datagram that arrived at ``now_ns``. Never raises on its content."""
        self._run_timers(now_ns)
        self.received += 1
        self._missing_at_ns = now_ns + _MISSING_AFTER_NS
        checked = self._checker.check(datagram)
        status = checked.status
        if status is E2EStatus.ERROR:
            self._add(now_ns, status, "bad CRC, data id or length")
            self._judge(now_ns)
            return
        try:
            pdu = SafetyPdu.decode(checked.payload)
        except PduError as error:
            self.bad_payloads += 1
            self._refusal = str(error)
            self._add(now_ns, E2EStatus.ERROR, str(error))
            self._judge(now_ns)
            return
        if pdu.sent_ns <= self._newest_sent_ns:
            if status is not E2EStatus.REPEATED:
                self.replayed += 1
                status = E2EStatus.WRONGSEQUENCE
            self._add(
                now_ns, status, "PDU repeated" if status is E2EStatus.REPEATED else "PDU replayed"
            )
            self._judge(now_ns)
            return
        self._newest_sent_ns = pdu.sent_ns
        refusal = self._refusal_of(pdu)
        if status is E2EStatus.OK:
            self.accepted += 1
            self.lost += checked.lost
            self._accepted_ns = now_ns
            self._timer_armed = True
            self._refusal = refusal
            self._follow_session(pdu)
            self._follow_degraded(now_ns, pdu)
        elif refusal:
            self._refusal = refusal
        self._add(now_ns, status, f"PDU {status.name}")
        self._judge(now_ns)

    def evaluate(self, now_ns: int) -> bool:
        """One cycle, due every ``CYCLE_NS``: timers, then the permit, returned and counted."""
        self._run_timers(now_ns)
        self._judge(now_ns)
        self.cycles += 1
        if self.permit:
            self.cycles_with_permit += 1
        if self.permit or self.cycles_since_first_permit:
            self.cycles_since_first_permit += 1
        return self.permit

    def summary(self) -> dict[str, Any]:
        """Counts so far, ready for JSON; fields in docs/safety_link.md."""
        since = self.cycles_since_first_permit
        return {
            "received": self.received,
            "accepted": self.accepted,
            "accepted_degraded": self.accepted_degraded,
            "degraded": self.degraded,
            "lost": self.lost,
            "bad_payloads": self.bad_payloads,
            "replayed": self.replayed,
            "timeouts": self.timeouts,
            "e2e_status": {status.name: count for status, count in self.status_counts.items()},
            "e2e_state": self.state.name,
            "permit": self.permit,
            "cycles": self.cycles,
            "cycles_with_permit": self.cycles_with_permit,
            "cycles_since_first_permit": since,
            "permit_share_since_first": self.cycles_with_permit / since if since else None,
        }

    def _run_timers(self, now_ns: int) -> None:
        if self._missing_at_ns < 0:
            self._missing_at_ns = now_ns + _MISSING_AFTER_NS
        if self._timer_armed and now_ns - self._accepted_ns >= TIMEOUT_NS:
            self._timer_armed = False
            self.timeouts += 1
            before = self.state
            self._machine.force_invalid()
            self._note_state(now_ns, before, f"no PDU accepted for {TIMEOUT_NS // NS_PER_MS} ms")
        while now_ns >= self._missing_at_ns:
            self._missing_at_ns += PDU_PERIOD_NS
            self._add(now_ns, E2EStatus.NONEWDATA, "no PDU in its period")

    def _add(self, now_ns: int, status: E2EStatus, reason: str) -> None:
        self.status_counts[status] += 1
        before = self.state
        self._machine.add(status)
        self._note_state(now_ns, before, reason)

    def _note_state(self, now_ns: int, before: E2EState, reason: str) -> None:
        if self.state is not before:
            self._e2e_reason = reason
            self._report(now_ns, "e2e", before.name, self.state.name, reason)

    def _refusal_of(self, pdu: SafetyPdu) -> str:
        """Why this PDU does not grant a permit; empty when it does."""
        state = State(pdu.state).name
        if not pdu.permit:
            return f"PDU without permit: state {state}, causes {pdu.cause_names}"
        if pdu.state not in PERMITTING_STATES:
            return f"PDU with a permit in state {state}"
        if pdu.session_id == 0:
            return "PDU with a permit but no worker session"
        if self._session_id not in (0, pdu.session_id):
            return f"worker session changed under a permit: {self._session_id} to {pdu.session_id}"
        if pdu.simulated_source and not self._accept_simulated:
            return "simulated source, not accepted here"
        return ""

    def _follow_session(self, pdu: SafetyPdu) -> None:
        if not pdu.permit:
            self._session_id = 0
        elif self._session_id == 0:
            self._session_id = pdu.session_id

    def _follow_degraded(self, now_ns: int, pdu: SafetyPdu) -> None:
        """Report only: what the controller does about it is its own rule."""
        self.accepted_degraded += pdu.degraded
        if pdu.degraded is not self.degraded:
            self.degraded = pdu.degraded
            names = ("no", "yes")
            self._report(
                now_ns, "degraded", names[not pdu.degraded], names[pdu.degraded], "PDU flag"
            )

    def _judge(self, now_ns: int) -> None:
        valid = self.state is E2EState.VALID
        permit = valid and not self._refusal
        if permit is not self.permit:
            self.permit = permit
            reason = self._refusal if valid else f"E2E {self.state.name}: {self._e2e_reason}"
            names = ("withdrawn", "granted")
            self._report(
                now_ns,
                "permit",
                names[not permit],
                names[permit],
                "E2E VALID" if permit else reason,
            )

    def _report(self, now_ns: int, kind: str, before: str, after: str, reason: str) -> None:
        since = now_ns - self._accepted_ns if self._accepted_ns >= 0 else -1
        self._on_transition(Transition(now_ns, kind, before, after, reason, since))
