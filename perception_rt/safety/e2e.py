"""E2E protection by AUTOSAR profile 4.

Header and CRC are the autosar-e2e library's, counter check and state machine are ours. The
library's check covers CRC, id and length only, masks ids above 32 bit silently and accepts data
above 4096 bytes: sizes are checked here. Rules as public implementations that cite the AUTOSAR
Foundation E2E protocol specification agree on them, see docs/safety_link.md. No certified claim.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from e2e.p04 import e2e_p04_check, e2e_p04_protect

from perception_rt.core.errors import UsageError

HEADER_BYTES = 12
MAX_BYTES = 4096
DEFAULT_DATA_ID = 0x50525401
"""E2E data id of the first detector's PDU; one id per detector."""

_COUNTER_MASK = 0xFFFF


class E2EStatus(IntEnum):
    """Result of one check, profile-independent. Values are the specification's."""

    OK = 0
    """Valid and next in sequence, or after at most ``max_delta_counter - 1`` lost ones."""
    REPEATED = 1
    """Valid, but with the counter of the one before."""
    WRONGSEQUENCE = 2
    """Valid, but the counter jumped by more than ``max_delta_counter``."""
    ERROR = 3
    """CRC, id, length or content wrong."""
    NOTAVAILABLE = 4
    """Nothing was checked yet."""
    NONEWDATA = 5
    """Nothing arrived in its time."""


class E2EState(IntEnum):
    """State of the link. Values are the specification's; its DEINIT (1) does not exist here."""

    VALID = 0
    """Data may be used."""
    NODATA = 2
    """Nothing usable arrived since the start."""
    INIT = 3
    """Data arrives; not yet enough of it."""
    INVALID = 4
    """The link does not work well enough."""


def check_data_id(data_id: int) -> int:
    """``data_id`` itself, when it is one.

    Raises:
        UsageError: not in 32 bit.
    """
    if not 0 <= data_id <= 0xFFFF_FFFF:
        raise UsageError(
            f"E2E data id {data_id:#x} does not fit profile 4: give one from 0 to 0xffffffff"
        )
    return data_id


class Protector:
    """Sender's side: puts header, counter and CRC in front of a payload.

    Args:
        data_id: 32 bit, the same as the receiver's.

    Raises:
        UsageError: ``data_id`` outside 32 bit.
    """

    def __init__(self, data_id: int) -> None:
        self._data_id = check_data_id(data_id)
        self._next_counter = 0

    @property
    def counter(self) -> int:
        """Counter of the newest datagram, 16 bit; 65535 before the first."""
        return (self._next_counter - 1) & _COUNTER_MASK

    def protect(self, payload: bytes) -> bytes:
        """The datagram: 12 bytes of header, then ``payload``.

        Each call takes the next counter, from 0, wrapping.

        Raises:
            UsageError: above 4096 bytes with its header.
        """
        if len(payload) > MAX_BYTES - HEADER_BYTES:
            raise UsageError(
                f"E2E profile 4 carries at most {MAX_BYTES - HEADER_BYTES} bytes, "
                f"got {len(payload)}"
            )
        data = bytearray(HEADER_BYTES + len(payload))
        data[2:4] = self._next_counter.to_bytes(2, "big")
        data[HEADER_BYTES:] = payload
        # The library would increment before use; kept here, so that the first one sent is 0.
        e2e_p04_protect(data, self._data_id, increment_counter=False)
        self._next_counter = (self._next_counter + 1) & _COUNTER_MASK
        return bytes(data)


class Checked(NamedTuple):
    """Result of one check: status, payload (empty when ERROR), datagrams lost before it (OK)."""

    status: E2EStatus
    payload: bytes
    lost: int


class Checker:
    """Receiver's side: CRC, length, id and counter of each datagram.

    The counter of every valid datagram is stored, in sequence or not, so that one gap is one
    WRONGSEQUENCE. As the stored counter starts at 65535, a receiver that starts in the middle
    begins with WRONGSEQUENCE.

    Args:
        data_id: 32 bit, the same as the sender's.
        max_delta_counter: largest step of the counter that is OK, 1 to 65534.

    Raises:
        UsageError: an argument outside its range.
    """

    def __init__(self, data_id: int, max_delta_counter: int = 2) -> None:
        self._data_id = check_data_id(data_id)
        if not 1 <= max_delta_counter < _COUNTER_MASK:
            raise UsageError(
                f"max_delta_counter must be from 1 to {_COUNTER_MASK - 1}, got {max_delta_counter}"
            )
        self._max_delta_counter = max_delta_counter
        self._counter = _COUNTER_MASK

    def check(self, datagram: bytes) -> Checked:
        """Check one datagram. Never raises on what a network can deliver."""
        whole = HEADER_BYTES <= len(datagram) <= MAX_BYTES
        if not whole or not e2e_p04_check(datagram, self._data_id):
            return Checked(E2EStatus.ERROR, b"", 0)
        counter = int.from_bytes(datagram[2:4], "big")
        delta = (counter - self._counter) & _COUNTER_MASK
        self._counter = counter
        payload = datagram[HEADER_BYTES:]
        if delta == 0:
            return Checked(E2EStatus.REPEATED, payload, 0)
        if delta > self._max_delta_counter:
            return Checked(E2EStatus.WRONGSEQUENCE, payload, 0)
        return Checked(E2EStatus.OK, payload, delta - 1)


@dataclass(frozen=True)
class StateMachineConfig:
    """Windows and bounds of the state machine, in checks. Start values, for one each 20 ms.

    Attributes:
        window_valid, window_init, window_invalid: checks that count in each state.
        min_ok_valid, min_ok_init, min_ok_invalid: least OK in the window to stay in VALID, or to
            enter it.
        max_error_valid, max_error_init, max_error_invalid: most ERROR in the window likewise.
    """

    window_valid: int = 10
    window_init: int = 10
    window_invalid: int = 10
    min_ok_valid: int = 7
    min_ok_init: int = 8
    min_ok_invalid: int = 9
    max_error_valid: int = 2
    max_error_init: int = 1
    max_error_invalid: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_ok_valid <= self.min_ok_init <= self.min_ok_invalid:
            raise UsageError(
                "E2E state machine: need 1 <= min_ok_valid <= min_ok_init <= min_ok_invalid"
            )
        if not self.max_error_valid >= self.max_error_init >= self.max_error_invalid >= 0:
            raise UsageError(
                "E2E state machine: need "
                "max_error_valid >= max_error_init >= max_error_invalid >= 0"
            )
        if self.window_init > self.window_valid or self.window_invalid > self.window_valid:
            raise UsageError(
                "E2E state machine: window_init and window_invalid must not exceed window_valid"
            )
        for name in ("valid", "init", "invalid"):
            window, min_ok = getattr(self, f"window_{name}"), getattr(self, f"min_ok_{name}")
            if min_ok + getattr(self, f"max_error_{name}") > window:
                raise UsageError(
                    f"E2E state machine: min_ok_{name} + max_error_{name} must fit "
                    f"window_{name} ({window})"
                )


_NOTHING_USABLE = (E2EStatus.ERROR, E2EStatus.NONEWDATA, E2EStatus.NOTAVAILABLE)


class CheckStateMachine:
    """NODATA, INIT, VALID, INVALID from the statuses of the last checks. Pure.

    - NODATA: to INIT at the first usable check, which does not count there yet; to INVALID when a
      whole ``window_valid`` was unusable.
    - INIT: to VALID on its bounds; to INVALID above ``max_error_init``, or once its window can no
      longer hold ``min_ok_init`` OK.
    - VALID: to INVALID when its bounds break. INVALID: to VALID on its bounds.

    Both options of the specification are on: transitions to INVALID extended, and window cleared
    on the way to INVALID, so that only checks after the fault lead back.
    """

    def __init__(self, config: StateMachineConfig | None = None) -> None:
        self._config = config or StateMachineConfig()
        self._window: deque[E2EStatus] = deque()
        self.state = E2EState.NODATA

    def add(self, status: E2EStatus) -> E2EState:
        """Take the status of one check; returns the state after it."""
        config = self._config
        if self.state is E2EState.NODATA:
            self._push(status, config.window_valid)
            if status not in _NOTHING_USABLE:
                self._enter(E2EState.INIT, clear=True)
            elif len(self._window) == config.window_valid:
                self._enter(E2EState.INVALID, clear=True)
        elif self.state is E2EState.INIT:
            ok, errors = self._push(status, config.window_init)
            not_ok = len(self._window) - ok
            if errors > config.max_error_init or not_ok > config.window_init - config.min_ok_init:
                self._enter(E2EState.INVALID, clear=True)
            elif ok >= config.min_ok_init:
                self._enter(E2EState.VALID, clear=False)
        elif self.state is E2EState.VALID:
            ok, errors = self._push(status, config.window_valid)
            if errors > config.max_error_valid or ok < config.min_ok_valid:
                self._enter(E2EState.INVALID, clear=True)
        else:
            ok, errors = self._push(status, config.window_invalid)
            if errors <= config.max_error_invalid and ok >= config.min_ok_invalid:
                self._enter(E2EState.VALID, clear=False)
        return self.state

    def force_invalid(self) -> None:
        """To INVALID now, with an empty window: the caller's own timer ran out."""
        self._enter(E2EState.INVALID, clear=True)

    def _push(self, status: E2EStatus, size: int) -> tuple[int, int]:
        """Keep the last ``size`` statuses; returns how many of them are OK and ERROR."""
        self._window.append(status)
        while len(self._window) > size:
            self._window.popleft()
        return self._window.count(E2EStatus.OK), self._window.count(E2EStatus.ERROR)

    def _enter(self, state: E2EState, *, clear: bool) -> None:
        if clear:
            self._window.clear()
        self.state = state
