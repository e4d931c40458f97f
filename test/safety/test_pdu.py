"""The payload: literal bytes, round trip, and every malformed input."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.errors import UsageError
from perception_rt.safety.pdu import (
    AGE_UNKNOWN_US,
    PAYLOAD_BYTES,
    PERMITTING_STATES,
    PduError,
    PduPermitError,
    PduVersionError,
    SafetyPdu,
)

PDU = SafetyPdu(
    state=1,
    causes=0,
    permit=True,
    simulated_source=True,
    session_id=0x0102030405060708,
    sent_ns=0x1112131415161718,
    last_frame_id=0x2122232425262728,
    last_met_age_us=0x31323334,
    consecutive_misses=0x4142,
    window_misses=0x51,
    total_misses=0x61626364,
    nonce_echo=0x71727374,
    nonce_age_us=0x01020304,
)
PAYLOAD = bytes.fromhex(
    "01 01 0000 01 fe 01 51 0102030405060708 1112131415161718 2122232425262728"
    "31323334 4142 61626364 71727374 01020304"
)


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


pdus = st.builds(
    SafetyPdu,
    state=st.integers(0, 4),
    causes=st.integers(0, 63),
    permit=st.booleans(),
    simulated_source=st.booleans(),
    session_id=unsigned(64),
    sent_ns=unsigned(64),
    last_frame_id=unsigned(64),
    last_met_age_us=unsigned(32),
    consecutive_misses=unsigned(16),
    window_misses=unsigned(8),
    total_misses=unsigned(32),
    degraded=st.booleans(),
    nonce_echo=unsigned(32),
    nonce_age_us=unsigned(32),
)


def test_literal_bytes():
    assert PDU.encode() == PAYLOAD
    assert SafetyPdu.decode(PAYLOAD) == PDU
    assert PAYLOAD_BYTES == 50 <= 61


def test_no_permit_has_its_own_complement():
    payload = dataclasses.replace(PDU, permit=False, simulated_source=False).encode()
    assert payload[4:7] == bytes([0x00, 0xFF, 0x00])


@given(pdus)
def test_round_trip(pdu):
    assert SafetyPdu.decode(pdu.encode()) == pdu


def test_counts_and_ages_saturate():
    pdu = dataclasses.replace(
        PDU,
        last_met_age_us=2**40,
        consecutive_misses=65536,
        window_misses=256,
        total_misses=2**32,
        nonce_age_us=2**32,
    )
    read = SafetyPdu.decode(pdu.encode())
    assert read.last_met_age_us == AGE_UNKNOWN_US == 4294967295
    assert read.consecutive_misses == 65535
    assert read.window_misses == 255
    assert read.total_misses == 4294967295
    assert read.nonce_age_us == 4294967295


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": 5}, "state 5 is unknown"),
        ({"state": -1}, "state -1 is unknown"),
        ({"causes": 64}, "causes 0x40"),
        ({"session_id": 2**64}, "too large"),
        ({"session_id": -1}, "negative"),
        ({"sent_ns": -1}, "negative"),
        ({"last_frame_id": 2**64}, "too large"),
        ({"last_met_age_us": -1}, "negative"),
        ({"total_misses": -1}, "negative"),
        ({"nonce_echo": 2**32}, "too large"),
    ],
)
def test_encode_refuses_what_has_no_place(change, words):
    with pytest.raises(UsageError, match=words):
        dataclasses.replace(PDU, **change).encode()


def changed(index: int, value: int) -> bytes:
    return PAYLOAD[:index] + bytes([value]) + PAYLOAD[index + 1 :]


@pytest.mark.parametrize("version", [0, 2, 255])
def test_unknown_version(version):
    with pytest.raises(PduVersionError, match=f"version {version}"):
        SafetyPdu.decode(changed(0, version))


@pytest.mark.parametrize(
    ("permit", "complement"), [(1, 0xFF), (0, 0xFE), (1, 1), (0, 0), (2, 0xFD), (0xFE, 0x01)]
)
def test_permit_without_its_complement(permit, complement):
    payload = PAYLOAD[:4] + bytes([permit, complement]) + PAYLOAD[6:]
    with pytest.raises(PduPermitError, match="do not agree"):
        SafetyPdu.decode(payload)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "of 0 bytes"),
        (PAYLOAD[:-1], "of 49 bytes"),
        (PAYLOAD + b"\0", "of 51 bytes"),
        (changed(1, 5), "state 5"),
        (changed(2, 0x80), "causes 0x8000"),
        (changed(3, 0x40), "causes 0x0040"),
        (changed(6, 0x04), "flags 0x04"),
    ],
)
def test_malformed(payload, words):
    with pytest.raises(PduError, match=words):
        SafetyPdu.decode(payload)


@given(st.one_of(st.binary(max_size=80), st.binary(min_size=50, max_size=50)))
def test_any_bytes_decode_or_raise_the_typed_error(payload):
    try:
        pdu = SafetyPdu.decode(payload)
    except PduError:
        return
    assert pdu.encode() == payload


@given(st.integers(0, 5), st.integers(0, 255))
def test_no_change_of_a_leading_byte_reads_as_the_same_pdu(index, value):
    """What is read is either what was sent or differs visibly: no byte is ignored."""
    payload = changed(index, value)
    try:
        read = SafetyPdu.decode(payload)
    except PduError:
        return
    assert (read == PDU) == (payload == PAYLOAD)


def test_names_follow_the_numbers():
    assert PERMITTING_STATES == (1, 2)
    assert dataclasses.replace(PDU, causes=0).cause_names == "none"
    assert dataclasses.replace(PDU, causes=0b101010).cause_names == "DEADLINE+DATA+NOT_RECEIVED"


def test_degraded_is_bit_1_of_the_flags_and_no_cause():
    degraded = dataclasses.replace(PDU, degraded=True)
    assert degraded.encode() == PAYLOAD[:6] + b"\x03" + PAYLOAD[7:]
    assert SafetyPdu.decode(changed(6, 0x02)).degraded
    assert not SafetyPdu.decode(PAYLOAD).degraded
    with pytest.raises(UsageError, match="the flag for DEGRADED"):
        dataclasses.replace(PDU, causes=64).encode()
