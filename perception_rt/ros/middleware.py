"""Priority of the middleware's own threads.

publish() and take() lock what the middleware's threads lock too. While such a thread waits for a
core as SCHED_OTHER, a SCHED_FIFO thread waits for it: measured up to 17 ms in a take() on a busy
machine. So they get a priority just below that of the thread they could hold up.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from perception_rt.runtime.realtime import FIFO_REMEDY

_TASKS = Path("/proc/self/task")


def thread_ids() -> set[int]:
    """Kernel ids of all threads of this process."""
    return {int(task.name) for task in _TASKS.iterdir()}


def raise_threads(threads: Iterable[int], priority: int) -> str:
    """Give ``threads`` of this process SCHED_FIFO ``priority``, then read it back.

    Args:
        threads: kernel ids; one that has ended meanwhile is passed over.
        priority: 1 to 98.

    Returns:
        What was refused, with its remedy; empty when all have it.
    """
    for thread in threads:
        try:
            flags = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
            os.sched_setscheduler(thread, flags, os.sched_param(priority))
            granted = os.sched_getparam(thread).sched_priority == priority
        except ProcessLookupError:
            continue
        except PermissionError:
            granted = False
        if not granted:
            return f"middleware threads: SCHED_FIFO {priority} refused: {FIFO_REMEDY}"
    return ""
