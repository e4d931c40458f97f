"""The errors of perception_rt: one base class, few leaves.

A message says what was wrong, where, and what to do about it, in one line. The command line
prints exactly that line and exits with ``exit_code`` (sysexits: 64 usage, 65 data, 69
unavailable, 70 software, 77 permission).
"""

from __future__ import annotations


class PerceptionRtError(Exception):
    """Base of every error that perception_rt raises on purpose."""

    exit_code = 70


class UsageError(PerceptionRtError):
    """A command line, parameter or configuration value that cannot be used."""

    exit_code = 64


class InputError(PerceptionRtError):
    """A bag, video, image or message that cannot be read or decoded."""

    exit_code = 65


class ModelError(PerceptionRtError):
    """A model directory that does not match its manifest, or cannot be loaded."""

    exit_code = 65


class UnavailableError(PerceptionRtError):
    """Something outside the process that is needed is not there (ROS, a device, a worker)."""

    exit_code = 69


class BackendError(PerceptionRtError):
    """A fault of an inference backend: failed run, NaN or infinity in an output, dead device."""

    exit_code = 70


class RealtimeError(PerceptionRtError):
    """A real-time right (SCHED_FIFO, affinity, memory lock) that was required and refused."""

    exit_code = 77
