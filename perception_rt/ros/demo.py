"""The demo: the whole graph on a recording, watched from outside, then judged; and once more with
every frame late.

Three processes say which frames there were: the source (the worker's source log), the worker
(FrameTiming) and a subscriber (``ros.monitor``). The safety receiver says when it had a permit.
``ros.accounting`` compares them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from perception_rt.core.config import SourceConfig
from perception_rt.core.errors import InputError, UnavailableError, UsageError
from perception_rt.replay.bag_frames import bag_frames
from perception_rt.ros.accounting import PERMIT_CHECK, Evidence, Row, account
from perception_rt.ros.graph import GraphOptions, describe
from perception_rt.ros.launcher import Command, Launcher, commands
from perception_rt.ros.monitor import ACTIVATED, PERMIT

if TYPE_CHECKING:
    from rich.table import Table

MISS_DEADLINE_MS = 1.0
"""A deadline that no frame can meet: decoding alone takes longer."""
MISS_SECONDS = 6.0
START_TIMEOUT_S = 240.0
PERMIT_TIMEOUT_S = 15.0
DRAIN_S = 1.0
"""From the end of the detector to that of the subscriber: what is on its way arrives."""
RECEIVER_PRIORITY = 90
"""The receiver stands for another computer: the detector's load on this one must not delay it."""
PICTURES = 3

_RIGHT_MISSING = "real-time right missing: "
_FONT_SCALE, _GREEN = 0.4, (0, 220, 0)
_ROOT = Path(__file__).resolve().parents[2]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DemoOptions:
    """What a demo is asked for.

    Attributes:
        seconds: of the main run, from its first permit.
        bag: recording; empty: the one in the repository.
        out: folder for pictures, logs and what every process wrote.
        main: run the graph as it should be.
        negative: run it with every frame forced to miss.
    """

    seconds: float = 20.0
    bag: str = ""
    out: Path = Path("demo_out")
    main: bool = True
    negative: bool = True


def demo(options: DemoOptions, emit: Callable[[str], None], progress: Progress) -> Row:
    """Run the demo.

    Args:
        options: what to run.
        emit: gets every line of the graph's output.
        progress: called with what is going on, how far in milliseconds, and of how many.

    Returns:
        JSON-ready, see docs/json_commands.md; ``ok`` is True when every check of every run holds.

    Raises:
        PerceptionRtError: the graph did not get as far as to be judged.
    """
    bag = Path(options.bag) if options.bag else _ROOT / "test" / "data" / "pedestrians_mcap"
    if not bag.exists():
        raise InputError(f"no bag {bag}: give one with --bag")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"folder {options.out} cannot be made: {error.strerror}") from None
    rights: dict[str, None] = {}  # in the order in which they were named

    def listen(line: str) -> None:
        _, found, right = line.partition(_RIGHT_MISSING)
        if found:
            rights[right] = None
        emit(line)

    try:
        runs, pictures = _runs(options, bag, listen, progress)
    except OSError as error:
        raise UnavailableError(
            f"{error.filename or options.out} cannot be written: {error.strerror};"
            " make room, or give another folder with --out"
        ) from None
    return {
        "command": "demo",
        "bag": str(bag),
        "ok": all(run["ok"] for run in runs.values()),
        "rights_missing": list(rights),
        "pictures": pictures,
        **runs,
    }


def verdict(result: Row) -> str:
    """The demo's last line; names missing real-time rights where they are the likely reason."""
    if result["ok"]:
        return "demo: every check holds"
    permit = any(
        not check["ok"] and check["name"].startswith(PERMIT_CHECK)
        for check in result.get("main", {}).get("checks", ())
    )
    if permit and result["rights_missing"]:
        right = result["rights_missing"][0]
        return f"demo: FAILED, the permit likely for want of a real-time right: {right}"
    return "demo: FAILED, see the checks above"


def _runs(
    options: DemoOptions, bag: Path, emit: Callable[[str], None], progress: Progress
) -> tuple[dict[str, Row], list[str]]:
    runs: dict[str, Row] = {}
    pictures: list[str] = []
    if options.main:
        plan = _Plan("main", options.seconds, {}, await_permit=True)
        evidence = _run(plan, bag, options.out, emit, progress)
        runs[plan.name] = account(evidence, expect_miss=False)
        pictures = _draw(bag, evidence.detections, options.out)
    if options.negative:
        which = "second run" if options.main else "this run"
        emit(f"{which}: every frame is forced to miss; EXPIRED and no permit are intended")
        seconds = min(options.seconds, MISS_SECONDS)
        plan = _Plan("forced_miss", seconds, {"deadline_ms": MISS_DEADLINE_MS}, await_permit=False)
        evidence = _run(plan, bag, options.out, emit, progress)
        runs[plan.name] = account(evidence, expect_miss=True)
    return runs, pictures


class _Plan(NamedTuple):
    """One run of the graph; ``detector``: parameters of that node."""

    name: str
    seconds: float
    detector: dict[str, Any]
    await_permit: bool


def _run(
    plan: _Plan, bag: Path, out: Path, emit: Callable[[str], None], progress: Progress
) -> Evidence:
    folder = out / plan.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    seen: set[str] = set()
    unwritten: list[OSError] = []
    with (folder / "graph.log").open("w", encoding="utf-8") as log:

        def keep(line: str) -> None:
            seen.add(line)
            emit(line)
            try:
                log.write(f"{time.monotonic_ns()} {line}\n")
            except OSError as error:
                # Not from here: the launcher may be stopping its children.
                unwritten.append(error)
                launcher.ask_stop()

        launcher = Launcher(_commands(bag, folder, plan.detector), keep, _environment())

        def pump(what: str, seconds: float, line: str = "") -> bool:
            """Let the graph run until the monitor says ``line``, at most for ``seconds``."""
            begin = time.monotonic()

            def said() -> bool:
                spent = time.monotonic() - begin
                progress(f"{plan.name}: {what}", round(spent * 1000), round(seconds * 1000))
                return f"[monitor] {line}" in seen

            reached = launcher.pump_until(seconds, said)
            if unwritten:
                raise unwritten[0]
            return reached

        try:
            launcher.start()
            if not pump("starting", START_TIMEOUT_S, ACTIVATED):
                ended = launcher.required_ended()
                raise UnavailableError(
                    f"{ended} before the detector was active: see its words above"
                    if ended
                    else f"the detector was not active within {START_TIMEOUT_S:g} s"
                )
            if plan.await_permit:
                # Without it the run still has all the rest to show, and a check that fails.
                pump("before its permit", PERMIT_TIMEOUT_S, PERMIT)
            pump("running", plan.seconds)
            ended = launcher.required_ended()
            if ended:
                raise UnavailableError(f"{ended} during the demo: see {folder / 'graph.log'}")
            # From the outside in: each witness outlives what it watches.
            launcher.stop("safety_receiver")
            launcher.stop("detector")
            launcher.pump_until(DRAIN_S)
            launcher.stop()
        finally:
            launcher.close()
    return _read(folder)


def _commands(bag: Path, folder: Path, detector: dict[str, Any]) -> list[Command]:
    """The monitor, and the graph as ``up`` starts it, paused, told to write down what it does."""
    port = _free_port()
    paused: dict[str, Any] = {
        "loop": True,
        "autostart": False,
        "source_log": str((folder / "source.jsonl").absolute()),
    }
    graph = describe(
        GraphOptions(
            bag=str(bag),
            use_receiver=True,
            accept_simulated=True,
            detector={**paused, **detector},
            watchdog={"pdu.port": port},
        ),
        environ=_environment(),
    )
    specs = {spec.name: spec for spec in graph}
    written = {
        "--port": str(port),
        "--json": str(folder / "receiver.json"),
        "--log": str(folder / "receiver.jsonl"),
    }
    if _fifo_granted():
        written["--priority"] = str(RECEIVER_PRIORITY)
    receiver = specs["safety_receiver"]
    specs["safety_receiver"] = replace(receiver, arguments=(*receiver.arguments, *_flat(written)))
    target, watchdog = specs["detector"].full_name, specs["watchdog"].full_name
    watched = {
        "--out": str(folder / "monitor.jsonl"),
        "--detections": f"{target}/detections",
        "--timing": f"{target}/frame_timing",
        "--supervision": f"{watchdog}/status",
        "--activate": target,
    }
    monitor = [sys.executable, "-m", "perception_rt.ros.monitor", *_flat(watched)]
    return [Command("monitor", monitor), *commands(list(specs.values()))]


def _flat(options: dict[str, str]) -> list[str]:
    return [text for pair in options.items() for text in pair]


def _fifo_granted() -> bool:
    """True where this user may have SCHED_FIFO, found by trying it on this thread for a moment."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment() -> dict[str, str]:
    """Keep the demo to itself: a robot on the same network must not hear a recording."""
    environment = dict(os.environ)
    environment.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    environment.setdefault("ROS_DOMAIN_ID", str(1 + os.getpid() % 100))
    return environment


def _read(folder: Path) -> Evidence:
    monitored = _lines(folder / "monitor.jsonl")
    by_kind = {
        kind: [row for row in monitored if row["kind"] == kind]
        for kind in ("timing", "detections", "supervision")
    }
    try:
        receiver = json.loads((folder / "receiver.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        receiver = {}  # the checks say that it is missing
    return Evidence(
        _lines(folder / "source.jsonl"),
        by_kind["timing"],
        by_kind["detections"],
        by_kind["supervision"],
        receiver,
    )


def _lines(path: Path) -> list[Row]:
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError:
        raise UnavailableError(
            f"{path} is cut off: is the disk full? Make room, or give another folder with --out"
        ) from None


def _draw(bag: Path, detections: Sequence[Row], out: Path) -> list[str]:
    """Draw received boxes into the frames with their header stamps; returns the files' names."""
    for old in out.glob("frame_*.png"):
        old.unlink()
    answered = {row["header_stamp_ns"]: row["boxes"] for row in detections if row["boxes"]}
    if not answered:
        return []
    stamps = sorted(answered)
    # Spread over the recording: each from the middle of its third.
    wanted = {stamps[(2 * i + 1) * len(stamps) // (2 * PICTURES)] for i in range(PICTURES)}
    names = []
    for buffer in bag_frames(SourceConfig("bag", str(bag))):
        if buffer.header_stamp_ns in wanted and not buffer.error:
            path = out / f"frame_{buffer.frame_id:04d}.png"
            picture = draw_boxes(buffer.image, answered[buffer.header_stamp_ns])
            if not cv2.imwrite(str(path), picture):
                raise UnavailableError(f"picture {path} cannot be written: is the disk full?")
            names.append(str(path))
    return names


def draw_boxes(image: NDArray[np.uint8], boxes: Sequence[Sequence[Any]]) -> NDArray[np.uint8]:
    """A copy of ``image`` (uint8 [height, width, 3], BGR) with boxes and labels.

    Args:
        image: stays as it is.
        boxes: left, top, right, bottom (pixels), score, label of each.
    """
    picture = image.copy()
    for left, top, right, bottom, score, label in boxes:
        text = f"{label} {score:.2f}"
        (width, height), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, _FONT_SCALE, 1)
        # Inside the picture, also for a box at its edge.
        x = max(min(round(left), picture.shape[1] - width), 0)
        y = max(round(top) - 3, height + 1)
        corner, opposite = (round(left), round(top)), (round(right), round(bottom))
        cv2.rectangle(picture, corner, opposite, _GREEN, 2)
        cv2.rectangle(picture, (x, y - height - 1), (x + width, y + 3), _GREEN, cv2.FILLED)
        cv2.putText(
            picture, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, _FONT_SCALE, (0, 0, 0), 1, cv2.LINE_AA
        )
    return picture


def tables(result: Row) -> list[Table]:
    """What a demo found, for a terminal."""
    from rich.table import Table

    from perception_rt.latency.report import tables as latency_tables

    shown: list[Table] = []
    if "main" in result:
        shown += latency_tables(result["main"]["summary"])
    runs = {name: result[name] for name in ("main", "forced_miss") if name in result}
    chain = Table(title="Chain", title_justify="left")
    chain.add_column("")
    for name in runs:
        chain.add_column(name.replace("_", " "), justify="right")
    for label, show in _CHAIN.items():
        chain.add_row(label, *(show(run) for run in runs.values()))
    checks = Table(title="Checks", title_justify="left")
    for column in ("run", "check", "", "found"):
        checks.add_column(column)
    for name, run in runs.items():
        for check in run["checks"]:
            checks.add_row(
                name.replace("_", " "),
                check["name"],
                "holds" if check["ok"] else "FAILS",
                check["found"],
            )
    return [*shown, chain, checks]


def _counts(counts: Row) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "-"


def _milliseconds(ns: int | None) -> str:
    return "not estimable" if ns is None else f"{ns / 1e6:.1f} ms"


def _share(receiver: Row) -> str:
    share = receiver.get("permit_share_since_first")
    if share is None:
        return f"0 of {receiver.get('cycles', 0)}"
    return f"{share:.2%} of {receiver['cycles_since_first_permit']} since the first"


_CHAIN: dict[str, Callable[[Row], str]] = {
    "deadline, after capture": lambda run: _milliseconds(run["budget_ns"]),
    "delivered by the source": lambda run: str(run["delivered"]),
    "reported by FrameTiming": lambda run: str(run["reported"]),
    "published": lambda run: str(run["published"]),
    "received by the subscriber": lambda run: str(run["received"]),
    "boxes received": lambda run: str(run["received_boxes"]),
    "age at receipt p50": lambda run: _milliseconds(run["receipt_age"]["p50_ns"]),
    "age at receipt p90": lambda run: _milliseconds(run["receipt_age"]["p90_ns"]),
    "outcomes": lambda run: _counts(run["outcomes"]),
    "watchdog cycles": lambda run: _counts(run["watchdog"]["cycles_by_state"]),
    "PDUs received": lambda run: str(run["receiver"].get("received", "-")),
    "their E2E status": lambda run: _counts(run["receiver"].get("e2e_status", {})),
    "cycles with permit": lambda run: _share(run["receiver"]),
}
