"""What each JetPack brings: Jetson Linux, TensorRT, CUDA, Python, GPUs and accelerators.

Sources: NVIDIA's release notes and its page on TensorRT 11.4.1 for Jetson, which names JetPack
7.2.2 as the first with TensorRT 11 (that row says no more of Jetson Linux and CUDA than is known).
This project has tried none of it on a Jetson.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from perception_rt.core.errors import UsageError

MIN_TENSORRT = (8, 6)
NEXT_TENSORRT = (12, 0)
"""TensorRT from ``MIN_TENSORRT`` on, below ``NEXT_TENSORRT``, has the API that is used here."""

_STRONGLY_TYPED = (10, 0)
_DLA_GAP = (10, 13), (11, 4, 1)


@dataclass(frozen=True)
class JetPack:
    """One release.

    Attributes:
        version: of JetPack.
        jetson_linux: release of Jetson Linux (L4T).
        ubuntu, python: of its root file system.
        cuda, tensorrt: versions it installs.
        gpus: Jetson family and compute capability times ten.
    """

    version: str
    jetson_linux: str
    ubuntu: str
    python: str
    cuda: str
    tensorrt: str
    gpus: tuple[tuple[str, int], ...]


_ORIN = ("Orin", 87)
_THOR = ("Thor", 110)

JETPACKS = (
    JetPack("6.0", "36.3", "22.04", "3.10", "12.2", "8.6.2", (_ORIN,)),
    JetPack("6.1", "36.4", "22.04", "3.10", "12.6", "10.3.0", (_ORIN,)),
    JetPack("6.2", "36.4.3", "22.04", "3.10", "12.6", "10.3.0", (_ORIN,)),
    JetPack("7.0", "38.2", "24.04", "3.12", "13.0", "10.13.3", (_THOR,)),
    JetPack("7.1", "38.4", "24.04", "3.12", "13.0", "10.13.3", (_THOR,)),
    JetPack("7.2", "39.2", "24.04", "3.12", "13.2", "10.16.1", (_ORIN, _THOR)),
    JetPack("7.2.2", "39", "24.04", "3.12", "13", "11.4.1", (_ORIN, _THOR)),
)


def find_jetpack(version: str) -> JetPack:
    """The row of a JetPack version; a patch release falls under the newest row at or below it.

    Raises:
        UsageError: no row of that major and minor version.
    """
    asked = parse_version(version)
    rows = [
        jetpack
        for jetpack in JETPACKS
        if parse_version(jetpack.version)[:2] == asked[:2]
        and parse_version(jetpack.version) <= asked
    ]
    if not rows:
        known = ", ".join(jetpack.version for jetpack in JETPACKS)
        raise UsageError(f"JetPack '{version}' is unknown: use one of {known}")
    return rows[-1]


def parse_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version text: ``10.13.3.9`` is (10, 13, 3, 9), nonsense is ()."""
    match = re.match(r"\d{1,9}(?:\.\d{1,9})*", text.strip())
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def strongly_typed(tensorrt: str) -> bool:
    """True where a network's types are those of its ONNX file, whatever the builder's flags."""
    return parse_version(tensorrt) >= _STRONGLY_TYPED


def tensorrt_refusal(tensorrt: str) -> str:
    """Why a TensorRT version cannot be used; empty when it can."""
    version = parse_version(tensorrt)
    if MIN_TENSORRT <= version < NEXT_TENSORRT:
        return ""
    low, high = (".".join(map(str, part)) for part in (MIN_TENSORRT, NEXT_TENSORRT))
    return (
        f"TensorRT {tensorrt or 'of unknown version'} is not supported, {low} to below {high} is: "
        "install the one of your JetPack (docs/jetson.md)"
    )


def dla_refusal(tensorrt: str, sm: int = _ORIN[1]) -> str:
    """Why the deep learning accelerator cannot be used; empty when it can.

    Args:
        tensorrt: version text.
        sm: compute capability of the machine's GPU times ten.
    """
    if sm != _ORIN[1]:
        return (
            f"a GPU with SM {sm // 10}.{sm % 10} comes without deep learning accelerator (only "
            "Orin has one): leave out --dla-core"
        )
    low, high = _DLA_GAP
    if low <= parse_version(tensorrt) < high:
        return (
            f"TensorRT {tensorrt} has no DLA on Jetson (10.13 to 11.4.0 lack it): leave out "
            "--dla-core, or use JetPack 6.2, or 7.2.2 and later"
        )
    return ""
