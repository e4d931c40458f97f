"""UDP on this machine's loopback."""

from __future__ import annotations

import contextlib
import os

import pytest

from perception_rt.core.clock import NS_PER_S
from perception_rt.core.errors import UnavailableError, UsageError
from perception_rt.safety.transports import UdpReceiver, UdpSender, can_write


@pytest.fixture
def receiver():
    link = UdpReceiver("127.0.0.1", 0)
    yield link
    link.close()


def test_datagrams_arrive_whole_and_in_order(receiver):
    sender = UdpSender("127.0.0.1", receiver.port)
    assert sender.send(b"first")
    assert sender.send(b"second")
    assert receiver.wait(NS_PER_S)
    assert receiver.receive() == b"first"
    assert receiver.wait(NS_PER_S)
    assert receiver.receive() == b"second"
    assert receiver.receive() is None
    assert not receiver.wait(0)
    assert (sender.sent, sender.errors, receiver.errors) == (2, 0, 0)
    sender.close()


def test_too_long_shows_as_too_long(receiver):
    sender = UdpSender("127.0.0.1", receiver.port)
    assert sender.send(bytes(6000))
    assert receiver.wait(NS_PER_S)
    assert len(receiver.receive()) == 4097
    sender.close()


def test_nobody_listening_loses_nothing_else(receiver):
    """A connected socket would refuse every other datagram."""
    port = receiver.port
    receiver.close()
    sender = UdpSender("127.0.0.1", port)
    assert [sender.send(b"x") for _ in range(10)] == [True] * 10
    sender.close()


def test_refused_datagrams_are_counted_never_raised(receiver):
    sender = UdpSender("127.0.0.1", receiver.port)
    assert not sender.send(bytes(70_000))
    sender.close()
    assert not sender.send(b"x")
    assert (sender.sent, sender.errors) == (0, 2)


def test_a_closed_receiver_counts(receiver):
    receiver.close()
    assert receiver.receive() is None
    assert receiver.errors == 1


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_sender_port_out_of_range(port):
    with pytest.raises(UsageError, match=f"UDP port {port} is out of range"):
        UdpSender("127.0.0.1", port)


def test_receiver_port_out_of_range():
    with pytest.raises(UsageError, match="UDP port 70000"):
        UdpReceiver("127.0.0.1", 70000)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300])
def test_unknown_host(host):
    with pytest.raises(UnavailableError, match="cannot be resolved"):
        UdpSender(host, 1)


def test_port_in_use(receiver):
    with pytest.raises(UnavailableError, match=f"cannot listen on 127.0.0.1:{receiver.port}"):
        UdpReceiver("127.0.0.1", receiver.port)


def test_ipv6_where_the_machine_has_it():
    try:
        receiver = UdpReceiver("::1", 0)
    except UnavailableError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    sender = UdpSender("::1", receiver.port)
    assert sender.send(b"x")
    assert receiver.wait(NS_PER_S)
    assert receiver.receive() == b"x"
    sender.close()
    receiver.close()


def test_a_reader_that_has_stopped_reading_is_noticed() -> None:
    read_end, write_end = os.pipe()
    try:
        assert can_write(write_end)
        os.set_blocking(write_end, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write_end, b"x" * 4096)
        assert not can_write(write_end)
    finally:
        os.close(read_end)
        os.close(write_end)
