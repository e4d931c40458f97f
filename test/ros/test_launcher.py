from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from perception_rt.core.errors import UnavailableError
from perception_rt.ros.launcher import Command, Launcher

QUIET = "import signal, time\nprint('up', flush=True)\ntime.sleep(60)"
DEAF = (
    "import signal, time\n"
    "for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\n"
    "print('up', flush=True)\n"
    "time.sleep(60)"
)


def python(name: str, code: str, required: bool = True) -> Command:
    return Command(name, (sys.executable, "-S", "-c", code), required)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def await_true(launcher: Launcher, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "did not happen within 20 s"
        launcher.pump(0.05)


def test_output_is_prefixed_and_the_pid_is_told() -> None:
    lines: list[str] = []
    launcher = Launcher([python("a", "print('one'); print('two', end='')")], lines.append)
    launcher.start()
    pid = launcher.pid("a")
    await_true(launcher, lambda: any("ended" in line for line in lines))
    launcher.close()
    assert lines == [
        f"started a, pid {pid}",
        "[a] one",
        "[a] two",
        f"a (pid {pid}) ended with status 0",
    ]


def test_each_child_leads_its_own_group() -> None:
    lines: list[str] = []
    launcher = Launcher([python("a", QUIET), python("b", QUIET)], lines.append)
    launcher.start()
    try:
        groups = {os.getpgid(launcher.pid(name)) for name in "ab"}
        assert groups == {launcher.pid("a"), launcher.pid("b")}
    finally:
        launcher.close()


def test_stop_ends_all_by_sigint() -> None:
    lines: list[str] = []
    launcher = Launcher([python("a", QUIET), python("b", QUIET)], lines.append)
    launcher.start()
    await_true(launcher, lambda: {"[a] up", "[b] up"} <= set(lines))
    codes = launcher.stop()
    launcher.close()
    assert set(codes) == {"a", "b"}
    assert all(
        code in (1, -signal.SIGINT) for code in codes.values()
    )  # 3.11 ends by the signal, 3.10 may say 1


def test_a_deaf_child_and_its_own_child_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ((signal.SIGINT, 0.2), (signal.SIGTERM, 0.2), (signal.SIGKILL, 5.0))
    monkeypatch.setattr("perception_rt.ros.launcher.STOP_STEPS", steps)
    lines: list[str] = []
    code = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-S', '-c', {DEAF!r}], stdout=subprocess.PIPE)\n"
        "p.stdout.readline()\nprint(p.pid, flush=True)\n" + DEAF
    )
    launcher = Launcher([python("a", code)], lines.append)
    launcher.start()
    await_true(launcher, lambda: "[a] up" in lines)
    grandchild = int(lines[1].removeprefix("[a] "))
    assert launcher.stop() == {"a": -signal.SIGKILL}
    await_true(launcher, lambda: not alive(grandchild))
    launcher.close()


def test_a_grandchild_that_outlives_its_parent_is_killed() -> None:
    lines: list[str] = []
    code = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-S', '-c', {DEAF!r}], stdout=subprocess.PIPE)\n"
        "p.stdout.readline()\nprint(p.pid, flush=True)\n"
    )
    launcher = Launcher([python("a", code)], lines.append)
    launcher.start()
    await_true(launcher, lambda: launcher.required_ended() is not None and len(lines) > 1)
    grandchild = int(lines[1].removeprefix("[a] "))
    assert alive(grandchild)
    launcher.close()
    end = time.monotonic() + 20
    while alive(grandchild):
        assert time.monotonic() < end


@pytest.mark.parametrize(("required", "code"), [(True, 7), (False, 0)])
def test_run_ends_with_the_end_of_a_required_child_only(required: bool, code: int) -> None:
    lines: list[str] = []
    launcher = Launcher(
        [python("a", "raise SystemExit(7)", required), python("b", QUIET)], lines.append
    )

    def emit(line: str) -> None:
        lines.append(line)
        if not required and "ended with status 7" in line:
            launcher.ask_stop()

    launcher._emit = emit
    assert launcher.run() == code
    assert ("stopping all: a ended with status 7" in lines) == required
    assert ("stopping all" in lines) == (not required)


@pytest.mark.parametrize("code", ["pass", "import os; os.kill(os.getpid(), 9)"])
def test_run_has_status_1_for_a_required_child_that_ended_without_an_error_status(
    code: str,
) -> None:
    assert Launcher([python("a", code)], lambda line: None).run() == 1


def test_the_others_have_time_to_notice_the_end_of_a_required_child() -> None:
    lines: list[str] = []
    noticed = "import time\ntime.sleep(0.2)\nprint('noticed', flush=True)\ntime.sleep(60)"
    assert (
        Launcher([python("a", "raise SystemExit(7)"), python("b", noticed)], lines.append).run()
        == 7
    )
    assert lines.index("[b] noticed") < lines.index("stopping all: a ended with status 7")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_ends_by_a_signal_with_status_0(number: signal.Signals) -> None:
    lines: list[str] = []
    launcher = Launcher([python("a", QUIET)], lines.append)

    def emit(line: str) -> None:
        lines.append(line)
        if line == "[a] up":
            threading.Thread(target=os.kill, args=(os.getpid(), number)).start()

    launcher._emit = emit
    before = signal.getsignal(number)
    assert launcher.run() == 0
    assert signal.getsignal(number) is before


def test_a_program_that_is_not_there_is_named_and_the_others_are_stopped() -> None:
    lines: list[str] = []
    launcher = Launcher([python("a", QUIET), Command("b", ("/nowhere/b",))], lines.append)
    with pytest.raises(
        UnavailableError, match=r"cannot start b \(/nowhere/b\): No such file or directory; run"
    ):
        launcher.start()
    assert not alive(launcher.pid("a"))
    launcher.close()


def test_a_child_hears_sigint_even_when_it_is_ignored_here() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines: list[str] = []
    launcher = Launcher([python("a", QUIET)], lines.append)
    try:
        launcher.start()
        await_true(launcher, lambda: "[a] up" in lines)
        assert launcher.stop()["a"] in (1, -signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
        launcher.close()


def test_children_end_with_a_killed_launcher() -> None:
    code = (
        "import sys, time\n"
        "from perception_rt.ros.launcher import Command, Launcher\n"
        f"command = Command('a', (sys.executable, '-S', '-c', {QUIET!r}))\n"
        "l = Launcher([command], lambda line: print(line, flush=True))\n"
        "l.start()\n"
        "while True: l.pump(0.1)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline().rsplit(" ", 1)[1])
    assert parent.stdout.readline() == "[a] up\n"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < end


def test_a_line_without_end_does_not_grow_for_ever() -> None:
    lines: list[str] = []
    launcher = Launcher([python("a", "print('x' * 100_000, end='')")], lines.append)
    launcher.start()
    await_true(launcher, lambda: any("ended" in line for line in lines))
    launcher.close()
    text = [line.removeprefix("[a] ") for line in lines if line.startswith("[a] ")]
    assert sum(map(len, text)) == 100_000
    assert max(map(len, text)) <= 16_384 + 65_536


def test_bytes_that_are_no_utf8_are_passed_on_marked() -> None:
    lines: list[str] = []
    launcher = Launcher(
        [python("a", r"import sys; sys.stdout.buffer.write(b'\xff\n')")], lines.append
    )
    launcher.start()
    await_true(launcher, lambda: any("ended" in line for line in lines))
    launcher.close()
    assert lines[1] == "[a] \ufffd"
