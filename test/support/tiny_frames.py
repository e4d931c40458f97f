"""Frames of the tiny model through any backend, with the answers they must give."""

from __future__ import annotations

import time

import numpy as np
from support.tiny_model import SIZE, expected_detections

MS = 1_000_000
SECOND = 1_000_000_000


def grey(value):
    return np.full((SIZE, SIZE, 3), value, np.uint8)


def answer(value, k):
    return expected_detections(k, value / 255)


def finish(backend, k):
    limit = time.monotonic_ns() + 10 * SECOND
    while not backend.ready(k):
        backend.wait_until(limit)
        assert time.monotonic_ns() < limit


def frame(backend, value, exits=3):
    backend.begin(grey(value))
    for k in range(exits):
        backend.launch(k)
    finish(backend, exits - 1)
    return backend.detections(exits - 1)


def wait_for(condition):
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0)
