"""Fixtures of the detector's tests."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path

import pytest
from support.standin_driver import NOTHING_LEFT, StandInDriver
from support.standin_trt import StandInTrt
from support.tiny_model import write_tiny_model

from perception_rt.core.config import GpuOptions
from perception_rt.detector import tensorrt_backend
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


# The TensorRT backend on the stand-in driver. Only tests marked ``gpu_checks`` use these.


def missing(reason):
    """Nothing of this may be skipped where it is meant to run."""
    if Path(sys.prefix).name == ".venv-gpu":
        pytest.fail(f"{reason}: run it by scripts/setup_gpu_checks.sh COMMAND...")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def cuda():
    try:
        return importlib.import_module("pycuda.driver")
    except ImportError as error:
        missing(f"no pycuda ({error})")


@pytest.fixture
def driver(cuda):
    try:
        driver = StandInDriver()
    except OSError as error:
        missing(f"not the stand-in driver: {error}")
    driver.reset()
    yield driver
    gc.collect()
    assert driver.counts().left == NOTHING_LEFT
    driver.reset()


@pytest.fixture
def trt(driver):
    return StandInTrt(driver)


@pytest.fixture
def without_graphs(monkeypatch):
    """cuda-bindings is not installed."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)


@pytest.fixture
def make(trt, cuda, tiny):
    """Make backends of the tiny model; each is closed at the end of the test."""
    backends = []

    def one(model=tiny, plans=None, **arguments):
        backend = tensorrt_backend.TensorRtBackend(
            model,
            GpuOptions(),
            plans or [segment.read() for segment in model.segments],
            trt=trt,
            cuda=cuda,
            **arguments,
        )
        backends.append(backend)
        return backend

    yield one
    for backend in backends:
        assert backend.close(10.0)
    backends.clear()
