"""Transports of the safety PDU: UDP; and when a line may be said beside it.

Nothing here blocks; sending never raises.
"""

from __future__ import annotations

import select
import socket
from typing import Any

from perception_rt.core.errors import UnavailableError, UsageError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 15020

_RECEIVE_BYTES = (
    4097  # one more than E2E profile 4 allows, so that a longer datagram shows as too long
)


def can_write(descriptor: int) -> bool:
    """True when a line can be written to ``descriptor`` at once: a reader that has stopped must
    not hold up a cycle.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


def _resolve(host: str, port: int, least_port: int) -> tuple[socket.AddressFamily, Any]:
    if not least_port <= port <= 65535:
        raise UsageError(f"UDP port {port} is out of range: give one from {least_port} to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except (OSError, UnicodeError) as error:
        raise UnavailableError(
            f"safety link: host '{host}' cannot be resolved ({error}): give an address"
        ) from None
    return family, address


class UdpSender:
    """Sends datagrams to one address. The name is resolved once, here.

    The socket is not connected: a connected one reports the ICMP answer to the last datagram by
    refusing the next, so that every other PDU would be lost while no receiver runs.

    Attributes:
        sent: datagrams handed to the kernel.
        errors: datagrams that the kernel refused.

    Raises:
        UsageError: a port out of range.
        UnavailableError: a host that cannot be resolved.
    """

    def __init__(self, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT) -> None:
        family, self._address = _resolve(host, port, 1)
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self.sent = 0
        self.errors = 0

    def send(self, datagram: bytes) -> bool:
        """Hand over one datagram; False, and counted, when the kernel refuses it."""
        try:
            self._socket.sendto(datagram, self._address)
        except OSError:
            self.errors += 1
            return False
        self.sent += 1
        return True

    def close(self) -> None:
        """Close the socket; every later ``send`` is a counted error."""
        self._socket.close()


class UdpReceiver:
    """Receives datagrams on one address.

    Attributes:
        port: the port bound, also when 0 was asked for.
        errors: receive calls that failed.

    Raises:
        UsageError: a port out of range.
        UnavailableError: a host that cannot be resolved, or a port that cannot be bound.
    """

    def __init__(self, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT) -> None:
        family, address = _resolve(host, port, 0)
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._socket.bind(address)
        except OSError as error:
            self._socket.close()
            raise UnavailableError(
                f"safety link: cannot listen on {host}:{port} ({error.strerror}): "
                "stop the other receiver or choose another port"
            ) from None
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self.errors = 0

    def wait(self, timeout_ns: int) -> bool:
        """Wait for a datagram for at most ``timeout_ns``; True when one is there."""
        return bool(select.select((self._socket,), (), (), max(timeout_ns, 0) / 1e9)[0])

    def receive(self) -> bytes | None:
        """The next datagram, cut at 4097 bytes; None when none is there. Never blocks."""
        try:
            return self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            self.errors += 1
            return None

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
