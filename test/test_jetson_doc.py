"""docs/jetson.md, docs/gpu.md, the service and the image against what they speak of."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from perception_rt.cli import app
from perception_rt.core.config import RealtimeConfig
from perception_rt.detector.jetpack import JETPACKS

DOCS = ("jetson.md", "gpu.md")


@pytest.mark.parametrize("name", DOCS)
def test_every_file_that_is_named_is_there(repository: Path, name: str) -> None:
    text = (repository / "docs" / name).read_text(encoding="utf-8")
    named = re.findall(r"\b(?:scripts|config|docker|docs|requirements|test)/[\w./-]*\w", text)
    assert len(named) >= 3
    for path in named:
        assert (repository / path).exists(), path
    for link in re.findall(r"\]\(([\w.]+)\)", text):
        assert (repository / "docs" / link).is_file(), link


def test_every_message_in_the_table_of_symptoms_is_one_of_the_code(repository: Path) -> None:
    text = (repository / "docs" / "jetson.md").read_text(encoding="utf-8")
    table = text.split("## 11. By symptom")[1]
    code = "\n".join(
        path.read_text(encoding="utf-8") for path in (repository / "perception_rt").rglob("*.py")
    )
    joined = re.sub(r'"\s*\n\s*f?"', "", code)  # texts that are broken over lines
    quoted = [
        message
        for symptom in re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)
        for message in symptom.split("`")[1::2]
        if " " in message and message != "RT throttling activated"  # the kernel's
    ]
    assert len(quoted) >= 7
    for message in quoted:
        assert message in joined, message


def test_parameters_that_are_shown_exist(repository: Path) -> None:
    text = (repository / "docs" / "jetson.md").read_text(encoding="utf-8")
    known = yaml.safe_load((repository / "config" / "perception.yaml").read_text(encoding="utf-8"))
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    for node, shown in yaml.safe_load(block).items():
        assert set(shown["ros__parameters"]) <= set(known[node]["ros__parameters"])
    parameters = known["/**/detector"]["ros__parameters"]
    assert "supervision.grace_ms" in known["/**/watchdog"]["ros__parameters"]
    for name in ("warmup_runs", "build_on_configure", "fallback_backend", "backend"):
        assert f"`{name}" in text
        assert name in parameters


def test_versions_are_those_of_the_code(repository: Path) -> None:
    text = (repository / "docs" / "jetson.md").read_text(encoding="utf-8")
    rows = {
        version.strip(): line
        for line, versions in re.findall(r"^(\| ([67]\.[\d., ]+) \|.*)$", text, re.MULTILINE)
        for version in versions.split(",")
    }
    assert list(rows) == [jetpack.version for jetpack in JETPACKS]
    for jetpack in JETPACKS:
        facts = (jetpack.python, jetpack.ubuntu, jetpack.cuda, jetpack.tensorrt)
        assert all(fact in rows[jetpack.version] for fact in facts)


def test_the_service_runs_a_command_that_exists_with_the_rights_it_needs(repository: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(repository / "config" / "systemd" / "perception_rt.service")
    service = unit["Service"]
    command = re.search(r"perception_rt up (.*)'", service["ExecStart"])
    assert command is not None
    usage = CliRunner().invoke(app, ["up", "--help"], env={"COLUMNS": "200"}).output
    for option in re.findall(r"--[a-z-]+", command[1]):
        assert option in usage
    watchdog = 85  # of both nodes' threads the highest
    assert int(service["LimitRTPRIO"]) >= max(watchdog, RealtimeConfig().capture_priority)
    assert service["LimitMEMLOCK"] == "infinity"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_service(repository: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", repository / "config" / "systemd" / "perception_rt.service"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_image_says_that_its_build_is_untested(repository: Path) -> None:
    text = (repository / "docker" / "Dockerfile.l4t").read_text(encoding="utf-8")
    assert "never been built" in text
    pinned = (repository / "requirements" / "gpu-checks.txt").read_text(encoding="utf-8")
    for package in ("pycuda", "pytools", "siphash24", "mako", "markupsafe"):
        assert re.search(rf"^{package}==", pinned, re.MULTILINE)
