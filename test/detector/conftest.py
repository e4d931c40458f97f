"""Fixtures of the detector's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_model import write_tiny_model

from perception_rt.detector.model import Model, load_model


@pytest.fixture
def tiny_dir(tmp_path: Path) -> Path:
    """A fresh copy of the tiny model, free to be damaged."""
    return write_tiny_model(tmp_path / "tiny")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The tiny model, loaded; not to be damaged."""
    return load_model(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="session")
def nanodet(repository: Path) -> Model:
    """The model that comes with the repository."""
    return load_model(repository / "models" / "nanodet_g_416_coco80")
