"""The environment that launch and ``up`` give to the nodes: the DDS profiles of config/ and the
allocator's settings.

Without it a 2.76 MB image does not fit Fast DDS's shared memory (512 KiB), and every one of them
is fresh memory from the kernel, faulted in page by page. What the user has set is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# glibc maps and unmaps every allocation above its threshold, and returns free memory at the top of
# the heap. The threshold lies above any image; not far above, as older glibc refuse more.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
FASTDDS = "FASTRTPS_DEFAULT_PROFILES_FILE"
CYCLONEDDS = "CYCLONEDDS_URI"

# Whoever sets one of these has chosen Fast DDS's transports.
_FASTDDS_CHOICES = (FASTDDS, "FASTDDS_DEFAULT_PROFILES_FILE", "FASTDDS_BUILTIN_TRANSPORTS")


def environment(share: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to ``environ`` for a node.

    Args:
        share: the package's share folder; a profile that is not in its ``config`` is left out.
        environ: the user's environment.
    """
    wanted = dict(MALLOC)
    fastdds = share / "config" / "fastdds.xml"
    cyclonedds = share / "config" / "cyclonedds.xml"
    chosen = any(environ.get(name) for name in _FASTDDS_CHOICES)
    if fastdds.is_file() and not chosen and not _keeps_to_this_host(environ):
        wanted[FASTDDS] = str(fastdds)
    if cyclonedds.is_file():
        wanted[CYCLONEDDS] = cyclonedds.absolute().as_uri()
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def _keeps_to_this_host(environ: Mapping[str, str]) -> bool:
    """rmw_fastrtps adds transports bound to localhost to those of a profile instead of replacing
    them: with the profile, the node would be heard outside.
    """
    if environ.get("ROS_LOCALHOST_ONLY") == "1":
        return True
    return environ.get("ROS_AUTOMATIC_DISCOVERY_RANGE", "").upper() in ("LOCALHOST", "OFF")
