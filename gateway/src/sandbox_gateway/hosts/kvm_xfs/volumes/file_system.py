"""Format, freeze, flush, grow and unmount the file system in a volume's image.

All functions may block in the kernel. Run those that are not coroutines in a thread (`threads.run_with_timeout`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import struct
import time
from pathlib import Path

from sandbox_gateway.command import run_async
from sandbox_gateway.errors import BackendFailed, Invalid
from sandbox_gateway.hosts.kvm_xfs.process_checks import send_signal, wait_for_exit
from sandbox_gateway.hosts.kvm_xfs.volumes.launcher import BLOCK_BYTES, EXT4_IOC_RESIZE_FS, read_block_counts
from sandbox_gateway.hosts.kvm_xfs.volumes.server_process import ServerProcess
from sandbox_gateway.hosts.threads import run_with_timeout

_RELEASE_TIMEOUT_SECONDS = 10.0
_FORMAT_TIMEOUT_SECONDS = 120.0
_RESIZE_TIMEOUT_SECONDS = 600.0
_LOOP_SET_CAPACITY = 0x4C07
_CAP_SYS_RESOURCE = 24
_EXT4_MAGIC = 0xEF53
_EXT4_JOURNAL_INODE = 8

_libc = ctypes.CDLL(None, use_errno=True)


async def format_image(image: Path, volume: str, size_mb: int) -> None:
    """Create ``image``, a sparse file of ``size_mb`` MiB with an empty ext4 file system.

    ``image`` must not exist yet. On failure, it is removed.
    """
    await asyncio.to_thread(_create_sparse_file, image, size_mb << 20)
    try:
        # Initialise everything now (holes read as zeros), so that no kernel thread writes to it later.
        await run_async(
            [
                *("mke2fs", "-q", "-F", "-t", "ext4", "-b", str(BLOCK_BYTES), "-m", "0", "-L", volume[:16]),
                *("-E", "lazy_itable_init=0,lazy_journal_init=0,discard"),
                *("-J", f"size={min(64, max(4, size_mb // 64))}"),
                str(image),
            ],
            timeout=_FORMAT_TIMEOUT_SECONDS,
        )
        # Allow any user of a guest to write. Remove fsck's directory lost+found, which guests do not need.
        debugfs_commands = "set_inode_field <2> mode 040777\nrmdir lost+found\n"
        await run_async(
            ["debugfs", "-w", "-f", "-", str(image)], timeout=_FORMAT_TIMEOUT_SECONDS, input=debugfs_commands
        )
    except BaseException:
        await asyncio.to_thread(image.unlink)
        raise


def _create_sparse_file(image: Path, size: int) -> None:
    with image.open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.truncate(size)


async def stop_server(server: ServerProcess, seconds: float) -> None:
    """Kill a server. On return, all its data is in the image and the image is no longer mounted."""
    pidfd = os.dup(server.pidfd) if server.pidfd >= 0 else -1  # Copied, because stop_watching() may close the original.
    failure = f"the server for volume {server.volume} did not exit"
    await run_with_timeout(lambda: _kill_and_sync(server, pidfd, seconds), seconds, failure)


def _kill_and_sync(server: ServerProcess, pidfd: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    if pidfd >= 0:
        root_fd = -1
        with contextlib.suppress(BackendFailed):
            root_fd = server.open_root()
        try:
            send_signal(pidfd, signal.SIGKILL)
            if not wait_for_exit(pidfd, seconds):
                raise TimeoutError
            if root_fd >= 0:
                _syncfs(root_fd)
        finally:
            os.close(pidfd)
            if root_fd >= 0:
                os.close(root_fd)  # This is the last reference, so the kernel unmounts the file system.
    if server.settings.image:
        wait_until_released(Path(server.settings.image), deadline)


def wait_until_released(image: Path, deadline: float) -> None:
    """Wait until no loop device uses the image, so that the launcher's lock is released. Raises TimeoutError."""
    with contextlib.suppress(FileNotFoundError), image.open("rb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                time.sleep(0.001)


def wait_until_frozen(server: ServerProcess, seconds: float) -> None:
    """Wait until all threads of a server that received SIGSTOP have stopped and all its data is in the image.

    Raises TimeoutError after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    root_fd = server.open_root()
    try:
        while not all(_is_stopped(task) for task in Path(f"/proc/{server.pid}/task").iterdir()):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.0002)
        _syncfs(root_fd)
    finally:
        os.close(root_fd)


def _is_stopped(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True


def sync(server: ServerProcess) -> None:
    """Write a running server's cached data to the image."""
    root_fd = server.open_root()
    try:
        _syncfs(root_fd)
    finally:
        os.close(root_fd)


def count_used_bytes(server: ServerProcess) -> int:
    """Return how many bytes the files of a running server's volume use."""
    root_fd = server.open_root()
    try:
        status = os.statvfs(root_fd)
        return (status.f_blocks - status.f_bfree) * status.f_frsize
    finally:
        os.close(root_fd)


def grow(server: ServerProcess) -> None:
    """Grow the file system of a running server to the size of its image."""
    root_fd = server.open_root()
    try:
        device = os.fstat(root_fd).st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        with Path("/dev", name).open("rb") as loop:
            fcntl.ioctl(loop, _LOOP_SET_CAPACITY, 0)
        block_count = Path(server.settings.image).stat().st_size // BLOCK_BYTES
        fcntl.ioctl(root_fd, EXT4_IOC_RESIZE_FS, struct.pack("=Q", block_count))
    finally:
        os.close(root_fd)


async def grow_offline(image: Path) -> None:
    """Grow the unmounted file system to the size of its image, unless it can be grown once it is mounted."""
    if can_resize():
        return
    with image.open("rb") as file:
        if read_block_counts(file.fileno())[0] >= os.fstat(file.fileno()).st_size // BLOCK_BYTES:
            return
    deadline = time.monotonic() + _RELEASE_TIMEOUT_SECONDS
    await run_with_timeout(
        lambda: wait_until_released(image, deadline), _RELEASE_TIMEOUT_SECONDS, f"the image {image} was not released"
    )
    if problem := await _repair(image):
        raise BackendFailed(
            f"the file system in {image} is damaged ({problem}): roll the volume back to one of its snapshots"
        )
    await run_async(["resize2fs", str(image)], timeout=_RESIZE_TIMEOUT_SECONDS)


async def repair_imported_image(image: Path) -> None:
    """Check all of an unmounted file system before it is mounted for the first time, and replay its journal.

    Raises Invalid if it is damaged, or not a file system that ``format_image`` could have created.
    """
    if problem := _find_superblock_problem(image) or (await _repair(image)).replace(f"{image}", "it"):
        raise Invalid(f"the file system in the snapshot file is damaged ({problem}): export the snapshot again")


def _find_superblock_problem(image: Path) -> str:
    """Return, as a clause, why a file system cannot come from a volume, or "". A foreign journal could name a disk."""
    with image.open("rb") as file:
        superblock = os.pread(file.fileno(), 1024, 1024)
    (magic,) = struct.unpack_from("<H", superblock, 0x38)
    (block_size_log,) = struct.unpack_from("<I", superblock, 0x18)
    journal_uuid, journal_inode, journal_device = struct.unpack_from("<16s2I", superblock, 0xD0)
    if magic != _EXT4_MAGIC or 1024 << min(block_size_log, 32) != BLOCK_BYTES:
        return f"it is not an ext4 file system with blocks of {BLOCK_BYTES} bytes"
    if journal_inode != _EXT4_JOURNAL_INODE or journal_device or any(journal_uuid):
        return "it does not contain its journal"
    return ""


async def _repair(image: Path) -> str:
    """Repair an unmounted file system as far as that is safe. Return the output if this was not enough, or ""."""
    result = await run_async(["e2fsck", "-f", "-p", str(image)], timeout=_RESIZE_TIMEOUT_SECONDS, check=False)
    if result.returncode > 1:
        return (result.stdout + result.stderr).strip()[-500:] or f"e2fsck exited with {result.returncode}"
    if "/lost+found not found" in result.stdout:
        # e2fsck has created it again: see format_image. This does nothing if files were recovered to it.
        await run_async(
            ["debugfs", "-w", "-R", "rmdir lost+found", str(image)], timeout=_FORMAT_TIMEOUT_SECONDS, check=False
        )
    return ""


def can_resize() -> bool:
    """Return whether this process can grow a mounted ext4 file system.

    In a container, it may lack the capability that this requires.
    """
    status = Path("/proc/self/status").read_text()
    effective_capabilities = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective_capabilities, 16) >> _CAP_SYS_RESOURCE & 1)


def _syncfs(descriptor: int) -> None:
    if _libc.syncfs(descriptor) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))
