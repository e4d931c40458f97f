"""Which nodes a ROS parameters file speaks of. ROS itself ignores, without a word, whatever fits
no node; here that is seen before anything starts.

Pure but for reading the file. Form, as https://docs.ros.org/en/jazzy/How-To-Guides describes it:
names of nodes (nested or joined by /, with the wildcards ``*`` and ``**``), below each
``ros__parameters``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perception_rt.core.errors import UsageError

_PARAMETERS = "ros__parameters"


class Entry(NamedTuple):
    """Parameters under one name.

    Attributes:
        name: as written, with a leading slash; may hold wildcards.
        values: by their dotted names.
    """

    name: str
    values: Mapping[str, Any]

    def fits(self, node: str) -> bool:
        """Whether it speaks of the node with the fully qualified name ``node``."""
        pattern = ""
        for part in self.name.strip("/").split("/"):
            pattern += (
                "(/[^/]+)*" if part == "**" else "/" + re.escape(part).replace(r"\*", "[^/]+")
            )
        return re.fullmatch(pattern, node) is not None


def read_entries(path: Path) -> list[Entry]:
    """The entries of a parameters file, in its order.

    Raises:
        UsageError: no such file, no YAML, or not in the form of a parameters file.
    """
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except IsADirectoryError as error:
        raise UsageError(f"parameters file {path} is a folder: give a .yaml file") from error
    except FileNotFoundError as error:
        raise UsageError(
            f"parameters file {path} does not exist: give the path of a .yaml file"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise UsageError(f"parameters file {path} cannot be read: {text}") from error
    entries = list(_entries(path, "", document))
    if not entries:
        raise UsageError(f"parameters file {path} holds no parameters: see config/perception.yaml")
    return entries


def _entries(path: Path, name: str, node: Any) -> Iterator[Entry]:
    if not isinstance(node, dict):
        raise UsageError(
            f"parameters file {path} has no '{_PARAMETERS}' under '{name or 'its top'}':"
            " see config/perception.yaml"
        )
    for key, value in node.items():
        if key == _PARAMETERS:
            if not isinstance(value, dict):
                raise UsageError(f"parameters file {path}: '{name}' lists no parameters")
            yield Entry(name, dict(_flat("", value)))
        else:
            yield from _entries(path, f"{name}/{str(key).strip('/')}", value)


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def values_for(entries: Sequence[Entry], node: str) -> dict[str, Any]:
    """What the file gives ``node``; a later entry is stronger."""
    values: dict[str, Any] = {}
    for entry in entries:
        if entry.fits(node):
            values.update(entry.values)
    return values
