"""What the GPU tests measured, and the table that scripts/gpu_check.sh ends with.

A folder holds for each part that ran ``PART.xml`` (JUnit, by pytest), ``PART.jsonl`` (one figure
a line) and ``PART.status`` (exit status of pytest, or the reason why the part did not run); and
``about.json``, what it ran on.

    python test/support/gpu_report.py FOLDER JSON_FILE
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

FIGURES_VARIABLE = "PERCEPTION_RT_GPU_FIGURES"
"""Names the file that figures are appended to; without it they are dropped."""

PARTS = ("pieces", "backend", "engines")
_TIMED_OUT = 124


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        name: what was measured, the unit last.
        value: a number, or a text.
        target: the most that is allowed; None: only told.
    """

    name: str
    value: float | str
    target: float | None = None

    @property
    def met(self) -> bool:
        """False when the value is above the target."""
        return self.target is None or (
            not isinstance(self.value, str) and self.value <= self.target
        )


def record(figure: Figure) -> None:
    """Append a figure to the file that the environment names."""
    path = os.environ.get(FIGURES_VARIABLE)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(figure)) + "\n")


def summary(folder: Path) -> dict[str, Any]:
    """Everything in the folder as plain data; ``passed`` says whether all that ran passed, and
    at least one test did.
    """
    about = folder / "about.json"
    parts = [_part(folder, name) for name in PARTS]
    ran = [part for part in parts if part["reason"] == ""]
    return {
        "about": json.loads(about.read_text(encoding="utf-8")) if about.is_file() else {},
        "parts": parts,
        "passed": any(part["passed"] for part in ran) and not any(part["failed"] for part in ran),
    }


def _part(folder: Path, name: str) -> dict[str, Any]:
    part: dict[str, Any] = {"name": name, "reason": "", "seconds": 0.0, "figures": []}
    part |= {"passed": 0, "failed": [], "skipped": []}
    file = folder / f"{name}.status"
    status = file.read_text(encoding="utf-8").strip() if file.is_file() else "not asked for"
    if not status.isdigit():
        part["reason"] = status
        return part
    report = folder / f"{name}.xml"
    if report.is_file():
        _read_report(report, part)
    figures = folder / f"{name}.jsonl"
    if figures.is_file():
        lines = figures.read_text(encoding="utf-8").splitlines()
        part["figures"] = [json.loads(line) for line in lines]
    if int(status) == _TIMED_OUT:
        part["failed"].append("the part ran out of time")
    elif int(status) != 0 and not part["failed"]:
        part["failed"].append(f"pytest ended with status {status}")
    return part


def _read_report(path: Path, part: dict[str, Any]) -> None:
    for suite in ET.parse(path).iter("testsuite"):
        part["seconds"] += float(suite.get("time", 0))
    for case in ET.parse(path).iter("testcase"):
        name = case.get("name", "?")
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            part["failed"].append(name)
        elif skipped is not None:
            part["skipped"].append(f"{name}: {skipped.get('message', '')}")
        else:
            part["passed"] += 1


def table(result: dict[str, Any]) -> list[str]:
    """The summary as short lines."""
    about = result["about"]
    lines = ["", *(f"{key:<10} {value}" for key, value in about.items()), ""]
    for part in result["parts"]:
        if part["reason"]:
            lines.append(f"{part['name']:<10} not run: {part['reason']}")
            continue
        counts = f"{part['passed']} passed, {len(part['failed'])} failed"
        lines.append(
            f"{part['name']:<10} {counts}, {len(part['skipped'])} skipped, {part['seconds']:.0f} s"
        )
        lines += [f"  FAILED   {name}" for name in part["failed"]]
        lines += [f"  skipped  {reason}" for reason in part["skipped"]]
    figures = (Figure(**figure) for part in result["parts"] for figure in part["figures"])
    rows = list(dict.fromkeys(figures))
    if rows:
        lines += ["", f"{'figure':<58} {'value':>12} {'at most':>9}"]
    for row in rows:
        if isinstance(row.value, str):
            lines.append(f"{row.name}: {row.value}")
            continue
        target = "" if row.target is None else f"{row.target:g}"
        above = "" if row.met else "  ABOVE"
        lines.append(f"{row.name:<58} {row.value:>12.4g} {target:>9}{above}")
    return [*lines, "", "PASSED" if result["passed"] else "FAILED"]


def main(arguments: list[str]) -> int:
    """Print the table of a folder and write its JSON; 1 when something failed."""
    folder, json_file = map(Path, arguments)
    result = summary(folder)
    json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(table(result)) + "\n")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
