"""Entry points of the nodes. Importing one takes almost half a second; a Ctrl-C in it must end the
process, not print where it was.
"""

from __future__ import annotations

import importlib
import os
import signal


def _run(module: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    code: int = importlib.import_module(module).main()  # sets handlers of its own
    return code


def detector_node() -> int:
    """Run the detector node; returns its exit status."""
    return _run("perception_rt.ros.detector_node")


def watchdog_node() -> int:
    """Run the watchdog node; returns its exit status."""
    return _run("perception_rt.ros.watchdog_node")
