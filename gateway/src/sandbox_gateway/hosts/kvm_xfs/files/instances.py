"""Create a machine's files from a snapshot, and move, flush and remove them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs import commit_protocol
from sandbox_gateway.hosts.kvm_xfs.files import held_images, reflink
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles, SnapshotFiles
from sandbox_gateway.records import Sandbox


def create_files(source: SnapshotFiles, files: InstanceFiles, sandbox: Sandbox, with_memory: bool) -> None:
    """Create a machine's files from the files of a snapshot.

    The machine's base memory image outlives the snapshot.
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


def create_memory_file(files: InstanceFiles, memory_mb: int) -> None:
    """Create an empty memory image for a machine that boots.

    Removes images of an earlier machine with the same files, because they do not match this machine's memory.
    """
    files.last_memory_check.unlink(missing_ok=True)
    files.taken_marker.unlink(missing_ok=True)
    for link in (files.last_memory, files.memory):
        held_images.release(link)
    with files.memory.open("xb") as image:
        os.fchmod(image.fileno(), 0o600)
        image.truncate(memory_mb << 20)


def sync(files: InstanceFiles) -> None:
    """Flush a machine's disk image and directory to the device."""
    commit_protocol.sync_file(files.disk)
    commit_protocol.sync_directory(files.directory)


def move(old_files: InstanceFiles, new_files: InstanceFiles) -> None:
    """Move a machine's files to a different sandbox with a single rename. The running machine keeps its files open."""
    new_files.directory.parent.mkdir(mode=0o711, exist_ok=True)
    old_files.directory.rename(new_files.directory)
    with contextlib.suppress(OSError):
        old_files.directory.parent.rmdir()


def remove(files: InstanceFiles) -> None:
    """Remove a machine's files, and the sandbox's directory if it is then empty."""
    hard_links = held_images.list_targets_in(files.directory)
    commit_protocol.remove(files.directory)
    held_images.remove_targets(hard_links)
    with contextlib.suppress(OSError):
        files.directory.parent.rmdir()


def remove_all(sandbox: Path) -> None:
    """Remove the directory of a sandbox, with the files of its machines."""
    if not sandbox.exists():
        return
    hard_links = [
        path for each in commit_protocol.list_directories(sandbox) for path in held_images.list_targets_in(each)
    ]
    commit_protocol.remove(sandbox)
    held_images.remove_targets(hard_links)


def measure_image(files: InstanceFiles) -> int:
    """Return the allocated size, in bytes, of the larger of the images that a capture can use as its base."""
    block_counts = [path.stat().st_blocks for path in (files.memory, files.last_memory) if path.exists()]
    return max(block_counts, default=0) * 512


def _grow(disk: Path, size: int) -> None:
    if size > disk.stat().st_size:
        os.truncate(disk, size)
