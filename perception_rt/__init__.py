"""Real-time perception for ROS 2: a fixed deadline at variable quality."""

from __future__ import annotations

__version__ = "0.1.0"
