"""Starts the nodes of the graph as child processes, passes their output on, and stops them
together.

For machines without ROS's launch, for ``up`` and for the demo. What to start comes from
``ros.graph`` alone, the same description that launch/perception.launch.py reads.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from perception_rt.core.errors import UnavailableError
from perception_rt.ros.graph import NodeSpec, to_command

POLL_S = 0.2
NOTICE_S = 0.5
"""From the end of a required child to that of the others: they notice it, act on it and say so."""
STOP_STEPS = ((signal.SIGINT, 8.0), (signal.SIGTERM, 2.0), (signal.SIGKILL, 2.0))
"""Signals that stop a child, in turn, and how many seconds each is given."""

_MAX_LINE = 16_384
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Command:
    """One process to start.

    Attributes:
        name: shown before each of its lines.
        argv: program and arguments.
        required: the whole graph ends when it ends.
        environment: variables added to those of the launcher.
    """

    name: str
    argv: Sequence[str]
    required: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


def commands(specs: Sequence[NodeSpec]) -> list[Command]:
    """How the processes of ``specs`` are started.

    Raises:
        UnavailableError: the package is not installed.
    """
    return [
        Command(spec.name, to_command(spec), spec.required, spec.environment) for spec in specs
    ]


@dataclass
class _Child:
    command: Command
    process: subprocess.Popen[bytes]
    partial: bytes = b""
    told: bool = False
    swept: bool = False


class Launcher:
    """Child processes with a common life, each in its own process group, output prefixed by its
    name.

    Args:
        commands: what to start, in this order.
        emit: gets every line of output, and what the launcher itself has to say, without line end.
        environment: of the children; None: that of this process.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        emit: Callable[[str], None] = print,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._commands = list(commands)
        self._emit = emit
        self._environment = dict(environment if environment is not None else os.environ)
        # Children write to a pipe: without this their lines arrive in blocks, long after the fact.
        self._environment["PYTHONUNBUFFERED"] = "1"
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._stop_asked = False

    def start(self) -> None:
        """Start everything; on a failure stop what was already started.

        Raises:
            UnavailableError: a program that cannot be started.
        """
        for command in self._commands:
            try:
                process = subprocess.Popen(
                    list(command.argv),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={**self._environment, **command.environment},
                    start_new_session=True,
                    preexec_fn=_in_child,  # noqa: PLW1509  two system calls, no lock
                )
            except OSError as error:
                self.stop()
                raise UnavailableError(
                    f"cannot start {command.name} ({command.argv[0]}): {error.strerror};"
                    " run scripts/setup.sh"
                ) from None
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            child = _Child(command, process)
            self._children.append(child)
            self._selector.register(process.stdout, selectors.EVENT_READ, child)
            self._emit(f"started {command.name}, pid {process.pid}")

    def pid(self, name: str) -> int:
        """Process id of the child called ``name``."""
        return self._child(name).process.pid

    def pump(self, timeout_s: float = POLL_S) -> None:
        """Pass output on; returns after ``timeout_s`` seconds or when something was passed on."""
        for key, _ in self._selector.select(timeout_s):
            self._read(key.data)
        for child in self._children:
            code = child.process.poll()
            if code is not None and not child.told:
                self._read(child)
                child.told = True
                self._emit(
                    f"{child.command.name} (pid {child.process.pid}) ended {_describe(code)}"
                )

    def pump_until(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Pass output on for ``seconds``; True when ``stop`` said so, False when the time was up.

        Also returns False when a required child has ended or ``ask_stop`` was called.
        """
        end = time.monotonic() + seconds
        while not stop():
            left = end - time.monotonic()
            if left <= 0 or self._stop_asked or self.required_ended() is not None:
                return False
            self.pump(min(POLL_S, left))
        return True

    def required_ended(self) -> str | None:
        """Which required child has ended and how, or None while all of them run."""
        child = self._ended()
        return (
            None
            if child is None
            else f"{child.command.name} ended {_describe(child.process.returncode)}"
        )

    def ask_stop(self) -> None:
        """Make ``run`` and ``pump_until`` return soon; safe to call from a signal handler."""
        self._stop_asked = True

    def stop(self, name: str | None = None) -> dict[str, int]:
        """End all children, or the one called ``name``: SIGINT, then SIGTERM, then SIGKILL to its
        whole group.

        Returns:
            Exit status by name, negative for the signal that ended it.
        """
        children = self._children if name is None else [self._child(name)]
        for number, seconds in STOP_STEPS:
            running = [child for child in children if child.process.poll() is None]
            if not running:
                break
            for child in running:
                _send(child.process, number)
            end = time.monotonic() + seconds
            while time.monotonic() < end and any(
                child.process.poll() is None for child in running
            ):
                self.pump(0.05)
        self.pump(0.0)
        for child in children:
            if not child.swept:
                # A grandchild that outlived its parent would hold real-time priority for nobody.
                _send_group(child.process.pid, signal.SIGKILL)
                child.swept = True
        return {child.command.name: child.process.poll() or 0 for child in children}

    def run(self) -> int:
        """Start, run until SIGINT, SIGTERM or the end of a required child, then stop all.

        Returns:
            0 after a signal; where a required child ended by itself its exit status, 1 for a
            signal or a status of 0.
        """
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, lambda *_: self.ask_stop())
        try:
            self.start()
            while not self._stop_asked and self.required_ended() is None:
                self.pump()
            reason = self.required_ended()
            code = _status(self._ended())
            end = time.monotonic() + (NOTICE_S if reason else 0.0)
            while time.monotonic() < end and not self._stop_asked:
                self.pump(0.05)
            self._emit(f"stopping all: {reason}" if reason else "stopping all")
            self.stop()
            return code
        finally:
            self.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Stop what still runs and release the pipes."""
        self.stop()
        self._selector.close()
        for child in self._children:
            if child.process.stdout is not None:
                child.process.stdout.close()

    def _ended(self) -> _Child | None:
        ended = (child for child in self._children if child.process.poll() is not None)
        return next((child for child in ended if child.command.required), None)

    def _child(self, name: str) -> _Child:
        return next(child for child in self._children if child.command.name == name)

    def _read(self, child: _Child) -> None:
        stream = child.process.stdout
        assert stream is not None
        while not stream.closed:
            try:
                data = os.read(stream.fileno(), 65_536)
            except BlockingIOError:
                return
            if not data:
                if stream in self._selector.get_map():
                    self._selector.unregister(stream)
                data, child.partial = (child.partial + b"\n", b"") if child.partial else (b"", b"")
                self._split(child, data)
                return
            self._split(child, data)

    def _split(self, child: _Child, data: bytes) -> None:
        *lines, child.partial = (child.partial + data).split(b"\n")
        if len(child.partial) > _MAX_LINE:
            lines.append(child.partial)
            child.partial = b""
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip("\r")
            self._emit(f"[{child.command.name}] {text}")


def _in_child() -> None:
    # A shell starts background jobs with SIGINT ignored, and that is inherited: the children must
    # hear it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A launcher killed by SIGKILL takes its nodes with it.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if number == signal.SIGKILL:
        _send_group(process.pid, number)
    else:
        process.send_signal(number)


def _send_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _status(ended: _Child | None) -> int:
    return 0 if ended is None else max(ended.process.returncode, 0) or 1


def _describe(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
