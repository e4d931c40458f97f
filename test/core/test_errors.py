"""One base, exit codes by sysexits."""

from __future__ import annotations

import pytest

from perception_rt.core import errors


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("PerceptionRtError", 70),
        ("UsageError", 64),
        ("InputError", 65),
        ("ModelError", 65),
        ("UnavailableError", 69),
        ("BackendError", 70),
        ("RealtimeError", 77),
    ],
)
def test_exit_codes(name, code):
    error = getattr(errors, name)
    assert issubclass(error, errors.PerceptionRtError)
    assert error.exit_code == code
    assert str(error("what, where, what to do")) == "what, where, what to do"


def test_every_error_is_listed_here():
    leaves = {error.__name__ for error in errors.PerceptionRtError.__subclasses__()}
    assert leaves == {
        "UsageError", "InputError", "ModelError", "UnavailableError", "BackendError",
        "RealtimeError",
    }  # fmt: skip
