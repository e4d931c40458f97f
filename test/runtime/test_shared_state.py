from __future__ import annotations

import os
import subprocess
import sys

import pytest

from perception_rt.core.frame import Outcome
from perception_rt.runtime.shared_state import SharedState, SourceState, WorkerState


@pytest.fixture
def state():
    block = SharedState.create()
    yield block
    block.close()


def test_a_new_block_is_zero(state):
    assert state.worker_state == WorkerState.STARTING
    assert state.source_state == SourceState.OK
    assert state.outcome_totals == [0] * 7
    assert state.message == ""


def test_every_field_keeps_its_own_value(state):
    fields = [
        name
        for name, value in vars(SharedState).items()
        if type(value).__name__ in ("_Int", "_Float", "_Text")
    ]
    values = {}
    for number, name in enumerate(fields, start=1):
        kind = type(vars(SharedState)[name]).__name__
        values[name] = {"_Int": number, "_Float": number / 8, "_Text": f"text {number}"}[kind]
        setattr(state, name, values[name])
    state.add_outcome(Outcome.FAILED)
    assert {name: getattr(state, name) for name in fields} == values
    assert state.outcome_totals == [0, 0, 0, 0, 0, 0, 1]


def test_negative_and_large_words_survive(state):
    state.first_exit_p99_ns = -1
    state.session_id = 2**62 + 3
    assert (state.first_exit_p99_ns, state.session_id) == (-1, 2**62 + 3)


def test_text_longer_than_its_area_is_cut(state):
    state.message = "x" * 10_000
    assert state.message == "x" * 8192
    assert state.report == ""


def test_a_second_process_sees_the_same_words(state):
    state.budget_ns = 33_000_000
    program = (
        "import sys\n"
        "from perception_rt.runtime.shared_state import SharedState\n"
        "s = SharedState(int(sys.argv[1]))\n"
        "s.delivered_frames = s.budget_ns + 1\n"
        "s.message = 'seen'\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(state.fd)], pass_fds=[state.fd], check=True, timeout=60
    )
    assert state.delivered_frames == 33_000_001
    assert state.message == "seen"


def test_close_frees_the_descriptor():
    block = SharedState.create()
    fd = block.fd
    block.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
