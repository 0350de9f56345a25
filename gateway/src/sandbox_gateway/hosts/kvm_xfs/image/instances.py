"""Create a machine's files from a snapshot, and move, flush and remove them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sandbox_gateway.hosts import directory_records
from sandbox_gateway.hosts.kvm_xfs.image import held_images, reflink
from sandbox_gateway.hosts.kvm_xfs.image.layout import Instance, SnapshotFiles
from sandbox_gateway.records import Sandbox


def create_files(source: SnapshotFiles, files: Instance, sandbox: Sandbox, with_memory: bool) -> None:
    """Create a machine's files from those of a snapshot.

    The base image of the memory outlives the snapshot.
    """
    files.directory.parent.mkdir(mode=0o711, exist_ok=True)
    files.directory.mkdir(mode=0o711)
    files.run.mkdir(mode=0o700)
    reflink.clone(source.disk, files.disk)
    _grow(files.disk, sandbox.resources.disk_mb << 20)
    files.kernel.hardlink_to(source.kernel)
    files.initrd.hardlink_to(source.initrd)
    if with_memory:
        held_images.hold(source.memory, files.memory, source.memory_directory)
    else:
        create_memory_file(files, sandbox.resources.memory_mb)


def create_memory_file(files: Instance, memory_mb: int) -> None:
    """Create an empty memory image for a machine that boots.

    Images of a former machine with the same files are not images of this machine's memory, so they are removed.
    """
    files.last_memory_check.unlink(missing_ok=True)
    files.taken_marker.unlink(missing_ok=True)
    for link in (files.last_memory, files.memory):
        held_images.release(link)
    with files.memory.open("xb") as image:
        os.fchmod(image.fileno(), 0o600)
        image.truncate(memory_mb << 20)


def sync(files: Instance) -> None:
    """Flush a machine's disk image and the file system's log to disk."""
    directory_records.sync_file(files.disk)
    directory_records.sync_directory(files.directory)


def move(before: Instance, after: Instance) -> None:
    """Move a machine's files to another sandbox with a single rename. The running machine keeps its open files."""
    after.directory.parent.mkdir(mode=0o711, exist_ok=True)
    before.directory.rename(after.directory)
    with contextlib.suppress(OSError):
        before.directory.parent.rmdir()


def remove(files: Instance) -> None:
    """Remove a machine's files, and the sandbox's directory if it is then empty."""
    held = held_images.targets_below(files.directory)
    directory_records.remove(files.directory)
    held_images.remove_targets(held)
    with contextlib.suppress(OSError):
        files.directory.parent.rmdir()


def remove_all(sandbox: Path) -> None:
    """Remove the directory of a sandbox, with the files of its machines."""
    if not sandbox.exists():
        return
    held = [path for each in directory_records.directories(sandbox) for path in held_images.targets_below(each)]
    directory_records.remove(sandbox)
    held_images.remove_targets(held)


def image_bytes(files: Instance) -> int:
    """Return the size of the larger of the images on which a capture of a machine can be based, without holes."""
    blocks = [path.stat().st_blocks for path in (files.memory, files.last_memory) if path.exists()]
    return max(blocks, default=0) * 512


def _grow(disk: Path, size: int) -> None:
    if size > disk.stat().st_size:
        os.truncate(disk, size)
