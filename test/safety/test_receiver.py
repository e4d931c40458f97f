"""The process safety_receiver: command line, and the real process on a real socket."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from perception_rt.core.clock import NS_PER_MS
from perception_rt.safety.e2e import Protector
from perception_rt.safety.judge import Transition
from perception_rt.safety.pdu import SafetyPdu
from perception_rt.safety.receiver import Journal, main, take_priority, without_ros_arguments
from perception_rt.safety.transports import UdpReceiver, UdpSender

DATA_ID = 0x77
REALTIME = os.geteuid() == 0
SCHEDULING_MS = 20 if REALTIME else 250
"""Allowance on top of what the receiver promises, for two cores that other tests load. With
SCHED_FIFO it covers other real-time tests; without, the whole run queue."""


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([], []),
        (["--port", "0"], ["--port", "0"]),
        (["--port", "0", "--ros-args", "-r", "__node:=x"], ["--port", "0"]),
        (["--ros-args", "-p", "a:=1", "--", "--port", "0"], ["--port", "0"]),
        (["--ros-args", "--", "--json", "f", "--ros-args", "x"], ["--json", "f"]),
        (["--ros-args"], []),
    ],
)
def test_ros_arguments_are_cut_out(given, kept):
    assert without_ros_arguments(given) == kept


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "x"], "argument --port: invalid int value: 'x'; see --help"),
        (["--port", "70000"], "UDP port 70000 is out of range"),
        (["--data-id", "zz"], "--data-id 'zz' is not a number"),
        (["--data-id", "0x100000000"], "does not fit profile 4"),
        (["--for", "0"], "--for must be above 0 s"),
        (["--for", "nan"], "--for must be above 0 s"),
        (["--priority", "99"], "--priority must be from 0 to 98"),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["--json", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
        (["--log", "/nowhere/x.log"], "cannot write /nowhere/x.log"),
    ],
)
def test_usage_errors_are_one_line_and_64(arguments, words, capsys):
    assert main(arguments) == 64
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_port_in_use_is_one_line_and_69(capsys):
    other = UdpReceiver("127.0.0.1", 0)
    assert main(["--port", str(other.port)]) == 69
    other.close()
    assert re.fullmatch(
        r"safety_receiver: safety link: cannot listen on 127.0.0.1:\d+ .*\n",
        capsys.readouterr().err,
    )


def test_a_full_disk_is_counted_and_stops_nothing():
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        journal = Journal(full)
        journal.transition(Transition(5, "permit", "withdrawn", "granted", "E2E VALID", 0))
        summary = journal.summary()
        assert summary["log_errors"] == 1
        assert summary["transition_count"] == 1
        assert summary["transitions"][0]["monotonic_ns"] == 5
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what is buffered can leave


class Process:
    """The receiver as users start it, and a sender whose PDU leaves each 20 ms while it is on."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self.json, self.log = folder / "summary.json", folder / "log.jsonl"
        command = [sys.executable, "-m", "perception_rt.safety.receiver", "--port", str(port)]
        command += ["--data-id", hex(DATA_ID), "--json", str(self.json), "--log", str(self.log)]
        command += [*options, "--ros-args", "-r", "__node:=safety_receiver"]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        match = re.fullmatch(
            r"safety_receiver: listening on 127.0.0.1:(\d+), data id 0x00000077\n", line
        )
        assert match, line
        self.port = int(match[1])

    def transitions(self) -> list[dict]:
        lines = self.log.read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["event"] == "transition"]

    def wait_for(self, after: str, since_ns: int = 0) -> dict:
        """The first permit transition to ``after`` later than ``since_ns``, within 10 s."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            for transition in self.transitions():
                if transition["after"] == after and transition["monotonic_ns"] > since_ns:
                    return transition
            time.sleep(0.01)
        raise AssertionError(f"not {after} after {since_ns}: {self.transitions()}")

    def stop(self, number: int = signal.SIGTERM) -> dict:
        self.popen.send_signal(number)
        assert self.popen.wait(10) == 0
        return json.loads(self.json.read_text())

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


class Sender(threading.Thread):
    """Stands for the watchdog."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.permit = True
        self.began_ns = self.returned_ns = self.first_denied_ns = 0
        self._link, self._protector = UdpSender("127.0.0.1", port), Protector(DATA_ID)
        self._off = threading.Event()
        self.start()

    def run(self) -> None:
        if REALTIME:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))  # of this thread only
        next_ns = time.monotonic_ns()
        while not self._off.wait(max(0, next_ns - time.monotonic_ns()) / 1e9):
            permit = self.permit
            now_ns = time.monotonic_ns()
            pdu = SafetyPdu(1 if permit else 3, 0, permit, True, 5, now_ns, 1, 1, 0, 0, 0)
            assert self._link.send(self._protector.protect(pdu.encode()))
            self.began_ns, self.returned_ns = now_ns, time.monotonic_ns()
            if not permit and not self.first_denied_ns:
                self.first_denied_ns = self.returned_ns
            next_ns += 20 * NS_PER_MS

    def off(self) -> None:
        self._off.set()
        self.join()
        self._link.close()


@pytest.fixture
def process(tmp_path):
    started = Process(tmp_path, "--accept-simulated")
    yield started
    started.close()


@pytest.mark.integration
def test_sender_killed_and_restarted(process):
    sender = Sender(process.port)
    process.wait_for("granted")
    sender.off()
    withdrawn = process.wait_for("withdrawn", sender.began_ns)
    assert withdrawn["reason"] == "E2E INVALID: no PDU accepted for 50 ms"
    assert withdrawn["monotonic_ns"] - sender.began_ns >= 50 * NS_PER_MS
    after_ms = (withdrawn["monotonic_ns"] - sender.returned_ns) / NS_PER_MS
    sender = Sender(process.port)
    process.wait_for("granted", withdrawn["monotonic_ns"])
    sender.off()
    summary = process.stop()
    assert after_ms <= 60 + SCHEDULING_MS, summary["max_lateness_ns"]
    assert summary["received"] == sum(
        count for name, count in summary["e2e_status"].items() if name != "NONEWDATA"
    )
    assert summary["timeouts"] >= 1
    assert summary["transition_count"] == len(process.transitions())
    assert summary["cycles"] > summary["cycles_since_first_permit"] > 0
    assert 0 < summary["permit_share_since_first"] < 1
    assert summary["discarded"] == 0 or summary["max_lateness_ns"] >= 50 * NS_PER_MS


@pytest.mark.integration
def test_withdrawn_by_the_pdu_that_says_so(process):
    sender = Sender(process.port)
    process.wait_for("granted")
    asked_ns = time.monotonic_ns()
    sender.permit = False
    withdrawn = process.wait_for("withdrawn", asked_ns)
    sender.off()
    summary = process.stop(signal.SIGINT)
    after_ms = (withdrawn["monotonic_ns"] - sender.first_denied_ns) / NS_PER_MS
    assert withdrawn["reason"] == "PDU without permit: state EXPIRED, causes none"
    assert after_ms <= 5 + SCHEDULING_MS, summary["max_lateness_ns"]
    assert summary["permit"] is False
    assert abs(withdrawn["wall_ns"] - time.time_ns()) < 60e9


@pytest.mark.integration
def test_own_stall_withdraws_and_what_waited_is_not_believed(process):
    """Stopped for 400 ms while 20 PDUs queue up: read at once they would make VALID again."""
    sender = Sender(process.port)
    process.wait_for("granted")
    stopped_ns = time.monotonic_ns()
    process.popen.send_signal(signal.SIGSTOP)
    time.sleep(0.4)  # the stall itself
    resumed_ns = time.monotonic_ns()
    process.popen.send_signal(signal.SIGCONT)
    withdrawn = process.wait_for("withdrawn", stopped_ns)
    again = process.wait_for("granted", withdrawn["monotonic_ns"])
    sender.off()
    summary = process.stop()
    assert withdrawn["reason"] == "E2E INVALID: no PDU accepted for 50 ms"
    assert withdrawn["monotonic_ns"] - resumed_ns < SCHEDULING_MS * NS_PER_MS
    assert again["monotonic_ns"] - withdrawn["monotonic_ns"] > 140 * NS_PER_MS
    assert summary["discarded"] >= 15
    assert summary["skipped_cycles"] >= 70


@pytest.mark.integration
def test_for_seconds_ends_by_itself_and_simulated_is_refused(tmp_path):
    process = Process(tmp_path, "--for", "1.0")
    sender = Sender(process.port)
    assert process.popen.wait(10) == 0
    sender.off()
    summary = json.loads(process.json.read_text())
    process.close()
    assert summary["e2e_state"] == "VALID"
    assert summary["cycles_with_permit"] == 0
    assert summary["permit_share_since_first"] is None
    assert summary["accept_simulated"] is False
    events = [json.loads(line)["event"] for line in process.log.read_text().splitlines()]
    assert events[0] == "start"
    assert events[-1] == "stop"


@pytest.mark.rt
@pytest.mark.integration
def test_real_time_priority_is_set(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root or an rtprio limit")
    process = Process(tmp_path)
    policy = os.sched_getscheduler(process.popen.pid)
    priority = os.sched_getparam(process.popen.pid).sched_priority
    summary = process.stop()
    process.close()
    assert (policy, priority, summary["priority"]) == (os.SCHED_FIFO, 84, 84)


def test_priority_refused_is_one_warning(monkeypatch, capsys):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert take_priority(84) == 0
    assert take_priority(0) == 0
    error = capsys.readouterr().err
    assert "warning: SCHED_FIFO 84 refused (Operation not permitted)" in error
    assert error.count("\n") == 1
