from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perception_rt.cli import main, run

ROOT = Path(__file__).resolve().parents[1]
BAG = str(ROOT / "test" / "data" / "pedestrians_mcap")
MODEL = ROOT / "models" / "nanodet_g_416_coco80"


def one_error(capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that was printed, on stderr, without its ``error:``."""
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing command"),
        (["nope"], "No such command 'nope'"),
        (["replay"], "Missing argument 'bag'"),
        (["replay", BAG, "--bogus"], "No such option: --bogus"),
        (["replay", ""], "the recording's name is empty"),
        (["replay", BAG, "--deadline-ms", ""], "deadline '' cannot be read"),
        (["model", "inspect", "--json", "/dev/null/x"], "--json /dev/null/x cannot be written"),
        (["model", "inspect", "--json", "x" * 300 + "/a"], "cannot be written"),
        (["replay", BAG, "--deadline-ms", "0"], "deadline '0' must be above 0"),
        (["replay", BAG, "--deadline-ms", "-3"], "deadline '-3' cannot be read"),
        (["replay", BAG, "--deadline-ms", "nan"], "deadline 'nan' cannot be read"),
        (["replay", BAG, "--deadline-ms", "0x"], "deadline '0x' must be above 0x"),
        (["replay", BAG, "--rate", "nan"], "rate"),
        (["replay", BAG, "--rate", "0"], "rate"),
        (["replay", BAG, "--rate", "inf"], "rate"),
        (["replay", BAG, "--loop", "0"], "'--loop'"),
        (["replay", BAG, "--seconds", "nan"], "'--seconds'"),
        (["replay", BAG, "--seconds", "inf"], "'--seconds'"),
        (["replay", BAG, "--confidence", "1.01"], "'--confidence'"),
        (["replay", BAG, "--loop", "2", "--seconds", "3"], "--loop and --seconds exclude each"),
        (["replay", BAG, "--exit", "0"], "--exit needs --lockstep"),
        (["replay", BAG, "--lockstep", "--rate", "1"], "--rate belongs to real time"),
        (["replay", BAG, "--lockstep", "--deadline-ms", "9"], "--deadline-ms belongs to real"),
        (["replay", BAG, "--lockstep", "--loop", "1"], "--loop belongs to real time"),
        (["replay", BAG, "--lockstep", "--exit", "3"], "--exit 3: the model has the exits 0 to 2"),
        (["replay", BAG, "--lockstep", "--exit", "-1"], "--exit -1: the model has the exits 0"),
        (["replay", "clip.mp4", "--lockstep"], "lock-step replay reads bags only"),
        (["replay", BAG, "--json", "/nowhere/a.json"], "--json /nowhere/a.json cannot be written"),
        (["model", "inspect", "--json", "/nowhere/a.json"], "cannot be written"),
        (["model", "inspect", "--json", "/"], "--json / is a folder"),
        (["up", "--source", "radio"], "source 'radio' is unknown"),
        (["up", "--source", "bag"], "source bag needs a file"),
        (["up", "--source", "topic", "--bag", BAG], "source topic reads no file"),
        (["up", "--log-level", "loud"], "log level 'loud' is unknown"),
        (["up", "--params-file", "/nowhere.yaml"], "parameters file /nowhere.yaml does not exist"),
        (["up", "--receiver", "--no-watchdog"], "the receiver hears nothing"),
        (["demo", "--seconds", "0"], "'--seconds'"),
        (["demo", "--force-miss", "--skip-negative"], "exclude each other"),
    ],
)
def test_usage_errors_are_one_line_and_exit_64(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 64
    assert words in one_error(capfd)


@pytest.mark.parametrize("extra", [[], ["--lockstep"]])
def test_bad_input_is_one_line_and_exits_65(
    extra: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", str(tmp_path / "none"), *extra]) == 65
    assert "no such bag" in one_error(capfd)
    (tmp_path / "a.mcap").write_bytes(b"not a bag")
    assert run(["replay", str(tmp_path / "a.mcap"), *extra]) == 65
    assert "a.mcap" in one_error(capfd)
    assert run(["replay", BAG, "--topic", "/other", *extra]) == 65
    assert "/camera/image_raw/compressed" in one_error(capfd)  # says what is there


@pytest.mark.parametrize(
    "arguments",
    [
        ["model", "inspect", "{}"],
        ["replay", BAG, "--lockstep", "--model", "{}"],
        ["replay", BAG, "--model", "{}"],
    ],
)
def test_a_model_that_changed_against_its_manifest_is_refused(
    arguments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in MODEL.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = bytearray((tmp_path / "segment_1.onnx").read_bytes())
    data[1000] ^= 1
    (tmp_path / "segment_1.onnx").write_bytes(data)
    assert run([part.format(tmp_path) for part in arguments]) == 65
    assert "segment_1.onnx" in one_error(capfd)


def test_model_inspect_shows_every_segment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["model", "inspect", str(MODEL), "--json", str(tmp_path / "m.json")]) == 0
    result = json.loads((tmp_path / "m.json").read_text())
    assert result["name"] == "nanodet_g_416_coco80"
    assert [segment["file"] for segment in result["segments"]] == [
        "segment_0.onnx",
        "segment_1.onnx",
        "segment_2.onnx",
    ]
    assert result["segments"][0]["inputs"] == ["image"]
    assert result["classes"] == 80
    out, _ = capfd.readouterr()
    assert "segment_2.onnx" in out


def test_json_on_stdout_is_nothing_but_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "inspect", "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["command"] == "model inspect"
    assert "segment_2.onnx" in err


@pytest.mark.parametrize("name", ["/dev/full", "x" * 300])
def test_a_result_that_cannot_be_written_is_one_line_and_exits_69(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["model", "inspect", str(MODEL), "--json", name]) == 69
    out, err = capfd.readouterr()
    assert "segment_2.onnx" in out  # the tables are not lost with it
    assert err.count("\n") == 1
    assert err.startswith(f"error: the result cannot be written to {name}: ")


def test_a_full_standard_output_is_one_line_and_exits_69() -> None:
    code = "import sys; from perception_rt.cli import main; sys.exit(main())"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "model", "inspect", str(MODEL), "--json", "-"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 69
    assert done.stderr.splitlines()[-1] == (
        "error: the result cannot be written to standard output: No space left on device"
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_ctrl_c_is_quiet_whenever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("perception_rt.cli.run", interrupted)
    assert main() == 130
    code = (
        "import sys\n"
        "class Ctrl_C:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Ctrl_C())\n"
        "import perception_rt.cli"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


def test_every_command_has_help(capfd: pytest.CaptureFixture[str]) -> None:
    for command in (["up"], ["replay"], ["reset"], ["demo"], ["model"], ["model", "inspect"], []):
        assert run([*command, "--help"]) == 0
        assert "--help" in capfd.readouterr().out


def test_a_failed_run_leaves_an_older_result_alone_and_no_empty_one(tmp_path: Path) -> None:
    old, new = tmp_path / "a.json", tmp_path / "b.json"
    old.write_text("{}")
    for out in (old, new):
        assert run(["replay", str(tmp_path / "none"), "--json", str(out)]) == 65
    assert old.read_text() == "{}"
    assert not new.exists()


def test_the_command_line_is_there_without_ros(tmp_path: Path) -> None:
    """Importing the command line imports neither ROS nor anything heavy."""
    code = (
        "import sys, perception_rt.cli\n"
        "heavy = {'rclpy', 'onnxruntime', 'cv2', 'rosbags', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.integration
def test_up_ends_with_the_status_of_a_node_that_refuses_its_input(tmp_path: Path) -> None:
    pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")
    command = [
        sys.executable,
        "-c",
        "import sys; from perception_rt.cli import main; sys.exit(main())",
    ]
    environment = {
        **os.environ,
        "ROS_DOMAIN_ID": "91",
        "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
    }
    done = subprocess.run(
        [*command, "up", "--bag", str(tmp_path / "none")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 65
    assert "no such bag" in done.stdout
    assert "stopping all: detector ended with status 65" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
