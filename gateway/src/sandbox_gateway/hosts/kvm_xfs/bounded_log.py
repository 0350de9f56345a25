"""Provide a fixed-size in-memory log for processes that outlive the gateway and whose output a guest can influence.

A file on disk would grow until the disk is full. A pipe needs a reader: without one the writer blocks or is killed, but
the gateway may restart at any time. A sealed memfd avoids both problems: writing beyond its end fails without harming
the writer, so the log contains the first bytes of the output. They include the error message of a failed start. A guest
that fills the log hides only later messages about its own machine. A restarted gateway reads the log through the
process's standard error. The kernel frees the memory when the process exits.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

LOG_BYTES = 1 << 16
_OLD_LOG = "run/qemu.log"


def create_log() -> int:
    """Create an empty log and return its descriptor, for the standard output and error of a process."""
    log = os.memfd_create("log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(log, LOG_BYTES)
    fcntl.fcntl(log, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return log


def open_for_writing(log: int) -> int:
    """Reopen a log and return a write-only descriptor, which QEMU requires for the log of a chardev."""
    return os.open(f"/proc/self/fd/{log}", os.O_WRONLY | os.O_CLOEXEC)


def clear_append_flag(writer: int) -> bool:
    """Make QEMU write to a log from its beginning. Returns False if QEMU has not opened the log yet.

    QEMU opens the log with O_APPEND. But the log already has its maximum length, so nothing can be appended to it. QEMU
    shares its position and flags with ``writer``, a descriptor that ``open_for_writing`` returned.
    """
    flags = fcntl.fcntl(writer, fcntl.F_GETFL)
    if not flags & os.O_APPEND:
        return False
    fcntl.fcntl(writer, fcntl.F_SETFL, flags & ~os.O_APPEND)
    return True


def open_process_log(pid: int, directory: Path | None = None) -> int:
    """Open the log of a running process and return the descriptor. Raises OSError.

    ``directory``: the machine's directory. If an older release started the machine, the log is a file in it.
    """
    # O_PATH: a guest that controls the process can make its standard error refer to any file, even one that only root
    # may read, or one that has side effects when it is opened.
    descriptor = os.open(f"/proc/{pid}/fd/2", os.O_PATH | os.O_CLOEXEC)
    try:
        if _is_in_memory(descriptor):
            # O_NONBLOCK: the process may hold a lease on the file, which would make this call block.
            return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(descriptor)
    if directory is None:
        raise OSError(errno.EPERM, f"the standard error of process {pid} is not a log")
    return os.open(directory / _OLD_LOG, os.O_RDONLY | os.O_CLOEXEC)


def _is_in_memory(descriptor: int) -> bool:
    """Return whether a descriptor refers to a memfd. Users cannot open each other's memfds."""
    memory_file = os.memfd_create("", os.MFD_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        return stat.S_ISREG(status.st_mode) and status.st_dev == os.fstat(memory_file).st_dev
    finally:
        os.close(memory_file)


def read_log(log: int) -> str:
    """Return the text of a log. For a log file from an older release, return only the last ``LOG_BYTES`` bytes."""
    start = max(0, os.fstat(log).st_size - LOG_BYTES)
    return os.pread(log, LOG_BYTES, start).rstrip(b"\0").decode(errors="replace")


def has_old_log(directory: Path) -> bool:
    """Return whether the machine in ``directory`` has a log file, which means that an older release started it."""
    return (directory / _OLD_LOG).exists()


def empty_old_log(directory: Path) -> None:
    """Empty the log file of an older release if it is longer than ``LOG_BYTES``. Raises OSError."""
    log = directory / _OLD_LOG
    if log.stat().st_size > LOG_BYTES:
        os.truncate(log, 0)
