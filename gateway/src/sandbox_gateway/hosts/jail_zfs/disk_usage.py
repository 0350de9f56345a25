"""Read how much data the file systems of sandboxes contain, without waiting for a file system that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from sandbox_gateway.hosts.threads import run_in_thread

_TIMEOUT_SECONDS = 2.0


class DiskUsage:
    """Reads the usage of mounted ZFS file systems with a system call, which has no timeout."""

    def __init__(self) -> None:
        self._paths_being_read: set[Path] = set()
        """Later calls skip these, so that a file system that hangs blocks only one thread."""

    async def read(self, mount_points: Mapping[str, Path]) -> dict[str, int | None]:
        """Return the number of bytes that each file system references, or None if reading it takes too long."""
        paths = [path for path in mount_points.values() if path not in self._paths_being_read]
        results: dict[Path, int | None] = {}

        def read_all() -> None:
            for path in paths:
                self._paths_being_read.add(path)
                results[path] = _read_used_bytes(path)
                self._paths_being_read.discard(path)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                await run_in_thread(read_all)
        return {key: results.get(path) for key, path in mount_points.items()}


def _read_used_bytes(mount_point: Path) -> int | None:
    try:
        status = os.statvfs(mount_point)
    except OSError:
        return None
    return (status.f_blocks - status.f_bfree) * status.f_frsize
