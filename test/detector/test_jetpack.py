from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.errors import UsageError
from perception_rt.detector.jetpack import (
    JETPACKS,
    dla_refusal,
    find_jetpack,
    parse_version,
    strongly_typed,
    tensorrt_refusal,
)


def test_every_jetpack_has_a_tensorrt_that_is_supported() -> None:
    assert [(j.version, j.tensorrt) for j in JETPACKS] == [
        ("6.0", "8.6.2"),
        ("6.1", "10.3.0"),
        ("6.2", "10.3.0"),
        ("7.0", "10.13.3"),
        ("7.1", "10.13.3"),
        ("7.2", "10.16.1"),
        ("7.2.2", "11.4.1"),
    ]
    assert [tensorrt_refusal(j.tensorrt) for j in JETPACKS] == [""] * 7
    assert {j.python for j in JETPACKS if j.version < "7"} == {"3.10"}
    assert {j.python for j in JETPACKS if j.version >= "7"} == {"3.12"}


@pytest.mark.parametrize(
    ("asked", "row"),
    [("6.0", "6.0"), ("6.2.1", "6.2"), ("7.2", "7.2"), ("7.2.1", "7.2"), ("7.2.2", "7.2.2"),
     ("7.2.9", "7.2.2"), (" 7.1 ", "7.1")],
)  # fmt: skip
def test_a_patch_release_falls_under_its_row(asked: str, row: str) -> None:
    assert find_jetpack(asked).version == row


@pytest.mark.parametrize("asked", ["5.1", "7.3", "8.0", "6", "", "latest", "-6.0"])
def test_an_unknown_jetpack_is_refused_with_those_that_are_known(asked: str) -> None:
    with pytest.raises(UsageError, match=r"unknown: use one of 6\.0, 6\.1, .*7\.2\.2$"):
        find_jetpack(asked)


@pytest.mark.parametrize(
    ("tensorrt", "allowed"),
    [("8.6.1", True), ("10.3.0", True), ("10.12.9", True), ("10.13.0", False), ("10.16.1", False),
     ("11.0.0", False), ("11.4.0.106", False), ("11.4.1", True), ("11.5", True)],
)  # fmt: skip
def test_which_tensorrt_has_a_dla_on_orin(tensorrt: str, allowed: bool) -> None:
    assert (dla_refusal(tensorrt) == "") is allowed


def test_a_gpu_without_dla_is_named() -> None:
    assert "SM 11.0 comes without" in dla_refusal("11.4.1", 110)


@pytest.mark.parametrize(
    ("version", "words"),
    [("8.5.3", "TensorRT 8.5.3 is not supported, 8.6 to below 12"), ("12.0.1", "12.0.1 is not"),
     ("", "TensorRT of unknown version"), ("7", "TensorRT 7 is not")],
)  # fmt: skip
def test_other_tensorrt_versions_are_refused(version: str, words: str) -> None:
    assert words in tensorrt_refusal(version)


def test_networks_are_strongly_typed_from_10_on() -> None:
    assert [strongly_typed(v) for v in ("8.6.2", "9.3", "10.0.1", "11.4")] == [
        False,
        False,
        True,
        True,
    ]


@given(st.lists(st.integers(0, 999_999_999), min_size=1, max_size=6), st.text())
def test_versions_are_their_leading_numbers(numbers: list[int], tail: str) -> None:
    text = ".".join(map(str, numbers))
    assert parse_version(text) == tuple(numbers)
    parse_version(tail)  # never raises
    assert parse_version(text + "rc1") == tuple(numbers)
