"""Read how much data the file systems of sandboxes contain, without waiting for a hung file system."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from sandbox_gateway.hosts.threads import run_in_thread

_TIMEOUT_SECONDS = 2.0


class DiskUsage:
    """Reads the usage of mounted ZFS file systems with a system call, which has no timeout."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths_being_read: set[Path] = set()
        """Other threads skip these, so that a hung file system blocks only one thread."""

    async def read(self, mount_points: Mapping[str, Path]) -> dict[str, int | None]:
        """Return the number of bytes that each file system references, or None if it cannot be read in time."""
        results: dict[Path, int | None] = {}
        is_abandoned = threading.Event()

        def read_all() -> None:
            for path in mount_points.values():
                if is_abandoned.is_set():
                    return
                with self._reserved(path) as is_free:
                    if is_free:
                        results[path] = _read_used_bytes(path)

        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                await run_in_thread(read_all)
        except TimeoutError:
            pass
        finally:
            is_abandoned.set()
        return {key: results.get(path) for key, path in mount_points.items()}

    @contextlib.contextmanager
    def _reserved(self, path: Path) -> Iterator[bool]:
        """Yield whether this file system is free. If it is, other threads skip it inside this context."""
        with self._lock:
            is_free = path not in self._paths_being_read
            self._paths_being_read.add(path)
        try:
            yield is_free
        finally:
            if is_free:
                with self._lock:
                    self._paths_being_read.discard(path)


def _read_used_bytes(mount_point: Path) -> int | None:
    try:
        status = os.statvfs(mount_point)
    except OSError:
        return None
    return (status.f_blocks - status.f_bfree) * status.f_frsize
