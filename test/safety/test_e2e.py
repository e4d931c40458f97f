"""Profile 4 against published vectors, the counter, and the state machine's traces."""

from __future__ import annotations

import pytest
from e2e.crc import calculate_crc32_p4
from e2e.p04 import e2e_p04_check, e2e_p04_protect
from e2e.p05 import e2e_p05_protect
from hypothesis import example, given
from hypothesis import strategies as st

from perception_rt.core.errors import UsageError
from perception_rt.safety.e2e import (
    Checker,
    CheckStateMachine,
    E2EState,
    E2EStatus,
    Protector,
    StateMachineConfig,
)

OK, REPEATED, WRONG, ERROR, NONE = (
    E2EStatus.OK,
    E2EStatus.REPEATED,
    E2EStatus.WRONGSEQUENCE,
    E2EStatus.ERROR,
    E2EStatus.NONEWDATA,
)
NODATA, INIT, VALID, INVALID = E2EState.NODATA, E2EState.INIT, E2EState.VALID, E2EState.INVALID
VECTOR = bytes.fromhex("00100000 0a0b0c0d 862b0556 00000000")


def test_numbers_are_the_specification_s():
    assert [(s.name, s.value) for s in E2EStatus] == [
        ("OK", 0),
        ("REPEATED", 1),
        ("WRONGSEQUENCE", 2),
        ("ERROR", 3),
        ("NOTAVAILABLE", 4),
        ("NONEWDATA", 5),
    ]
    assert [(s.name, s.value) for s in E2EState] == [
        ("VALID", 0),
        ("NODATA", 2),
        ("INIT", 3),
        ("INVALID", 4),
    ]


def test_vectors_of_the_library():
    """Profile 5 too: the same library will carry it on CAN FD."""
    data = bytearray(8)
    e2e_p05_protect(data, 0x1234, increment_counter=False)
    assert data == bytes.fromhex("1cca0000 00000000")
    data = bytearray(16)
    e2e_p04_protect(data, 0x0A0B0C0D, increment_counter=False)
    assert data == VECTOR
    assert calculate_crc32_p4(b"123456789") == 0x1697D06A  # check value of CRC-32/AUTOSAR


def test_protector_gives_the_vector_then_counts():
    protector = Protector(0x0A0B0C0D)
    assert protector.counter == 65535
    assert protector.protect(bytes(4)) == VECTOR
    assert protector.counter == 0
    assert protector.protect(bytes(4))[:8] == bytes.fromhex("00100001 0a0b0c0d")
    assert protector.counter == 1


def test_checker_takes_the_vector():
    checked = Checker(0x0A0B0C0D).check(VECTOR)
    assert checked == (OK, bytes(4), 0)


def with_counter(counter: int, data_id: int = 7) -> bytes:
    data = bytearray(16)
    data[2:4] = counter.to_bytes(2, "big")
    e2e_p04_protect(data, data_id, increment_counter=False)
    return bytes(data)


def test_counter_wraps_in_sequence():
    protector, checker = Protector(7), Checker(7)
    statuses = {checker.check(protector.protect(b"x")).status for _ in range(65536 + 3)}
    assert statuses == {OK}
    assert protector.counter == 2


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        ([0, 1, 2], [OK, OK, OK]),
        ([0, 0, 1], [OK, REPEATED, OK]),
        ([0, 2, 4], [OK, OK, OK]),  # one lost: still MaxDeltaCounter
        ([0, 3, 4], [OK, WRONG, OK]),  # two lost; the stored counter follows
        ([500, 501], [WRONG, OK]),  # a receiver that starts in the middle
        ([0, 1, 2, 1, 2, 3], [OK, OK, OK, WRONG, OK, OK]),  # replay: see the receiver's high water
        ([65534, 65535, 0], [WRONG, OK, OK]),
        ([65534, 0], [WRONG, OK]),
        ([5, 4], [WRONG, WRONG]),
    ],
)
def test_counter(counters, expected):
    checker = Checker(7, max_delta_counter=2)
    assert [checker.check(with_counter(counter)).status for counter in counters] == expected


def test_lost_datagrams_are_counted():
    checker = Checker(7, max_delta_counter=3)
    assert [checker.check(with_counter(counter)).lost for counter in (0, 1, 3, 6, 10)] == [
        0,
        0,
        1,
        2,
        0,
    ]


@pytest.mark.parametrize(
    "datagram",
    [
        b"",
        VECTOR[:11],
        VECTOR[:12],
        VECTOR[:-1],
        VECTOR + b"\0",
        bytes(5000),
        VECTOR[:8] + b"\0\0\0\0" + VECTOR[12:],
    ],
)
def test_what_is_not_whole_is_an_error_and_does_not_move_the_counter(datagram):
    checker = Checker(0x0A0B0C0D)
    assert checker.check(datagram) == (ERROR, b"", 0)
    assert checker.check(VECTOR).status is OK


def test_longer_than_the_profile_allows_although_the_library_would_take_it():
    data = bytearray(4097)
    e2e_p04_protect(data, 7, increment_counter=False)
    assert Checker(7).check(bytes(data)).status is ERROR
    assert len(Protector(7).protect(bytes(4084))) == 4096
    with pytest.raises(UsageError, match="at most 4084 bytes, got 4085"):
        Protector(7).protect(bytes(4085))


@pytest.mark.parametrize("length", [0, 12, 15, 17, 20, 4096])
def test_wrong_length_field_under_a_right_crc(length):
    """The library checks it against the whole buffer; this keeps it so."""
    data = bytearray(VECTOR)
    data[0:2] = length.to_bytes(2, "big")
    data[8:12] = calculate_crc32_p4(bytes(data[:8] + data[12:])).to_bytes(4, "big")
    assert Checker(0x0A0B0C0D).check(bytes(data)).status is ERROR
    data[0:2] = b"\x00\x10"
    data[8:12] = calculate_crc32_p4(bytes(data[:8] + data[12:])).to_bytes(4, "big")
    assert bytes(data) == VECTOR
    assert e2e_p04_check(data, 0x0A0B0C0D)


def test_another_id_is_an_error():
    assert Checker(0x0A0B0C0E).check(VECTOR).status is ERROR


@pytest.mark.parametrize("data_id", [-1, 2**32, 2**40])
def test_ids_that_the_library_would_mask_are_refused(data_id):
    with pytest.raises(UsageError, match="does not fit profile 4"):
        Protector(data_id)
    with pytest.raises(UsageError, match="does not fit profile 4"):
        Checker(data_id)


@pytest.mark.parametrize("delta", [0, -1, 65535])
def test_max_delta_counter_out_of_range(delta):
    with pytest.raises(UsageError, match="max_delta_counter"):
        Checker(7, delta)


@given(st.integers(0, 2**32 - 1), st.lists(st.binary(max_size=80), min_size=1, max_size=20))
def test_round_trip(data_id, payloads):
    protector, checker = Protector(data_id), Checker(data_id)
    for payload in payloads:
        assert checker.check(protector.protect(payload)) == (OK, payload, 0)


@given(st.integers(0, 15), st.integers(1, 255))
def test_every_changed_byte_is_seen(index, flip):
    damaged = bytearray(VECTOR)
    damaged[index] ^= flip
    assert Checker(0x0A0B0C0D).check(bytes(damaged)).status is ERROR


@given(st.binary(max_size=120))
@example(b"\x00\x0c")
def test_any_bytes_give_a_status(datagram):
    assert Checker(7).check(datagram).status is ERROR


# The state machine.


def trace(statuses, config=None):
    machine = CheckStateMachine(config)
    return [machine.add(status) for status in statuses]


def test_start_from_the_first_datagram_to_valid():
    """The first usable check opens INIT and does not count; eight OK make VALID."""
    assert trace([OK] * 10) == [INIT] * 8 + [VALID] * 2


def test_start_in_the_middle():
    assert trace([WRONG] + [OK] * 8) == [INIT] * 8 + [VALID]


def test_nodata_waits_for_something_usable():
    assert trace([NONE, ERROR, NONE, OK]) == [NODATA, NODATA, NODATA, INIT]
    assert trace([NONE, REPEATED]) == [NODATA, INIT]


def test_nodata_for_a_whole_window_is_invalid():
    assert trace([NONE] * 9) == [NODATA] * 9
    assert trace([NONE] * 10) == [NODATA] * 9 + [INVALID]
    assert trace([ERROR] * 10) == [NODATA] * 9 + [INVALID]


def test_init_bounds():
    assert trace([OK, ERROR]) == [INIT, INIT]
    assert trace([OK, ERROR, ERROR]) == [INIT, INIT, INVALID]
    assert trace([OK, OK, ERROR] + [OK] * 7) == [INIT] * 9 + [VALID]
    # Ten checks with eight OK need at most two others; the third makes it impossible.
    assert trace([OK, NONE, NONE, NONE]) == [INIT, INIT, INIT, INVALID]
    assert trace([OK, NONE, NONE] + [OK] * 8) == [INIT] * 10 + [VALID]


def from_valid(statuses):
    return trace([OK] * 11 + statuses)[11:]


def test_valid_bounds():
    assert from_valid([NONE] * 3) == [VALID] * 3
    assert from_valid([NONE] * 4) == [VALID] * 3 + [INVALID]
    assert from_valid([ERROR] * 3) == [VALID] * 2 + [INVALID]
    assert from_valid([WRONG, REPEATED, NONE, WRONG]) == [VALID] * 3 + [INVALID]
    # Faults leave the window again: one of two lost for ever breaks it, one of four never does.
    assert from_valid([OK, NONE] * 4) == [VALID] * 7 + [INVALID]
    assert from_valid([NONE, OK, OK, OK] * 10) == [VALID] * 40
    assert from_valid([ERROR, OK, OK, OK] * 3) == [VALID] * 8 + [INVALID] * 4


def test_invalid_needs_nine_new_ok_and_no_error():
    assert from_valid([NONE] * 4 + [OK] * 9) == [VALID] * 3 + [INVALID] * 9 + [VALID]
    # One gap among ten is allowed, an error has to leave the window first.
    assert from_valid([NONE] * 4 + [OK] * 8 + [NONE, OK])[-2:] == [INVALID, VALID]
    assert from_valid([NONE] * 4 + [ERROR] + [OK] * 9)[-1] is INVALID
    assert from_valid([NONE] * 4 + [ERROR] + [OK] * 10)[-1] is VALID


def test_force_invalid_forgets_what_was_good():
    machine = CheckStateMachine()
    for _ in range(20):
        machine.add(OK)
    machine.force_invalid()
    assert machine.state is INVALID
    assert [machine.add(OK) for _ in range(9)] == [INVALID] * 8 + [VALID]


def test_windows_of_different_length():
    config = StateMachineConfig(
        window_valid=6,
        window_init=3,
        window_invalid=4,
        min_ok_valid=2,
        min_ok_init=2,
        min_ok_invalid=3,
        max_error_valid=1,
        max_error_init=1,
        max_error_invalid=0,
    )
    assert trace([OK, OK, OK], config) == [INIT, INIT, VALID]
    statuses = [OK, OK, OK, NONE, NONE, NONE, NONE, NONE]
    assert trace(statuses, config)[2:] == [VALID] * 5 + [INVALID]
    assert trace([*statuses, OK, ERROR, OK, OK, OK, OK], config)[8:] == [INVALID] * 5 + [VALID]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"min_ok_valid": 0}, "1 <= min_ok_valid"),
        ({"min_ok_init": 6}, "min_ok_valid <= min_ok_init"),
        ({"min_ok_invalid": 7}, "min_ok_init <= min_ok_invalid"),
        ({"max_error_init": 3}, "max_error_valid >= max_error_init"),
        ({"max_error_invalid": 2}, "max_error_init >= max_error_invalid"),
        ({"max_error_invalid": -1}, ">= 0"),
        ({"window_init": 11}, "must not exceed window_valid"),
        ({"window_invalid": 11}, "must not exceed window_valid"),
        ({"min_ok_valid": 8, "max_error_valid": 3}, "must fit window_valid"),
        ({"window_init": 8}, "must fit window_init"),
        ({"window_invalid": 8}, "must fit window_invalid"),
    ],
)
def test_configuration_that_contradicts_itself(change, words):
    with pytest.raises(UsageError, match=words):
        StateMachineConfig(**change)


statuses = st.lists(st.sampled_from(list(E2EStatus)), max_size=80)


@given(statuses)
def test_valid_only_with_enough_ok_and_few_errors(seen):
    machine = CheckStateMachine()
    for i, status in enumerate(seen):
        before = machine.state
        state = machine.add(status)
        last = seen[max(0, i - 9) : i + 1]
        if state is VALID:
            assert last.count(OK) >= 7
            assert last.count(ERROR) <= 2
            if before is not VALID:
                assert last.count(OK) >= (8 if before is INIT else 9)
                assert last.count(ERROR) <= (1 if before is INIT else 0)
        assert state is not NODATA or before is NODATA
        assert state is not INIT or before in (NODATA, INIT)


@given(statuses)
def test_nine_ok_always_lead_to_valid_within_two_windows(seen):
    """From whatever happened, a good link recovers: ten errors or gaps age out, nine OK stay."""
    machine = CheckStateMachine()
    for status in seen:
        machine.add(status)
    assert [machine.add(OK) for _ in range(20)][-1] is VALID


@given(statuses)
def test_four_silent_cycles_always_end_valid(seen):
    machine = CheckStateMachine()
    for status in seen:
        machine.add(status)
    for _ in range(4):
        machine.add(NONE)
    assert machine.state is not VALID
