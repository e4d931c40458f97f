"""Real-time rights of threads and of the process: asked for, then read back.

Nothing here is on the hot path: every function runs before a thread enters its loop. A right that
was refused is named together with its remedy; ``RealtimeConfig.required`` decides whether that is
a warning or an error.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

from perception_rt.core.config import RealtimeConfig
from perception_rt.core.errors import RealtimeError

_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4
_PR_SET_PDEATHSIG = 1
_CPU_ROOT = Path("/sys/devices/system/cpu")

FIFO_REMEDY = "give LimitRTPRIO=98 (systemd), rtprio 98 in /etc/security/limits.d, or CAP_SYS_NICE"
MLOCK_REMEDY = (
    "give LimitMEMLOCK=infinity (systemd), memlock unlimited in limits.d, or CAP_IPC_LOCK"
)


def parse_cpu_list(text: str) -> list[int]:
    """Cores of a kernel CPU list such as ``0,2-3``; an empty text is no core.

    Raises:
        ValueError: the text is not such a list.
    """
    cores: list[int] = []
    for part in text.strip().split(","):
        if not part:
            continue
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def isolated_cores(root: Path = _CPU_ROOT) -> list[int]:
    """Cores that the kernel was booted to keep free (isolcpus); empty where the file is absent."""
    try:
        return parse_cpu_list((root / "isolated").read_text())
    except OSError:
        return []


def reachable_cores(isolated: list[int]) -> set[int]:
    """Cores that this process may be bound to: those it runs on, and of the isolated ones, which
    no process is given by itself, those that the kernel lets the calling thread move to.
    """
    own = os.sched_getaffinity(0)
    reached = set(own)
    for core in isolated:
        try:
            os.sched_setaffinity(0, {core})
        except OSError:  # outside this process's cpuset, or offline
            continue
        reached.add(core)
    os.sched_setaffinity(0, own)
    return reached


def choose_cores(config: RealtimeConfig, usable: set[int], isolated: list[int]) -> tuple[int, int]:
    """The cores of (capture and deadline, inference).

    A core that is asked for is taken as it is. Else capture gets the first isolated core, or the
    last usable one; inference gets the next isolated core, or the last usable one that capture
    does not have (core 0 handles most interrupts), or the same core where there is only one.
    """
    free = [c for c in isolated if c in usable]
    capture = config.capture_core
    if capture < 0:
        capture = free[0] if free else max(usable)
    inference = config.inference_core
    if inference < 0:
        others = [c for c in free if c != capture]
        inference = others[0] if others else max(usable - {capture}, default=capture)
    return capture, inference


def choose_watchdog_core(usable: set[int], isolated: list[int]) -> int:
    """The core of the watchdog: the last usable one that is not isolated and that the worker does
    not choose by itself; where there is none, that of the worker's capture thread.
    """
    worker = choose_cores(RealtimeConfig(), usable, isolated)
    return max(usable - {*isolated, *worker}, default=worker[0])


@dataclass
class ThreadRights:
    """What one thread asked for, and what reading back showed.

    Attributes:
        name: of the thread.
        tid: kernel thread id.
        policy: ``SCHED_FIFO`` or ``SCHED_OTHER``, read back.
        priority: read back, 0 for SCHED_OTHER.
        cores: read back.
    """

    name: str
    tid: int
    policy: str
    priority: int
    cores: list[int]


@dataclass
class RealtimeReport:
    """Rights of a whole process. ``missing`` has one line per refused right, with its remedy."""

    threads: list[ThreadRights] = field(default_factory=list)
    locked_kib: int = 0
    gc_frozen: int = 0
    missing: list[str] = field(default_factory=list)


class RealtimeSetup:
    """Applies a RealtimeConfig to the threads of this process and collects the report.

    Args:
        config: what to ask for.
    """

    def __init__(self, config: RealtimeConfig) -> None:
        self.config = config
        self.report = RealtimeReport()
        self._guard = threading.Lock()
        isolated = isolated_cores() if config.enabled else []
        self.capture_core, self.inference_core = choose_cores(
            config, reachable_cores(isolated), isolated
        )

    def apply_to_thread(self, name: str, priority: int, core: int) -> ThreadRights:
        """Give the calling thread SCHED_FIFO ``priority`` and affinity to ``core``, then read
        both back.

        SCHED_RESET_ON_FORK keeps threads and processes that it starts from inheriting the policy.
        """
        missing: list[str] = []
        if self.config.enabled:
            try:
                os.sched_setaffinity(0, {core})
            except OSError as error:
                missing.append(
                    f"{name} thread: affinity to core {core} refused ({error.strerror}): "
                    f"choose one of {sorted(os.sched_getaffinity(0))}"
                )
            try:
                flags = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
                os.sched_setscheduler(0, flags, os.sched_param(priority))
            except (OSError, ValueError) as error:
                missing.append(
                    f"{name} thread: SCHED_FIFO {priority} refused ({error}): {FIFO_REMEDY}"
                )
        policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
        rights = ThreadRights(
            name=name,
            tid=threading.get_native_id(),
            policy="SCHED_FIFO" if policy == os.SCHED_FIFO else "SCHED_OTHER",
            priority=os.sched_getparam(0).sched_priority,
            cores=sorted(os.sched_getaffinity(0)),
        )
        granted = rights.policy == "SCHED_FIFO" and rights.priority == priority
        if self.config.enabled and not missing and not (granted and rights.cores == [core]):
            missing.append(
                f"{name} thread: asked for SCHED_FIFO {priority} on core {core}, read back "
                f"{rights.policy} {rights.priority} on {rights.cores}: {FIFO_REMEDY}"
            )
        with self._guard:
            self.report.threads.append(rights)
            self.report.missing.extend(missing)
        return rights

    def lock_memory(self) -> None:
        """Lock the pages that are resident now, and later ones as they are touched (MCL_ONFAULT).

        Locking everything mapped would pin about 1 GB of libraries that are never used.
        """
        if not self.config.enabled:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        refused = libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT) != 0
        reason = os.strerror(ctypes.get_errno())
        self.report.locked_kib = locked_kib()
        if refused or self.report.locked_kib == 0:
            self.report.missing.append(f"mlockall refused ({reason}): {MLOCK_REMEDY}")

    def freeze_gc(self) -> None:
        """Collect, move what is left out of the collector's sight, and switch it off."""
        if not self.config.enabled:
            return
        gc.collect()
        gc.freeze()
        gc.disable()
        self.report.gc_frozen = gc.get_freeze_count()

    def check(self) -> None:
        """Refuse to go on where a required right is missing.

        Raises:
            RealtimeError: ``required`` is set and something was refused.
        """
        if self.config.required and self.report.missing:
            raise RealtimeError(
                "realtime.required is set and was refused: " + "; ".join(self.report.missing)
            )


def locked_kib(status: Path = Path("/proc/self/status")) -> int:
    """Locked memory of this process in KiB (VmLck)."""
    for line in status.read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1])
    return 0


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; leave at once if it
    already has.

    Args:
        parent_pid: process that started this one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)
