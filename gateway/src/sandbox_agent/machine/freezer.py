"""Freeze the root file system for a capture, and thaw it automatically after a timeout."""

from __future__ import annotations

import errno
import fcntl
import os
import threading

from sandbox_agent.machine import system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MAX_FREEZE_SECONDS = 60.0
"""The longest freeze that a request may specify. A guest that cannot write is unusable."""


class Freezer:
    """A freezer for the file system that contains the directory ``path``. Tests replace ``ioctl``."""

    def __init__(self, path: str = "/", ioctl: Callable[[int, int, int], object] = fcntl.ioctl) -> None:
        self._path = path
        self._ioctl = ioctl
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def freeze(self, seconds: float) -> None:
        """Sync the file system, then block writers for at most ``seconds``.

        If the file system is already frozen, the call only restarts the timer. Raises OSError if it cannot be frozen.
        """
        system.sync_file_system(self._path)
        with self._lock:
            self._cancel_timer()
            # Start the timer first: starting a thread might block on a frozen file system.
            timer = threading.Timer(seconds, self.thaw)
            timer.daemon = True
            timer.start()
            self._timer = timer
            try:
                self._call_ioctl(system.FIFREEZE)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    self._cancel_timer()
                    raise

    def thaw(self) -> None:
        """Unblock writers. Does nothing if the file system is not frozen."""
        with self._lock:
            self._cancel_timer()
            try:
                self._call_ioctl(system.FITHAW)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _call_ioctl(self, request: int) -> None:
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._ioctl(fd, request, 0)
        finally:
            os.close(fd)
