"""Release holds when a file descriptor is closed, which the command cannot do.

The kernel releases a lock on a file when the last descriptor of the open file is closed, even if its process was
killed. So this module locks a byte of ``/dev/zfs`` through the descriptor. A helper process waits for the lock and then
releases the holds. Later calls in this process wait for the helper if the descriptor has been closed.

This needs open file description locks, which only Linux has.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zfs_core.exceptions import BadHoldCleanupFD, ZFSGenericError

_DEVICE = "/dev/zfs"
_GET_LOCK, _SET_LOCK = 36, 37
"""Linux's F_OFD_GETLK and F_OFD_SETLK, which Python's fcntl module lacks."""
_WAIT_SECONDS = 60.0
"""Maximum time that one call waits for helper processes."""
_RELEASE_SECONDS = 60.0
"""Timeout of a helper's command."""

# The helper reads the byte's offset, the device, the timeout of a command and the holds from its arguments. It ignores
# signals of the terminal, so that a keyboard interrupt does not stop it before the process whose holds it releases.
_HELPER = """
import fcntl, os, signal, struct, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.setsid()
lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, int(sys.argv[1]), 1, 0)
fcntl.fcntl(os.open(sys.argv[2], os.O_RDWR), 38, lock)  # F_OFD_SETLKW
for tag, name in zip(sys.argv[4::2], sys.argv[5::2]):
    process = subprocess.Popen(["zfs", "release", tag, name], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(float(sys.argv[3]))
    except subprocess.TimeoutExpired:
        process.kill()  # It may hang in the kernel, so do not wait for its exit.
"""


@dataclass(frozen=True)
class _Helper:
    process: subprocess.Popen[bytes]
    offset: int


_helpers: list[_Helper] = []
_lock = threading.Lock()


def validate_descriptor(fd: int) -> None:
    """Raise BadHoldCleanupFD unless ``fd`` is a descriptor of ``/dev/zfs`` that is open for reading.

    Raises NotImplementedError if this system lacks the locks that this module needs.
    """
    if not sys.platform.startswith("linux"):
        raise NotImplementedError(
            "holds can be released when a descriptor is closed only on Linux: pass fd=None, and call lzc_release"
        )
    try:
        status, device = os.fstat(fd), os.stat(_DEVICE)  # noqa: PTH116  # a device, not a path of the caller
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    except (OSError, OverflowError):
        raise BadHoldCleanupFD() from None
    if not stat.S_ISCHR(status.st_mode) or status.st_rdev != device.st_rdev:
        raise BadHoldCleanupFD()
    if flags & (os.O_ACCMODE | os.O_PATH) not in (os.O_RDONLY, os.O_RDWR):
        raise BadHoldCleanupFD().with_details("the descriptor is not open for reading: open it with O_RDWR")


def release_when_closed(fd: int, holds: Mapping[str, str]) -> None:
    """Release the holds in ``{snapshot: tag}`` as soon as all duplicates of ``fd`` are closed.

    ``validate_descriptor`` must have accepted ``fd``. Raises ZFSGenericError if the helper process cannot be started.
    """
    offset = secrets.randbits(62)
    arguments = [word for name, tag in holds.items() for word in (tag, name)]
    try:
        fcntl.fcntl(fd, _SET_LOCK, _pack_lock(fcntl.F_RDLCK, offset))
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _HELPER, str(offset), _DEVICE, str(_RELEASE_SECONDS), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin:/bin:/usr/bin", "LC_ALL": "C"},
        )
    except OSError as error:
        raise ZFSGenericError(
            error.errno or errno.EIO, None, "Failed to start the process that releases the holds of a descriptor"
        ).with_details(str(error)) from None
    with _lock:
        _helpers.append(_Helper(process, offset))


def wait_for_releases(seconds: float | None = None) -> None:
    """Wait until the holds of descriptors that have been closed are released. Raises ZFSGenericError(ETIMEDOUT).

    Waits for at most ``seconds``, and for at most a minute.

    Does not wait again for a helper process that takes too long.
    """
    with _lock:
        helpers = list(_helpers)
    deadline = time.monotonic() + min(_WAIT_SECONDS, _WAIT_SECONDS if seconds is None else seconds)
    for helper in helpers:
        if helper.process.poll() is None and _is_locked(helper.offset):
            continue
        try:
            helper.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ZFSGenericError(errno.ETIMEDOUT, None, "Failed to release holds of a descriptor") from None
        finally:
            with _lock, contextlib.suppress(ValueError):  # Another thread may have removed it.
                _helpers.remove(helper)


def _is_locked(offset: int) -> bool:
    """Return whether the descriptor that locked the byte is still open. The helper's own lock does not count."""
    with _open_device() as fd:
        reply = fcntl.fcntl(fd, _GET_LOCK, _pack_lock(fcntl.F_WRLCK, offset))
    kind = struct.unpack_from("h", reply)[0]
    return bool(kind == fcntl.F_RDLCK)


@contextlib.contextmanager
def _open_device() -> Iterator[int]:
    fd = os.open(_DEVICE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _pack_lock(kind: int, offset: int) -> bytes:
    """Return a ``struct flock`` for one byte of the file."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, offset, 1, 0)
