"""Freezes the root file system for a capture, and thaws it automatically after a timeout."""

from __future__ import annotations

import errno
import fcntl
import os
import threading

from sandbox_agent.machine import system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SECONDS = 60.0
"""The longest accepted freeze: a guest that cannot write is unusable."""


class Freezer:
    """Freezes one file system. ``path``: any directory in it; ``ioctl``: replaces ``fcntl.ioctl`` in tests."""

    def __init__(self, path: str = "/", ioctl: Callable[[int, int, int], object] = fcntl.ioctl) -> None:
        self._path = path
        self._ioctl = ioctl
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def freeze(self, seconds: float) -> None:
        """Sync the file system, then block writers for at most ``seconds``. A frozen file system stays frozen.

        Raises OSError if the file system cannot be frozen.
        """
        system.sync_file_system(self._path)
        with self._lock:
            self._cancel()
            # Start the timer first: a frozen file system might block it.
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
        """Unblock writers. Does nothing if the file system is not frozen."""
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
