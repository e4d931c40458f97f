from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.config import RealtimeConfig
from perception_rt.core.errors import RealtimeError
from perception_rt.runtime.realtime import (
    RealtimeSetup,
    choose_cores,
    choose_watchdog_core,
    parse_cpu_list,
    reachable_cores,
)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("", []), ("\n", []), ("3\n", [3]), ("0,2-4,7", [0, 2, 3, 4, 7]), ("1-1", [1])],
)
def test_cpu_list(text, cores):
    assert parse_cpu_list(text) == cores


@pytest.mark.parametrize("text", ["a", "1-b", "1;2"])
def test_cpu_list_refuses_junk(text):
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpu_list(text)


@pytest.mark.parametrize(
    ("usable", "isolated", "wanted", "chosen"),
    [
        ({0, 1}, [], (-1, -1), (1, 0)),
        ({0}, [], (-1, -1), (0, 0)),
        ({0, 1, 2, 3}, [2, 3], (-1, -1), (2, 3)),
        ({0, 1, 2, 3}, [3], (-1, -1), (3, 2)),
        (set(range(8)), [], (-1, -1), (7, 6)),
        ({0, 1, 2, 3}, [2, 3], (1, -1), (1, 2)),
        ({0, 1}, [], (0, 0), (0, 0)),
        ({0, 1}, [5], (-1, -1), (1, 0)),
    ],
)
def test_choice_of_cores(usable, isolated, wanted, chosen):
    config = RealtimeConfig(capture_core=wanted[0], inference_core=wanted[1])
    assert choose_cores(config, usable, isolated) == chosen


@pytest.mark.parametrize(
    ("usable", "isolated", "core"),
    [
        (set(range(8)), [4, 5], 7),  # worker: 4, 5
        (set(range(6)), [4, 5], 3),
        (set(range(8)), [], 5),  # worker: 7, 6
        (set(range(8)), [5], 6),  # worker: 5, 7
        ({0, 1, 2, 3}, [1, 2, 3], 0),  # never an isolated one
        ({0, 1}, [], 1),
        ({2, 3}, [2, 3], 2),
        ({0}, [], 0),
    ],
)
def test_choice_of_the_watchdogs_core(usable, isolated, core):
    assert choose_watchdog_core(usable, isolated) == core


def test_isolated_cores_are_reached_though_nobody_is_given_them(monkeypatch):
    affinity = {0, 1}
    allowed = {0, 1, 3}

    def move(_pid, cores):
        if not set(cores) & allowed:
            raise OSError(22, "Invalid argument")
        affinity.clear()
        affinity.update(cores)

    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(affinity))
    monkeypatch.setattr("os.sched_setaffinity", move)
    assert reachable_cores([2, 3]) == {0, 1, 3}
    assert affinity == {0, 1}
    assert choose_cores(RealtimeConfig(), reachable_cores([2, 3]), [2, 3]) == (3, 1)


@given(
    usable=st.sets(st.integers(0, 31), min_size=1),
    isolated=st.lists(st.integers(0, 40), unique=True),
)
def test_chosen_cores_are_usable_and_differ_where_they_can(usable, isolated):
    capture, inference = choose_cores(RealtimeConfig(), usable, isolated)
    assert {capture, inference} <= usable
    assert (capture != inference) == (len(usable) > 1)


def in_thread(body):
    result = []
    thread = threading.Thread(target=lambda: result.append(body()))
    thread.start()
    thread.join()
    return result[0]


def test_fifo_and_affinity_are_granted_and_read_back():
    """As root this must be granted: a refusal is a failure, not a skip."""
    if os.geteuid() != 0:
        pytest.skip("needs root (or CAP_SYS_NICE) for SCHED_FIFO")
    setup = RealtimeSetup(RealtimeConfig())

    def body():
        rights = setup.apply_to_thread("probe", 41, setup.capture_core)
        return rights, os.sched_getscheduler(0), os.sched_getparam(0).sched_priority

    rights, policy, priority = in_thread(body)
    assert (rights.policy, rights.priority, rights.cores) == (
        "SCHED_FIFO",
        41,
        [setup.capture_core],
    )
    assert policy == os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    assert priority == 41
    assert setup.report.missing == []


def test_a_refused_priority_is_named_with_its_remedy():
    setup = RealtimeSetup(RealtimeConfig(required=True))
    in_thread(lambda: setup.apply_to_thread("probe", 1000, setup.capture_core))
    assert len(setup.report.missing) == 1
    assert setup.report.missing[0].startswith("probe thread: SCHED_FIFO 1000 refused")
    assert "LimitRTPRIO" in setup.report.missing[0]
    with pytest.raises(RealtimeError, match=r"realtime\.required is set and was refused: probe"):
        setup.check()


def test_a_core_that_is_not_there_is_named():
    setup = RealtimeSetup(RealtimeConfig())
    in_thread(lambda: setup.apply_to_thread("probe", 41, 999))
    assert any("affinity to core 999 refused" in line for line in setup.report.missing)
    setup.check()


def test_switched_off_nothing_is_asked_for():
    setup = RealtimeSetup(RealtimeConfig(enabled=False, required=True))
    rights = in_thread(lambda: setup.apply_to_thread("probe", 41, 0))
    setup.lock_memory()
    setup.freeze_gc()
    setup.check()
    assert rights.policy == "SCHED_OTHER"
    assert setup.report.locked_kib == 0
    assert gc.isenabled()


def test_memory_is_locked_and_gc_is_frozen():
    """In a process of its own: neither can be taken back cleanly. As root a refusal is a
    failure.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root (or CAP_IPC_LOCK) for mlockall")
    program = (
        "import gc, json\n"
        "from perception_rt.core.config import RealtimeConfig\n"
        "from perception_rt.runtime.realtime import RealtimeSetup\n"
        "s = RealtimeSetup(RealtimeConfig())\n"
        "s.lock_memory(); s.freeze_gc()\n"
        "r = s.report\n"
        "print(json.dumps([r.locked_kib, r.gc_frozen, gc.isenabled(), r.missing]))\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    locked_kib, frozen, enabled, missing = json.loads(out.stdout)
    assert locked_kib > 1000
    assert frozen > 1000
    assert not enabled
    assert missing == []


def test_a_child_dies_with_its_parent():
    child = (
        "import os, sys, time\n"
        "from perception_rt.runtime.realtime import die_with_parent\n"
        "die_with_parent(int(sys.argv[1]))\n"
        "print('up', os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = (
        "import os, subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())])\n"
        "p.wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    word, pid = process.stdout.readline().split()
    assert word == "up"
    child_fd = os.pidfd_open(int(pid))
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    # A pidfd becomes readable when its process has ended.
    assert select.select([child_fd], [], [], 10)[0] == [child_fd]
    os.close(child_fd)
