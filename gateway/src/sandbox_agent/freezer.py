"""Freezing the root file system for a capture, with a thaw that comes by itself."""

from __future__ import annotations

import errno
import fcntl
import os
import threading

from sandbox_agent import system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SECONDS = 60.0
"""A freeze longer than that is refused: a guest that cannot write is as good as dead."""


class Freezer:
    """``path``: any directory of the file system; ``ioctl``: as ``fcntl.ioctl``."""

    def __init__(self, path: str = "/", ioctl: Callable[[int, int, int], object] = fcntl.ioctl) -> None:
        self._path = path
        self._ioctl = ioctl
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def freeze(self, seconds: float) -> None:
        """Write everything out, then stop all writers, for at most so long; anew where it is frozen already.

        Raises OSError where the file system cannot be frozen.
        """
        system.sync_file_system(self._path)
        with self._lock:
            self._cancel()
            # Ready before the freeze: a thaw must not hang on anything that a frozen system refuses.
            timer = threading.Timer(seconds, self.thaw)
            timer.daemon = True
            timer.start()
            self._timer = timer
            try:
                self._call(system.FIFREEZE)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    self._cancel()
                    raise

    def thaw(self) -> None:
        """Let writers go on; nothing happens where it is not frozen."""
        with self._lock:
            self._cancel()
            try:
                self._call(system.FITHAW)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _call(self, request: int) -> None:
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._ioctl(fd, request, 0)
        finally:
            os.close(fd)
