"""Priorities of threads that are not ours."""

from __future__ import annotations

import os
import threading

import pytest

from perception_rt.ros.middleware import raise_threads, thread_ids


@pytest.fixture
def other():
    """Kernel id of a thread that waits."""
    done, known = threading.Event(), threading.Event()
    seen: list[int] = []

    def wait() -> None:
        seen.append(threading.get_native_id())
        known.set()
        done.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    known.wait()
    yield seen[0]
    done.set()
    thread.join()


def test_threads_are_listed(other: int) -> None:
    assert {other, threading.get_native_id()} <= thread_ids()


@pytest.mark.rt
def test_a_thread_is_raised_and_this_one_is_not(other: int) -> None:
    missing = raise_threads([other], 10)
    if os.geteuid() != 0 and missing:
        pytest.skip(missing)
    assert missing == ""
    assert os.sched_getscheduler(other) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO
    assert os.sched_getparam(other).sched_priority == 10
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_thread_that_has_ended_is_passed_over() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    ended = thread.native_id
    thread.join()
    assert ended is not None
    assert raise_threads([ended], 10) == ""


def test_a_refusal_names_its_remedy(other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    missing = raise_threads([other], 10)
    assert missing.startswith("middleware threads: SCHED_FIFO 10 refused: give ")
