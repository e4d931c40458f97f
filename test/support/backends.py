"""Test doubles of a backend: ``support.backends:HangingBackend`` with ``test`` on PYTHONPATH.

They have the real inference thread and the real preprocess; only the network is replaced: exit k
answers with k + 1 boxes of score 0.9. Options come as JSON in the environment variable
``PERCEPTION_RT_TEST_BACKEND``. Frames are counted from 1 by ``begin``, warm-up included.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception_rt.detector.model import Model
from perception_rt.detector.thread_backend import ThreadBackend

OPTIONS_VARIABLE = "PERCEPTION_RT_TEST_BACKEND"


class _Double(ThreadBackend):
    def __init__(
        self,
        model: Model,
        intra_op_threads: int = 1,
        thread_init: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(model, thread_init)
        self.options: dict[str, Any] = json.loads(os.environ.get(OPTIONS_VARIABLE, "{}"))
        self.frame = 0
        for k, output in enumerate(self.outputs):
            for i in range(k + 1):
                left = (4 + 8 * i) % (model.input.width - 8)
                output[0, i, :4] = left, 8, left + 6, 16
                output[0, i, 4 + i % model.classes] = 0.9
        self._start()

    def begin(self, image: NDArray[np.uint8]) -> None:
        super().begin(image)
        self.frame += 1

    def _run_segment(self, k: int) -> None:
        """The answer is always there."""


class HangingBackend(_Double):
    """Segment ``segment`` (default 0) never returns, from frame ``frame`` (default 1) on."""

    def _run_segment(self, k: int) -> None:
        if k == self.options.get("segment", 0) and self.frame >= self.options.get("frame", 1):
            threading.Event().wait()


class ScriptedBackend(_Double):
    """Segments take ``durations_ms[row][segment]``, a row each frame, from frame ``frame`` on.

    Before it each segment takes ``warm_ms``. Over at the end, the rows start again.

    Defaults: ``durations_ms`` [[1, 1, ...]], ``frame`` 1, ``warm_ms`` 1.
    """

    def _run_segment(self, k: int) -> None:
        number = self.frame - self.options.get("frame", 1)
        script = self.options.get("durations_ms", [[1] * self.exit_count])
        row = script[number % len(script)]
        ms = self.options.get("warm_ms", 1) if number < 0 else row[k]
        end_s = time.monotonic() + ms / 1000
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(left_s)


class FaultyBackend(_Double):
    """Segment ``segment`` (default 0) raises in ``raise_frames``, gives NaN in ``nan_frames``."""

    def _run_segment(self, k: int) -> None:
        if k != self.options.get("segment", 0):
            return
        if self.frame in self.options.get("raise_frames", []):
            raise RuntimeError(f"scripted fault of frame {self.frame}")
        wrong = self.frame in self.options.get("nan_frames", [])
        self.outputs[k][0, 0, 4] = np.nan if wrong else 0.9
