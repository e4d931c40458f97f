"""The one description of the processes of the graph, read by launch/perception.launch.py and by
``perception_rt up``.

Pure data: nothing here starts anything or imports rclpy.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perception_rt.core.config import SOURCE_KINDS
from perception_rt.core.errors import UnavailableError, UsageError
from perception_rt.ros import dds_settings
from perception_rt.ros.params_file import read_entries, values_for

PACKAGE = "perception_rt"
MODEL = "nanodet_g_416_coco80"
_NAMESPACE = re.compile(r"/|(/[A-Za-z_][A-Za-z0-9_]*)+")
LOG_LEVELS = ("debug", "info", "warn", "error", "fatal")

Value = bool | int | float | str


@dataclass(frozen=True)
class GraphOptions:
    """What a user asks for. An empty text leaves a parameter to the parameters file.

    Attributes:
        source: ``bag``, ``video`` or ``topic``; empty: ``bag`` when ``bag`` is given.
        bag: path of the bag or video.
        model: directory with manifest.json.
        deadline_ms: milliseconds from capture stamp to deadline.
        params_file: parameters of the nodes; empty: the one shipped.
        namespace: of the nodes.
        use_watchdog: start the watchdog.
        use_receiver: start the reference safety receiver too.
        accept_simulated: tell that receiver to grant for bags and videos.
        log_level: of the nodes.
        detector, watchdog: further parameters, stronger than the file.
    """

    source: str = ""
    bag: str = ""
    model: str = ""
    deadline_ms: str = ""
    params_file: str = ""
    namespace: str = ""
    use_watchdog: bool = True
    use_receiver: bool = False
    accept_simulated: bool = False
    log_level: str = "info"
    detector: Mapping[str, Value] = field(default_factory=dict)
    watchdog: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeSpec:
    """One process.

    Attributes:
        executable: in lib/perception_rt.
        name: of the ROS node; of the process where ``ros`` is False.
        namespace: of the ROS node, starting with a slash.
        params_files: parameter files, weakest first.
        parameters: stronger than the files.
        arguments: before the ROS arguments.
        unused: names in ``params_files`` that fit no node of this graph.
        log_level: of the ROS node.
        ros: takes ROS arguments.
        required: the graph ends when it ends.
        environment: variables added to those of the user.
    """

    executable: str
    name: str
    namespace: str = "/"
    params_files: Sequence[str] = ()
    parameters: Mapping[str, Value] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    unused: Sequence[str] = ()
    log_level: str = "info"
    ros: bool = True
    required: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        """Fully qualified name of the ROS node."""
        return f"{self.namespace.rstrip('/')}/{self.name}"


def describe(
    options: GraphOptions, share: Path | None = None, environ: Mapping[str, str] | None = None
) -> list[NodeSpec]:
    """The processes that ``options`` ask for, in the order in which they are started.

    Args:
        options: what the user asks for.
        share: folder with ``config``; None: that of the installed package.
        environ: the user's environment, which wins over ours; None: that of this process.

    Raises:
        UsageError: options that contradict each other or cannot be used.
        UnavailableError: the package is not installed.
    """
    namespace = "/" + options.namespace.strip("/")
    if not _NAMESPACE.fullmatch(namespace):
        raise UsageError(
            f"namespace '{options.namespace}' cannot be used: give names of letters, digits and _"
            " that do not start with a digit, separated by /, like front/left"
        )
    if options.log_level not in LOG_LEVELS:
        raise UsageError(
            f"log level '{options.log_level}' is unknown: use one of {', '.join(LOG_LEVELS)}"
        )
    share = share or share_dir()
    params_file = options.params_file or str(share / "config" / "perception.yaml")
    entries = read_entries(Path(params_file))
    names = [f"{namespace.rstrip('/')}/{name}" for name in ("detector", "watchdog")]
    unused = [e.name for e in entries if not any(e.fits(name) for name in names)]
    if len(unused) == len(entries):
        raise UsageError(
            f"parameters file {params_file} has nothing for {' or '.join(names)},"
            f" only for {', '.join(unused)}: correct its names"
        )
    common = {
        "namespace": namespace,
        "params_files": (params_file,),
        "log_level": options.log_level,
        "environment": dds_settings.environment(share, os.environ if environ is None else environ),
    }
    if options.accept_simulated and not options.use_receiver:
        raise UsageError("accept_simulated is for the reference receiver: ask for that one too")
    specs = [
        NodeSpec(
            executable="detector_node",
            name="detector",
            parameters={**_detector_parameters(options), **options.detector},
            unused=tuple(unused),
            **common,  # type: ignore[arg-type]
        )
    ]
    if options.use_watchdog:
        specs.append(
            NodeSpec(
                executable="watchdog_node",
                name="watchdog",
                parameters=dict(options.watchdog),
                **common,  # type: ignore[arg-type]
            )
        )
    if options.use_receiver:
        if not options.use_watchdog:
            raise UsageError(
                "the receiver hears nothing without the watchdog: use_receiver needs use_watchdog"
            )
        # The receiver reads no parameters, but must listen where the watchdog sends.
        link = {**values_for(entries, names[1]), **options.watchdog}
        arguments = ["--accept-simulated"] if options.accept_simulated else []
        for parameter, option in (("pdu.port", "--port"), ("pdu.data_id", "--data-id")):
            if parameter in link:
                arguments += [option, str(link[parameter])]
        specs.append(
            NodeSpec(
                executable="safety_receiver",
                name="safety_receiver",
                arguments=arguments,
                ros=False,
            )
        )
    return specs


def _detector_parameters(options: GraphOptions) -> dict[str, Value]:
    source = options.source or ("bag" if options.bag else "")
    parameters: dict[str, Value] = {}
    if source:
        if source not in SOURCE_KINDS:
            raise UsageError(f"source '{source}' is unknown: use one of {', '.join(SOURCE_KINDS)}")
        if source == "topic" and options.bag:
            raise UsageError(
                f"source topic reads no file, but {options.bag} was given: use source bag or video"
            )
        if source != "topic" and not options.bag:
            raise UsageError(f"source {source} needs a file: give its path as bag")
        parameters["source"] = source
    if options.bag:
        # A node started by launch has another working directory than the user's shell.
        parameters["source_uri"] = str(Path(options.bag).absolute())
    if options.model:
        parameters["model_path"] = str(Path(options.model).absolute())
    if options.deadline_ms:
        try:
            parameters["deadline_ms"] = float(options.deadline_ms)
        except ValueError:
            raise UsageError(
                f"deadline_ms must be a number of milliseconds, got '{options.deadline_ms}'"
            ) from None
    return parameters


def to_command(spec: NodeSpec, prefix: Path | None = None) -> list[str]:
    """The command line that starts ``spec``: what launch_ros makes of the same description.

    Args:
        spec: one process.
        prefix: where the package is installed; None: asked of the ament index.

    Raises:
        UnavailableError: the package is not installed.
    """
    command = [
        str((prefix or install_prefix()) / "lib" / PACKAGE / spec.executable),
        *spec.arguments,
    ]
    if not spec.ros:
        return command
    command += ["--ros-args", "--log-level", spec.log_level]
    command += ["-r", f"__node:={spec.name}", "-r", f"__ns:={spec.namespace}"]
    for file in spec.params_files:
        command += ["--params-file", file]
    for name, value in spec.parameters.items():
        # JSON is YAML: quoted, a text stays a text even where it looks like a number.
        command += ["-p", f"{name}:={json.dumps(value)}"]
    return command


def install_prefix() -> Path:
    """Where the package is installed.

    Raises:
        UnavailableError: it is not, or ROS 2 is not there.
    """
    try:
        from ament_index_python.packages import get_package_prefix

        return Path(get_package_prefix(PACKAGE))
    except (ImportError, LookupError) as error:
        raise UnavailableError(
            f"package {PACKAGE} is not installed where ROS looks ({error}): run scripts/setup.sh"
        ) from error


def share_dir() -> Path:
    """The installed package's share folder, with ``config``, ``launch`` and ``models``.

    Raises:
        UnavailableError: the package is not installed.
    """
    return install_prefix() / "share" / PACKAGE


def default_model_dir() -> Path:
    """The model shipped with the package.

    Raises:
        UnavailableError: the package is not installed.
    """
    return share_dir() / "models" / MODEL
