from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from perception_rt.core.errors import InputError
from perception_rt.replay.calibration import calibration_images


def write_pictures(folder: Path, count: int) -> Path:
    folder.mkdir()
    for i in range(count):
        cv2.imwrite(str(folder / f"{i:03}.png"), np.full((4, 6, 3), i, np.uint8))
    (folder / "notes.txt").write_text("no picture")
    return folder


def test_pictures_are_taken_in_order_and_evenly_spread(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "a", 10)
    assert [image[0, 0, 0] for image in calibration_images(folder)] == list(range(10))
    assert [image[0, 0, 0] for image in calibration_images(folder, 4)] == [0, 2, 5, 7]
    assert calibration_images(folder)[0].shape == (4, 6, 3)


def test_frames_of_a_bag(repository: Path) -> None:
    bag = repository / "test" / "data" / "pedestrians_mcap"
    images = calibration_images(bag, 5)
    assert [image.shape for image in images] == [(576, 768, 3)] * 5
    assert len({image.tobytes() for image in images}) == 5
    assert len(calibration_images(bag / "pedestrians_mcap.mcap", 3)) == 3


def test_what_holds_no_frames_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such folder or bag: .*nowhere"):
        calibration_images(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds neither a bag nor pictures"):
        calibration_images(write_pictures(tmp_path / "none", 0))
    bad = write_pictures(tmp_path / "bad", 1)
    (bad / "000.png").write_bytes(b"\x89PNG nonsense")
    with pytest.raises(InputError, match=r"000\.png is not a picture"):
        calibration_images(bad)
