from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.errors import UsageError
from perception_rt.ros.params_file import Entry, read_entries, values_for

SHIPPED = Path(__file__).resolve().parents[2] / "config" / "perception.yaml"


@pytest.mark.parametrize(
    ("name", "node", "fits"),
    [
        ("/detector", "/detector", True),
        ("detector", "/detector", True),
        ("/detector", "/left/detector", False),
        ("/left/detector", "/left/detector", True),
        ("/*/detector", "/left/detector", True),
        ("/*/detector", "/detector", False),
        ("/*/detector", "/front/left/detector", False),
        ("/**/detector", "/detector", True),
        ("/**/detector", "/front/left/detector", True),
        ("/**", "/front/left/detector", True),
        ("/**/detectr", "/detector", False),
        ("/det*", "/detector", True),
        ("/det.ctor", "/detector", False),
    ],
)
def test_names_and_wildcards(name, node, fits):
    assert Entry(name, {}).fits(node) is fits


def test_nested_names_and_dotted_values(tmp_path):
    file = tmp_path / "params.yaml"
    file.write_text(
        "left:\n"
        "  detector:\n"
        "    ros__parameters: {deadline_ms: 50.0, realtime: {enabled: false}}\n"
        "/**/detector:\n"
        "  ros__parameters:\n"
        "    deadline_ms: 80.0\n"
    )
    entries = read_entries(file)
    assert [entry.name for entry in entries] == ["/left/detector", "/**/detector"]
    assert values_for(entries, "/left/detector") == {
        "deadline_ms": 80.0,
        "realtime.enabled": False,
    }
    assert values_for(entries, "/detector") == {"deadline_ms": 80.0}


def test_the_shipped_file_speaks_of_both_nodes():
    entries = read_entries(SHIPPED)
    assert values_for(entries, "/detector")["deadline_ms"] == 100.0
    assert values_for(entries, "/front/watchdog")["pdu.port"] == 15020


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "has no 'ros__parameters' under 'its top'"),
        ("", "has no 'ros__parameters' under 'its top'"),
        ("{}", "holds no parameters"),
        ("/detector:\n  deadline_ms: 1.0\n", "under '/detector/deadline_ms'"),
        ("/detector:\n  ros__parameters: 3\n", "'/detector' lists no parameters"),
        ("a: [\n", "cannot be read: while parsing"),
        ("\0", "cannot be read: unacceptable character"),
    ],
)
def test_what_is_no_parameters_file_is_named(tmp_path, text, reason):
    file = tmp_path / "params.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=reason) as caught:
        read_entries(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_and_a_folder(tmp_path):
    with pytest.raises(UsageError, match="does not exist: give the path"):
        read_entries(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match=r"is a folder: give a \.yaml file"):
        read_entries(tmp_path)


@given(st.text(max_size=60))
def test_any_text_is_entries_or_a_usage_error(tmp_path_factory, text):
    file = tmp_path_factory.mktemp("params") / "params.yaml"
    file.write_text(text, encoding="utf-8", errors="replace")
    with contextlib.suppress(UsageError):
        assert read_entries(file)
