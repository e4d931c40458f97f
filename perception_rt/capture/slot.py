"""The newest-frame slot between the capture thread and the deadline thread."""

from __future__ import annotations

import threading
from collections import deque

from perception_rt.core.frame import FrameBuffer


class NewestSlot:
    """Hands the newest frame from one writer thread to one reader thread, without blocking.

    Every frame that was put is seen exactly once: by ``take``, or as the return value of the
    ``put`` that replaced it. Ownership moves with single deque operations, each atomic in CPython,
    so no lock is held anywhere.

    Args:
        buffers: frame buffers in all: one being written, one waiting, and as many as the reader
            holds at once (1 with the default of 3).
    """

    def __init__(self, buffers: int = 3) -> None:
        if buffers < 3:
            raise ValueError(f"a newest-frame slot needs at least 3 buffers, got {buffers}")
        self._free: deque[FrameBuffer] = deque(FrameBuffer() for _ in range(buffers))
        self._newest: deque[FrameBuffer] = deque()
        self._writing: FrameBuffer | None = None
        # A binary semaphore: locked while there is nothing new. Only the writer releases, only the
        # reader acquires.
        self._signal = threading.Lock()
        self._signal.acquire()

    @property
    def pending(self) -> bool:
        """True when a frame waits to be taken."""
        return bool(self._newest)

    def writable(self) -> FrameBuffer:
        """The buffer to fill next, the same one until it is put. Writer thread only; never blocks.

        Raises:
            RuntimeError: the reader holds more buffers than the slot was made for.
        """
        if self._writing is None:
            try:
                self._writing = self._free.popleft()
            except IndexError:
                raise RuntimeError(
                    "no free frame buffer: the reader holds more than the slot was made for"
                ) from None
        return self._writing

    def put(self, buffer: FrameBuffer) -> FrameBuffer | None:
        """Offer ``buffer`` (from ``writable``) to the reader. Writer thread only; never blocks.

        Returns:
            The frame that nobody had taken and that this one replaces, readable until the next
            ``writable``; or None.
        """
        self._writing = None
        replaced = self.take()
        if replaced is not None:
            self._free.append(replaced)
        self._newest.append(buffer)
        if self._signal.locked():
            self._signal.release()
        return replaced

    def take(self) -> FrameBuffer | None:
        """The newest frame, now owned by the reader, or None. Reader thread only; never blocks.

        None is also possible in the instant in which ``put`` exchanges two frames; ``wait`` then
        wakes again.
        """
        try:
            return self._newest.pop()
        except IndexError:
            return None

    def release(self, buffer: FrameBuffer) -> None:
        """Give back a buffer that ``take`` returned. Reader thread only."""
        self._free.append(buffer)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a frame is there (True) or ``timeout_s`` seconds have passed (False).

        Reader thread only.
        """
        # Clears a signal left by a frame that was taken without waiting.
        self._signal.acquire(blocking=False)
        if self._newest:
            return True
        return self._signal.acquire(timeout=max(timeout_s, 0.0))
