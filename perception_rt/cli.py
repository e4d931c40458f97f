"""The command line ``perception_rt``. Parses, calls one room for the work, prints; what it does
lives in the rooms.

Exit status: 0 done, 1 a check failed or a node ended by itself, 3 a replay that could not measure,
64 usage, 65 bad input, 69 something needed is not there, 130 interrupted. Errors are one line on
stderr.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer  # takes a while: Ctrl-C in it must not end in a traceback
except KeyboardInterrupt:
    sys.exit(130)

from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.errors import PerceptionRtError, UnavailableError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from perception_rt.replay.runner import Progress

EXIT_FAILED = 1
EXIT_INVALID = 3
EXIT_USAGE = 64
EXIT_INTERRUPTED = 130
DEFAULT_DEADLINE = "100"
MAX_SECONDS = 1e6
PLAIN_WIDTH = 120
VIDEO_SUFFIXES = (".avi", ".mkv", ".mov", ".mp4", ".webm")

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Real-time object detection: a fixed deadline at variable quality.",
)
model_app = typer.Typer(help="Look at models, build their engines.")
app.add_typer(model_app, name="model")

# Optional, not X | None: typer reads these at run time, on Python 3.10 too.
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Result as JSON; - is stdout.")
]
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="Model directory; default: the one shipped.")
]


def main() -> int:
    """Entry point of the console script: runs the command line, returns its exit status."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except OSError:
        # Said already, or the reader of a pipe went away. The interpreter must not try it again.
        code = code or UnavailableError.exit_code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit status; errors are printed, not raised."""
    try:
        code = app(arguments, prog_name="perception_rt", standalone_mode=False)
    except PerceptionRtError as error:
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        return _fail(f"{error.format_message().rstrip('.')}; see perception_rt --help", EXIT_USAGE)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", EXIT_INTERRUPTED)
    except OSError as error:
        return _fail(str(error), UnavailableError.exit_code)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code


@app.command()
def up(
    bag: Annotated[Path | None, typer.Option(help="Bag or video to play.")] = None,
    source: Annotated[
        str, typer.Option(help="bag, video or topic; default: bag where --bag is given.")
    ] = "",
    loop: Annotated[
        bool, typer.Option("--loop", help="Play the bag or video again and again.")
    ] = False,
    model: ModelOption = None,
    deadline_ms: Annotated[
        float | None, typer.Option(help="Milliseconds a frame may take.")
    ] = None,
    params_file: Annotated[
        Path | None, typer.Option(help="Parameters of the nodes (.yaml).")
    ] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of the nodes.")] = "",
    watchdog: Annotated[bool, typer.Option(help="Start the watchdog.")] = True,
    receiver: Annotated[bool, typer.Option(help="Start the reference safety receiver.")] = False,
    accept_simulated: Annotated[
        bool, typer.Option(help="Let it grant for bags and videos.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warn, error or fatal.")] = "info",
) -> int:
    """Start what the launch file starts, without ROS's launch, until Ctrl-C."""
    from perception_rt.ros.graph import GraphOptions, describe
    from perception_rt.ros.launcher import Launcher, commands

    options = GraphOptions(
        source=source or _source_kind(bag),
        bag=str(bag or ""),
        model=str(model or ""),
        deadline_ms="" if deadline_ms is None else str(deadline_ms),
        params_file=str(params_file or ""),
        namespace=namespace,
        use_watchdog=watchdog,
        use_receiver=receiver,
        accept_simulated=accept_simulated,
        log_level=log_level,
        detector={"loop": True} if loop else {},
    )
    specs = describe(options)
    for name in (name for spec in specs for name in spec.unused):
        print(f"warning: parameters of {name} fit no node that is started", file=sys.stderr)
    return Launcher(commands(specs), lambda line: print(line, flush=True)).run()


@app.command()
def replay(
    bag: Annotated[str, typer.Argument(help="Bag directory, .mcap, .db3, or a video file.")],
    deadline_ms: Annotated[
        str | None,
        typer.Option(
            help=f"Milliseconds, or 1.4x: times the first exit's p99. Default {DEFAULT_DEADLINE}."
        ),
    ] = None,
    lock_step: Annotated[
        bool, typer.Option("--lockstep", help="Every frame once, one exit, no deadline.")
    ] = False,
    exit_head: Annotated[
        int | None, typer.Option("--exit", help="With --lockstep: the exit head, from 0.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Speed of play; 1 is as recorded.", min=0.01, max=100.0)
    ] = None,
    loop: Annotated[int | None, typer.Option(help="Passes over the recording.", min=1)] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Play in a loop for so long.", min=0.1, max=MAX_SECONDS)
    ] = None,
    topic: Annotated[str, typer.Option(help="Image topic, where the bag holds several.")] = "",
    model: ModelOption = None,
    realtime: Annotated[
        bool, typer.Option(help="Ask for SCHED_FIFO, affinity and locked memory.")
    ] = True,
    confidence: Annotated[
        float, typer.Option(help="Confidence threshold.", min=0.0, max=1.0)
    ] = 0.35,
    json_file: JsonOption = None,
) -> int:
    """Play a recording through the detector without ROS; say what became of every frame."""
    from perception_rt.core.config import RealtimeConfig, SourceConfig, WorkerConfig
    from perception_rt.core.deadline import parse_deadline
    from perception_rt.ros.graph import default_model_dir

    timed = {"--deadline-ms": deadline_ms, "--rate": rate, "--loop": loop, "--seconds": seconds}
    given = [name for name, value in timed.items() if value is not None]
    if lock_step and given:
        raise UsageError(
            f"{given[0]} belongs to real time: --lockstep has neither schedule nor deadline"
        )
    if exit_head is not None and not lock_step:
        raise UsageError("--exit needs --lockstep: in real time the deadline chooses the exit")
    if loop is not None and seconds is not None:
        raise UsageError("--loop and --seconds exclude each other: give one of them")
    if not bag:
        raise UsageError("the recording's name is empty: give a bag or a video file")
    _check_writable(json_file)
    deadline = parse_deadline(DEFAULT_DEADLINE if deadline_ms is None else deadline_ms)
    config = WorkerConfig(
        model_dir=str(model or default_model_dir()),
        source=SourceConfig(
            kind=_source_kind(Path(bag)),
            uri=bag,
            topic=topic,
            loop=(loop or 1) > 1 or seconds is not None,
            rate=1.0 if rate is None else rate,
        ),
        budget_ns=deadline.ns or NS_PER_S,  # a factor is resolved after the warm-up
        confidence_threshold=confidence,
        realtime=RealtimeConfig(enabled=realtime),
    )
    if lock_step:
        from perception_rt.replay.lockstep import lockstep

        with _progress() as progress:
            result = lockstep(config, exit_head, progress)
        _finish(result, [_lockstep_table(result)], json_file)
        return 0

    from perception_rt.latency.report import tables
    from perception_rt.replay.runner import ReplayOptions
    from perception_rt.replay.runner import replay as play

    with _progress() as progress:
        result = play(ReplayOptions(config, deadline, loop or 1, seconds or 0.0), progress)
    _finish(result, [_budget_line(result), *tables(result["summary"])], json_file)
    if result["player"].get("bound_ns", 0) is None:
        print(
            "note: one frame, or equal stamps: without a period the player's lateness has no bound"
            " and is not checked",
            file=sys.stderr,
        )
    for right in result["realtime"].get("missing", ()):
        print(f"warning: {right}", file=sys.stderr)
    for reason in result["reasons"]:
        print(f"INVALID: {reason}", file=sys.stderr)
    return EXIT_INVALID if result["reasons"] else 0


@model_app.command()
def inspect(
    directory: Annotated[
        Path | None, typer.Argument(help="Model directory; default: the one shipped.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Check a model directory against its manifest and show its segments and exits."""
    from perception_rt.detector.model import load_model
    from perception_rt.detector.model_report import inspect_model, inspect_table
    from perception_rt.ros.graph import default_model_dir

    _check_writable(json_file)
    result = inspect_model(load_model(directory or default_model_dir()))
    _finish(result, [inspect_table(result)], json_file)


@model_app.command("build")
def build_model(
    directory: Annotated[
        Path | None, typer.Argument(help="Model directory; default: the one shipped.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan for each JetPack, build nothing.")
    ] = False,
    jetpack: Annotated[str, typer.Option(help="With --dry-run: only this version.")] = "",
    build_only: Annotated[
        bool, typer.Option("--build-only", help="Build, say where, measure nothing.")
    ] = False,
    precision: Annotated[str, typer.Option(help="auto, fp32, fp16 or int8.")] = "auto",
    target_ms: Annotated[
        float, typer.Option(help="Stop at the first precision this fast (p99).", min=0, max=1e6)
    ] = 0.0,
    max_ap_loss: Annotated[
        float, typer.Option(help="Loss of AP against float32 that is allowed.", min=0, max=1)
    ] = 0.01,
    dla_core: Annotated[
        int, typer.Option(help="Deep learning accelerator; -1: the GPU.", min=-1)
    ] = -1,
    calibration: Annotated[
        Path | None, typer.Option(help="Pictures or bag, for INT8 and for measuring.")
    ] = None,
    engine_cache_dir: Annotated[
        str, typer.Option(help="Folder of the engines; default: the user's cache.")
    ] = "",
    json_file: JsonOption = None,
) -> None:
    """Build a model's TensorRT engines for this machine and keep them; built ones are reused."""
    if jetpack and not dry_run:
        raise UsageError("--jetpack needs --dry-run: engines are built for this machine only")
    _check_writable(json_file)
    from perception_rt.core.config import GpuOptions
    from perception_rt.detector.model import load_model
    from perception_rt.replay import model_build
    from perception_rt.ros.graph import default_model_dir

    request = model_build.BuildRequest(
        GpuOptions(engine_cache_dir, precision, dla_core),
        build_only,
        target_ms,
        max_ap_loss,
        calibration,
    )
    model = load_model(directory or default_model_dir())
    if dry_run:
        result = model_build.plan(model, request, jetpack)
    else:
        with _progress() as progress:
            say = partial(print, file=sys.stderr, flush=True)
            result = model_build.build(model, request, say, progress)
    _finish(result, model_build.tables(result), json_file)


@app.command()
def reset(
    node: Annotated[
        str, typer.Option(help="Fully qualified name of the detector node.")
    ] = "/detector",
    timeout: Annotated[
        float, typer.Option(help="Seconds for each step.", min=0.1, max=MAX_SECONDS)
    ] = 60.0,
    json_file: JsonOption = None,
) -> int:
    """Deactivate and activate the detector: the way out of the watchdog's EXPIRED."""
    _check_writable(json_file)
    _need_ros()
    from perception_rt.ros.lifecycle_client import reset as reset_node

    try:
        steps = list(reset_node(node, timeout))
    except KeyboardInterrupt:
        return _fail(
            f"interrupted: {node} goes on with what it was asked for, the permit may come back",
            EXIT_INTERRUPTED,
        )
    _finish({"command": "reset", "node": node, "steps": steps}, [], json_file)
    print(f"{node}: {' and '.join(steps)} done", file=sys.stderr)
    return 0


@app.command()
def demo(
    seconds: Annotated[
        float, typer.Option(help="Of the run, from its first permit.", min=1.0, max=MAX_SECONDS)
    ] = 20.0,
    bag: Annotated[
        Path | None, typer.Option(help="Recording; default: the pedestrians in the repository.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for pictures and logs.")] = Path("demo_out"),
    force_miss: Annotated[
        bool, typer.Option("--force-miss", help="Only the run that misses every frame.")
    ] = False,
    skip_negative: Annotated[
        bool, typer.Option("--skip-negative", help="Without that run.")
    ] = False,
    json_file: JsonOption = None,
) -> int:
    """Run the whole graph on a recording, then with every frame late, and check both."""
    if force_miss and skip_negative:
        raise UsageError("--force-miss and --skip-negative exclude each other: give one of them")
    _check_writable(json_file)
    _need_ros()
    from perception_rt.ros.demo import DemoOptions, tables, verdict
    from perception_rt.ros.demo import demo as run_demo

    options = DemoOptions(
        seconds, str(bag or ""), out, main=not force_miss, negative=not skip_negative
    )
    with _progress() as progress:
        result = run_demo(options, lambda line: print(line, file=sys.stderr, flush=True), progress)
    _finish(result, tables(result), json_file)
    for path in result["pictures"]:
        print(f"picture: {path}", file=sys.stderr)
    print(verdict(result), file=sys.stderr)
    return 0 if result["ok"] else EXIT_FAILED


def _source_kind(path: Path | None) -> str:
    if path is None:
        return ""
    return "video" if path.suffix.lower() in VIDEO_SUFFIXES else "bag"


def _need_ros() -> None:
    if importlib.util.find_spec("rclpy") is None:
        raise UnavailableError("ROS 2 (rclpy) is not there: run scripts/setup.sh, or source ROS 2")


@contextmanager
def _progress() -> Iterator[Progress]:
    """A progress bar on stderr; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("start", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield show


def _check_writable(path: Path | None) -> None:
    """Know before a long run that its result can be written; leaves nothing behind."""
    if path is None or str(path) == "-":
        return
    if os.path.isdir(path):  # noqa: PTH112  says False where pathlib raises: a name too long
        raise UsageError(f"--json {path} is a folder: give the name of a file")
    there = os.path.exists(path)  # noqa: PTH110
    if not os.path.isdir(path.parent) or not os.access(path if there else path.parent, os.W_OK):  # noqa: PTH112
        raise UsageError(f"--json {path} cannot be written: no such folder, or no right to it")


def _finish(result: dict[str, Any], tables: Iterable[Table | str], json_file: Path | None) -> None:
    """Print tables, on stderr where the JSON goes to stdout, and write the JSON."""
    from rich.console import Console

    to_stdout = json_file is not None and str(json_file) == "-"
    console = Console(stderr=to_stdout)
    if not console.is_terminal:
        console = Console(stderr=to_stdout, width=PLAIN_WIDTH)
    text = json.dumps(result, indent=2) + "\n"
    target = "standard output" if to_stdout or json_file is None else str(json_file)
    try:
        for table in tables:
            console.print(table, highlight=False)
        if to_stdout:
            sys.stdout.write(text)
            sys.stdout.flush()
        elif json_file is not None:
            json_file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnavailableError(
            f"the result cannot be written to {target}: {error.strerror}"
        ) from None


def _budget_line(result: dict[str, Any]) -> str:
    line = f"budget {result['budget_ns'] / NS_PER_MS:.1f} ms"
    if result["deadline_factor"] is None:
        return line
    p99_ms = result["first_exit_p99_ns"] / NS_PER_MS
    return f"{line} = {result['deadline_factor']:g} x {p99_ms:.1f} ms (first exit p99 at warm-up)"


def _lockstep_table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(
        title=f"Lock-step, exit {result['exit_head']} of 0 to {result['exit_count'] - 1}",
        title_justify="left",
    )
    for column in ("stage", "n", "median ms", "longest ms"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, times in result["stages"].items():
        table.add_row(
            name,
            str(times["n"]),
            f"{times['p50_ns'] / NS_PER_MS:.2f}",
            f"{times['max_ns'] / NS_PER_MS:.2f}",
        )
    table.caption = (
        f"{result['detection_count']} detections in {result['frame_count']} frames, "
        f"{result['failed_count']} failed; digest {result['digest'][:16]}"
    )
    return table
