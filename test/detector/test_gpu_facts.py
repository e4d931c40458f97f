from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from perception_rt.core.errors import UnavailableError
from perception_rt.detector.gpu_facts import GpuFacts, driver_release, probe_gpu


class Driver:
    """Stands for libcuda: answers what it is told, writes through the pointers it is given."""

    def __init__(self, fail: str = "", code: int = 0) -> None:
        self.fail, self.code = fail, code

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            if name == self.fail:
                return self.code
            if name == "cuDeviceGetName":
                args[0].value = b"Orin"
            elif name == "cuDeviceGetAttribute":
                args[0]._obj.value = {75: 8, 76: 7}[args[1]]
            elif name == "cuDriverGetVersion":
                args[0]._obj.value = 12060
            elif name == "cuGetErrorName":
                args[1]._obj.value = b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
            return 0

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    def use(fail: str = "", code: int = 0) -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(fail, code))

    return use


def test_what_the_driver_says(driver, tmp_path: Path) -> None:
    driver()
    facts = probe_gpu(root=tmp_path)
    assert facts == GpuFacts("Orin", 87, "CUDA 12.6")
    assert facts.cuda_major == 12


def test_without_a_driver_it_says_how_to_get_one() -> None:
    with pytest.raises(UnavailableError, match=r"no NVIDIA driver \(libno_su.*install") as error:
        probe_gpu("libno_such_cuda.so.1")
    assert error.value.exit_code == 69


def test_a_driver_without_a_gpu_is_told_apart(driver) -> None:
    driver("cuInit", 100)
    with pytest.raises(UnavailableError, match=r"sees no GPU.*CUDA_VISIBLE_DEVICES"):
        probe_gpu()


CALLS = (
    "cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute", "cuDriverGetVersion",
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_refusal_names_the_call_and_the_error(call: str, driver) -> None:
    driver(call, 803)
    with pytest.raises(UnavailableError, match=rf"refuses {call} \(CUDA_ERROR_SYSTEM_DRIVER_MIS"):
        probe_gpu()


@pytest.mark.parametrize(
    ("file", "text", "release"),
    [
        (
            "etc/nv_tegra_release",
            "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: x",
            "L4T 36.4.3",
        ),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  560.35.03  Fri Aug 16\nGCC 12",
            "560.35.03",
        ),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
            "570.86.15",
        ),
        ("proc/driver/nvidia/version", "nonsense", ""),
    ],
)
def test_the_drivers_release(file: str, text: str, release: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert driver_release(tmp_path) == release
    assert driver_release(tmp_path / "nowhere") == ""
