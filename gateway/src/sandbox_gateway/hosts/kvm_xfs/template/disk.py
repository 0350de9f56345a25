"""Create a sparse ext4 image from a tree, without a mount or a loop device."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
from pathlib import Path

from sandbox_gateway.command import run_async
from sandbox_gateway.errors import BackendFailed, Invalid, NoSpace
from sandbox_gateway.hosts.base import Log
from sandbox_gateway.hosts.rootfs_common import STEP_TIMEOUT_SECONDS

_MAX_JOURNAL_MB = 16


async def create_image(tree: Path, image: Path, disk_mb: int, log: Log) -> None:
    """Create ``image``, with a size of ``disk_mb`` MiB, from ``tree``.

    Raises Invalid if the tree does not fit, NoSpace if the host's disk is full, and BackendFailed if mke2fs fails.
    """
    log(f"creating the disk image ({disk_mb} MiB)")
    with image.open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.truncate(disk_mb << 20)
    journal_mb = min(_MAX_JOURNAL_MB, max(4, disk_mb // 64))
    argv = [
        *("mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-L", "root", "-d", str(tree)),
        # Initialise everything now (holes read as zeros), so that no kernel thread does so after the first mount.
        *("-E", "lazy_itable_init=0,lazy_journal_init=0,discard", "-J", f"size={journal_mb}"),
        str(image),
    ]
    result = await run_async(argv, timeout=STEP_TIMEOUT_SECONDS, check=False)
    if result.returncode == 0:
        return
    output = (result.stderr.strip() or result.stdout.strip())[-1000:]
    if "No space left on device" in output and shutil.disk_usage(image.parent).free < 1 << 20:
        raise NoSpace(
            "creating the disk image failed because the host's disk is full: free some space and build the template "
            "again"
        )
    needed_mb = await asyncio.to_thread(_measure_tree_size_mb, tree)
    if "populating" in output or needed_mb > disk_mb:
        raise Invalid(
            f"the root file system ({needed_mb} MiB) does not fit on a disk of {disk_mb} MiB: "
            f"set 'diskSizeMB' to {-(-needed_mb * 5 // 4 // 64) * 64 + 64} or more"
        )
    raise BackendFailed(f"mke2fs failed with exit code {result.returncode}: {output}")


def _measure_tree_size_mb(tree: Path) -> int:
    """Return how many MiB a tree needs on a file system with 4 KiB blocks."""
    size = 0
    inodes: set[int] = set()
    pending_directories = [str(tree)]
    while pending_directories:
        # Paths that are too long for Linux do not count: this only estimates the size for an error message.
        with contextlib.suppress(OSError), os.scandir(pending_directories.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if status.st_ino not in inodes:
                    inodes.add(status.st_ino)
                    size += -(-status.st_size // 4096) * 4096
                if stat.S_ISDIR(status.st_mode):
                    pending_directories.append(entry.path)
    return -(-size >> 20) or 1
