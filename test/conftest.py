"""Fixtures and settings of all tests."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]

# No deadline: the machine may be busy, and a time is never what a unit test is about.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of recordings beside the checkout; PERCEPTION_RT_SHARED_DATA names another one."""
    named = os.environ.get("PERCEPTION_RT_SHARED_DATA")
    path = Path(named) if named else ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no recordings at {path} (set PERCEPTION_RT_SHARED_DATA)")
    return path
