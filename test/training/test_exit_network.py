"""The shipped four-exit model against scripts/exit_graph.py, and what measures it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import exit_graph as ex
import numpy as np
import onnx
import pytest
from measure_exits import ap50
from onnx import numpy_helper

from perception_rt.core.config import SourceConfig
from perception_rt.detector.model import load_model
from perception_rt.replay.bag_frames import bag_frames


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(__file__).resolve().parents[2] / "models" / "nanodet_g_driving"


@pytest.fixture(scope="module")
def weights(folder: Path) -> ex.Weights:
    """The convolutions as they stand in the shipped files."""
    found: ex.Weights = {}
    for k in range(ex.EXITS):
        for tensor in onnx.load(folder / f"segment_{k}.onnx").graph.initializer:
            name, _, kind = tensor.name.rpartition(".")
            if kind in ("w", "b"):
                long = {"w": "weight", "b": "bias"}[kind]
                found[f"{name}.{long}"] = np.array(numpy_helper.to_array(tensor))
    return found


def test_the_manifest_is_that_of_the_topology(folder: Path) -> None:
    model = load_model(folder)
    assert model.input.tensor.shape == (1, 3, 320, 544)
    assert model.labels == ex.LABELS
    assert [s.exit.anchors for s in model.segments] == [3570] * 4
    costs = [s.exit.cost_ms_median for s in model.segments]
    assert all(a and b and a < b for a, b in pairwise(costs))


@pytest.mark.parametrize("exit_index", range(ex.EXITS))
def test_the_chain_equals_the_uncut_network(
    folder: Path, weights: ex.Weights, repository: Path, exit_index: int
) -> None:
    bag = repository / "test/data/pedestrians_mcap"
    chain = [ex.session(folder / f"segment_{k}.onnx") for k in range(exit_index + 1)]
    whole = [ex.session(ex.whole_model(exit_index, weights))]
    frame = next(bag_frames(SourceConfig("bag", str(bag)))).image
    rng = np.random.default_rng(exit_index)
    noise = rng.standard_normal((1, 3, ex.HEIGHT, ex.WIDTH)).astype(np.float32)
    for image in (ex.normalise(ex.letterbox(frame)[0]), noise):
        got, want = ex.run_chain(chain, image)[-1], ex.run_chain(whole, image)[0]
        assert np.abs(got - want).max() <= 1e-4
    # the frame shows persons, so equal answers are not equal silence
    frame_answer = ex.run_chain(chain, ex.normalise(ex.letterbox(frame)[0]))[-1]
    assert frame_answer[:, 4].max() > 0.5


def test_a_weight_of_the_wrong_shape_is_named(weights: ex.Weights) -> None:
    bad = {**weights, "conv6.weight": np.zeros((1, 2, 3, 3), np.float32)}
    with pytest.raises(SystemExit, match="layer conv6 has the wrong shape"):
        ex.segment_model(1, bad)


BOX = [10.0, 10.0, 20.0, 20.0]
AWAY = [50.0, 50.0, 60.0, 60.0]


@pytest.mark.parametrize(
    ("found", "truth", "expected"),
    [
        ([[*BOX, 0.9]], [[*BOX, 1]], 1.0),
        ([[*AWAY, 0.9]], [[*BOX, 1]], 0.0),
        ([[*AWAY, 0.9], [*BOX, 0.8]], [[*BOX, 1]], 0.5),  # one wrong before it
        ([[*BOX, 0.9], [*BOX, 0.8]], [[*BOX, 1]], 1.0),  # a double behind it
        ([[*AWAY, 0.9], [*BOX, 0.8]], [[*BOX, 1], [*AWAY, 0]], 1.0),  # ignored, not wrong
        ([[*BOX, 0.9]], [[*BOX, 1], [*AWAY, 1]], 0.5),
    ],
)
def test_ap50(found: list[list[float]], truth: list[list[float]], expected: float) -> None:
    got = ap50([np.array(found, np.float32)], [np.array(truth, np.float32)])
    assert got == pytest.approx(expected)
