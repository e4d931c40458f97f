"""The safety PDU's payload: what the watchdog tells the safety controller every 20 ms.

One layout for every transport: 50 bytes, big-endian, byte by byte in docs/safety_link.md. At most
61 bytes, so that it fits a CAN FD frame behind a profile 5 header. The E2E header in front of it
is ``perception_rt.safety.e2e``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from perception_rt.core.errors import InputError, UsageError
from perception_rt.core.supervision_facts import Cause, State

VERSION = 1
PAYLOAD_BYTES = 50

PERMITTING_STATES = (State.OK, State.FAILED)
"""The only states in which a permit can be meant."""

AGE_UNKNOWN_US = 0xFFFF_FFFF
"""``last_met_age_us`` of "no met answer yet", and of every age from 4294.967295 s on."""

_LAYOUT = struct.Struct(">BBHBBBBQQQIHIII")
_PERMIT_BYTES = (0x00, 0x01)
_FLAG_SIMULATED, _FLAG_DEGRADED = 0x01, 0x02
_KNOWN_FLAGS = _FLAG_SIMULATED | _FLAG_DEGRADED
_KNOWN_STATES = frozenset(State)
_KNOWN_CAUSES = sum(Cause) - int(Cause.DEGRADED)  # that one has a flag
_U8, _U16, _U32 = 0xFF, 0xFFFF, 0xFFFF_FFFF


class PduError(InputError):
    """A payload that cannot be one of ours: the receiver must treat it as an error of the link."""


class PduVersionError(PduError):
    """A payload of a version that this build does not know."""


class PduPermitError(PduError):
    """Permit byte and complement byte that do not belong together."""


@dataclass(frozen=True)
class SafetyPdu:
    """One PDU's content. Counts and ages above their field's range are sent as the largest value.

    Attributes:
        state: supervision state, a ``State``.
        causes: supervision causes, a sum of ``Cause`` without DEGRADED.
        permit: the detector's answers may be used.
        simulated_source: frames come from a bag, a video or simulated time.
        session_id: of the supervised worker, 0 for none; 64 bit.
        sent_ns: this PDU was handed to the transport; ns, CLOCK_MONOTONIC of the sender.
        last_frame_id: newest frame id received in the worker's session, 0 for none; 64 bit.
        last_met_age_us: since the capture stamp of the newest met frame, us; ``AGE_UNKNOWN_US``
            for none.
        consecutive_misses: since the last met frame.
        window_misses: in the (m,k)-firm window.
        total_misses: in the worker's session.
        degraded: the detector runs on its fallback backend; says nothing against the permit.
        nonce_echo: the controller's last nonce, 0 for none (reserved: always 0 in this version's
            sender).
        nonce_age_us: since that nonce was received, us; 0 without a nonce.
    """

    state: int
    causes: int
    permit: bool
    simulated_source: bool
    session_id: int
    sent_ns: int
    last_frame_id: int
    last_met_age_us: int
    consecutive_misses: int
    window_misses: int
    total_misses: int
    degraded: bool = False
    nonce_echo: int = 0
    nonce_age_us: int = 0

    def encode(self) -> bytes:
        """The payload, ``PAYLOAD_BYTES`` long.

        Raises:
            UsageError: a state, a cause bit, an id or an instant that has no place in the layout,
                or a negative value.
        """
        if self.state not in _KNOWN_STATES:
            raise UsageError(f"safety PDU: state {self.state} is unknown: use one of State")
        if self.causes & ~_KNOWN_CAUSES:
            raise UsageError(
                f"safety PDU: causes {self.causes:#x} is no sum of known bits: use Cause, and "
                "the flag for DEGRADED"
            )
        try:
            return _LAYOUT.pack(
                VERSION,
                self.state,
                self.causes,
                _PERMIT_BYTES[self.permit],
                _PERMIT_BYTES[self.permit] ^ 0xFF,
                (_FLAG_SIMULATED if self.simulated_source else 0)
                | (_FLAG_DEGRADED if self.degraded else 0),
                min(self.window_misses, _U8),
                self.session_id,
                self.sent_ns,
                self.last_frame_id,
                min(self.last_met_age_us, _U32),
                min(self.consecutive_misses, _U16),
                min(self.total_misses, _U32),
                self.nonce_echo,
                min(self.nonce_age_us, _U32),
            )
        except struct.error as error:
            raise UsageError(
                f"safety PDU: a value is negative or too large for its field ({error}): {self}"
            ) from None

    @classmethod
    def decode(cls, payload: bytes) -> SafetyPdu:
        """Read a payload. Every byte is checked: nothing of a payload that raises may be used.

        Raises:
            PduVersionError: version byte other than ``VERSION``.
            PduPermitError: permit byte neither 0 nor 1, or not the inverse of the complement byte.
            PduError: wrong length, or unknown state, cause bits or flags.
        """
        if len(payload) != PAYLOAD_BYTES:
            raise PduError(
                f"safety PDU of {len(payload)} bytes, not {PAYLOAD_BYTES}: who else sends here?"
            )
        (
            version,
            state,
            causes,
            permit,
            complement,
            flags,
            window_misses,
            session_id,
            sent_ns,
            last_frame_id,
            last_met_age_us,
            consecutive_misses,
            total_misses,
            nonce_echo,
            nonce_age_us,
        ) = _LAYOUT.unpack(payload)
        if version != VERSION:
            raise PduVersionError(
                f"safety PDU version {version}: this build reads {VERSION}, update one side"
            )
        if permit not in _PERMIT_BYTES or permit ^ complement != 0xFF:
            raise PduPermitError(
                f"safety PDU: permit {permit:#04x} and complement {complement:#04x} do not agree"
            )
        if state not in _KNOWN_STATES:
            raise PduError(f"safety PDU: state {state} is unknown to version {VERSION}")
        if causes & ~_KNOWN_CAUSES:
            raise PduError(
                f"safety PDU: causes {causes:#06x} has bits unknown to version {VERSION}"
            )
        if flags & ~_KNOWN_FLAGS:
            raise PduError(f"safety PDU: flags {flags:#04x} has bits unknown to version {VERSION}")
        return cls(
            state=state,
            causes=causes,
            permit=permit == _PERMIT_BYTES[True],
            simulated_source=bool(flags & _FLAG_SIMULATED),
            session_id=session_id,
            sent_ns=sent_ns,
            last_frame_id=last_frame_id,
            last_met_age_us=last_met_age_us,
            consecutive_misses=consecutive_misses,
            window_misses=window_misses,
            total_misses=total_misses,
            degraded=bool(flags & _FLAG_DEGRADED),
            nonce_echo=nonce_echo,
            nonce_age_us=nonce_age_us,
        )

    @property
    def cause_names(self) -> str:
        """The causes for people, as ``ALIVE+DATA``; ``none`` without one."""
        return "+".join(str(cause.name) for cause in Cause if cause & self.causes) or "none"
