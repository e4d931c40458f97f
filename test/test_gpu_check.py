"""What of the GPU checks can be tested without a GPU: report, script, joined network."""

from __future__ import annotations

import json
import shutil
import subprocess

import numpy as np
import onnxruntime
import pytest
from support.gpu_driver import find_gpu
from support.gpu_engines import pictures, whole
from support.gpu_report import FIGURES_VARIABLE, Figure, main, record, summary, table
from support.spin_trt import Logger, Runtime

from perception_rt.detector.model import load_model

JUNIT = """<?xml version="1.0"?><testsuites><testsuite time="1.5">
<testcase name="test_good"/><testcase name="test_bad"><failure/></testcase>
<testcase name="test_left_out"><skipped message="no tensorrt"/></testcase>
</testsuite></testsuites>"""
GOOD = '<testsuites><testsuite time="2"><testcase name="test_good"/></testsuite></testsuites>'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "about.json").write_text('{"gpu": "Orin, SM 87"}', encoding="utf-8")
    for part in ("pieces", "backend"):
        (tmp_path / f"{part}.status").write_text("0\n", encoding="utf-8")
        (tmp_path / f"{part}.xml").write_text(GOOD, encoding="utf-8")
    (tmp_path / "engines.status").write_text("tensorrt is missing\n", encoding="utf-8")
    return tmp_path


def test_a_report_of_parts_that_passed(folder, tmp_path):
    row = {"name": "GPU thread, p99, ms", "value": 0.25, "target": 0.3}
    (folder / "backend.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert main([str(folder), str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert result["passed"] is True
    assert [(p["name"], p["passed"], p["reason"]) for p in result["parts"]] == [
        ("pieces", 1, ""),
        ("backend", 1, ""),
        ("engines", 0, "tensorrt is missing"),
    ]
    lines = table(result)
    assert lines[1] == "gpu        Orin, SM 87"
    assert "engines    not run: tensorrt is missing" in lines
    assert any(line.split() == ["GPU", "thread,", "p99,", "ms", "0.25", "0.3"] for line in lines)
    assert lines[-1] == "PASSED"


def test_a_report_of_a_part_that_failed(folder, capsys, tmp_path):
    (folder / "backend.status").write_text("1\n", encoding="utf-8")
    (folder / "backend.xml").write_text(JUNIT, encoding="utf-8")
    assert main([str(folder), str(tmp_path / "out.json")]) == 1
    shown = capsys.readouterr().out
    assert "backend    1 passed, 1 failed, 1 skipped, 2 s" in shown
    assert "  FAILED   test_bad" in shown
    assert "  skipped  test_left_out: no tensorrt" in shown
    assert shown.endswith("\nFAILED\n")


@pytest.mark.parametrize(
    ("status", "reason"), [("124", "the part ran out of time"), ("139", "status 139")]
)
def test_a_part_that_died_without_a_report_has_failed(folder, status, reason):
    (folder / "backend.status").write_text(status, encoding="utf-8")
    (folder / "backend.xml").unlink()
    result = summary(folder)
    assert reason in result["parts"][1]["failed"][0]
    assert result["passed"] is False


def test_nothing_that_ran_is_not_a_pass(tmp_path):
    result = summary(tmp_path)
    assert [part["reason"] for part in result["parts"]] == ["not asked for"] * 3
    assert result["passed"] is False


def test_figures_are_kept_only_where_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv(FIGURES_VARIABLE, raising=False)
    record(Figure("dropped", 1.0))
    monkeypatch.setenv(FIGURES_VARIABLE, str(tmp_path / "figures.jsonl"))
    record(Figure("kept", 0.31, 0.3))
    record(Figure("said", "works"))
    lines = (tmp_path / "figures.jsonl").read_text(encoding="utf-8").splitlines()
    figures = [Figure(**json.loads(line)) for line in lines]
    assert figures == [Figure("kept", 0.31, 0.3), Figure("said", "works", None)]
    assert [figure.met for figure in figures] == [False, True]


def test_the_spin_runtime_refuses_what_is_no_plan():
    runtime = Runtime(Logger())
    for bad in (b"", b"SPIN", b'SPIN{"tensors"', b"ftrt"):
        assert runtime.deserialize_cuda_engine(bad) is None


def test_the_joined_network_answers_like_the_segments(repository):
    model = load_model(repository / "models" / "nanodet_g_416_coco80")
    files = [segment.read() for segment in model.segments]
    providers = ["CPUExecutionProvider"]
    tensor = np.random.default_rng(1).normal(0, 1, model.input.tensor.shape).astype(np.float32)
    joined = onnxruntime.InferenceSession(whole(files, model), providers=providers)
    assert [output.name for output in joined.get_outputs()] == [
        "detections_0",
        "detections_1",
        "detections_2",
    ]
    heads = joined.run(None, {model.input.tensor.name: tensor})
    values = {model.input.tensor.name: tensor}
    for segment, file, head in zip(model.segments, files, heads):
        names = [spec.name for spec in (segment.output, *segment.features)]
        feed = {spec.name: values[spec.name] for spec in segment.inputs}
        session = onnxruntime.InferenceSession(file, providers=providers)
        values |= dict(zip(names, session.run(names, feed)))
        np.testing.assert_allclose(head, values[segment.output.name], atol=1e-3)


def test_pictures_come_from_the_recording():
    frames = pictures(3)
    assert [frame.shape for frame in frames] == [(576, 768, 3)] * 3
    assert not np.array_equal(frames[0], frames[2])


def run_script(repository, *arguments):
    return subprocess.run(
        ["bash", str(repository / "scripts" / "gpu_check.sh"), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_script_says_why_it_cannot_check(repository, tmp_path):
    reason = find_gpu()
    if not isinstance(reason, str):
        pytest.skip("there is a GPU: the script would run for minutes")
    done = run_script(repository, "--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 69
    assert "no NVIDIA driver" in done.stderr
    assert (
        "no NVIDIA driver" in json.loads((tmp_path / "gpu.json").read_text())["parts"][0]["reason"]
    )


@pytest.mark.parametrize("arguments", [["--part", "nonsense"], ["--what"], ["--json"]])
def test_the_script_refuses_what_it_does_not_know(repository, arguments):
    done = run_script(repository, *arguments)
    assert done.returncode == 64
    assert "usage: scripts/gpu_check.sh" in done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_script_has_no_findings_of_shellcheck(repository):
    done = subprocess.run(
        ["shellcheck", str(repository / "scripts" / "gpu_check.sh")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
