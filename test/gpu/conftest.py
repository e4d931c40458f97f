"""The contract tests of the GPU code. They run only on a GPU: elsewhere each is skipped with the
reason. ``scripts/gpu_check.sh`` runs them part by part.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import spin_trt
from support.gpu_driver import Driver, find_gpu
from support.gpu_report import Figure, record
from support.tiny_model import write_tiny_model

from perception_rt.core.clock import NS_PER_S, MonotonicClock
from perception_rt.core.config import GpuOptions
from perception_rt.detector.gpu_facts import GpuFacts
from perception_rt.detector.model import Model, load_model

_GPU = find_gpu()
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is here when there is no GPU."""
    if isinstance(_GPU, str):
        skip = pytest.mark.skip(reason=_GPU)
        for item in items:
            if _HERE in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def gpu() -> GpuFacts:
    """The device."""
    assert isinstance(_GPU, GpuFacts)
    return _GPU


@pytest.fixture(scope="session")
def driver() -> Iterator[Driver]:
    """Driver calls. A reference to the primary context is held, so that it is not made anew by
    each test; it is current in no thread.
    """
    driver = Driver()
    driver.retain()
    yield driver
    driver.release()


@pytest.fixture
def in_context(driver: Driver) -> Iterator[Driver]:
    """Driver calls, with the primary context current in the test's thread."""
    driver.push(driver.retain())
    yield driver
    driver.pop()
    driver.release()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Three tiny segments."""
    return load_model(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def figure() -> Iterator[Callable[..., None]]:
    """Record figures; at the end fail if one is above its target."""
    above = []

    def keep(name: str, value: float | str, target: float | None = None) -> None:
        row = Figure(name, value, target)
        record(row)
        if not row.met:
            above.append(f"{name}: {value} is above {target}")

    yield keep
    assert not above, "; ".join(above)


@pytest.fixture
def realtime(figure: Callable[..., None]) -> Iterator[Callable[[], None]]:
    """Priorities as in the worker, where they are granted: 75 here, 70 in the GPU thread, for
    which this is the ``thread_init``. What a wake-up costs depends on them.
    """
    refused = []

    def fifo(priority: int) -> None:
        policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        try:
            os.sched_setscheduler(0, policy, os.sched_param(priority))
        except OSError as error:
            refused.append(str(error))

    fifo(75)
    yield lambda: fifo(70)
    figure("scheduling", f"SCHED_FIFO was refused: {refused[0]}" if refused else "SCHED_FIFO")
    os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))


@pytest.fixture
def start(driver: Driver, model: Model) -> Iterator[Callable[..., Any]]:
    """Make TensorRtBackends of spin segments; each is closed at the end of the test."""
    try:
        import pycuda.driver  # noqa: F401
    except ImportError as error:
        pytest.skip(f"pycuda is missing: {error}")
    from perception_rt.detector.tensorrt_backend import TensorRtBackend

    open_backends: list[Any] = []

    def make(
        plans: list[bytes] | None = None, spin_ns: int = 0, **arguments: Any
    ) -> TensorRtBackend:
        backend = TensorRtBackend(
            model, GpuOptions(), plans or spin_trt.plans(model, spin_ns), trt=spin_trt, **arguments
        )
        open_backends.append(backend)
        return backend

    yield make
    while open_backends:
        assert open_backends.pop().close(10.0), "the GPU thread did not end in 10 s"
    gc.collect()


@pytest.fixture
def now() -> Callable[[], int]:
    """CLOCK_MONOTONIC, nanoseconds."""
    return MonotonicClock().now


@pytest.fixture
def finish(now: Callable[[], int]) -> Callable[[Any, int], None]:
    """Wait until a segment is ready, 10 s at most."""

    def wait(backend: Any, k: int) -> None:
        limit_ns = now() + 10 * NS_PER_S
        while not backend.ready(k):
            backend.wait_until(limit_ns)
            assert now() < limit_ns, f"segment {k} was not ready in 10 s"

    return wait
