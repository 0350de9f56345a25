"""A fixed-size in-memory log for processes that outlive the gateway and whose output a guest can influence.

A file on disk would grow until the disk is full. A pipe needs a reader: without one the writer blocks or is killed, and
the gateway may restart at any time. A sealed memfd avoids both: a write beyond its end fails without affecting
the writer. It keeps the first bytes and refuses the rest. The error that ends a failed start is among the first; a
guest that fills the log hides only the last lines of its own machine. The memory belongs to the process: a restarted
gateway reads it through the process's standard error, and it is freed with the process.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

LOG_BYTES = 1 << 16
_OLD_LOG = "run/qemu.log"


def create_log() -> int:
    """Return a descriptor of an empty log, for a process's standard output and error."""
    log = os.memfd_create("log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(log, LOG_BYTES)
    fcntl.fcntl(log, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return log


def open_log_of(pid: int) -> int:
    """Return a descriptor of a running process's log. Raises OSError."""
    return os.open(f"/proc/{pid}/fd/2", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def read_log(log: int) -> str:
    """Return the log's text; only the last ``LOG_BYTES`` bytes of a file from an older release."""
    start = max(0, os.fstat(log).st_size - LOG_BYTES)
    return os.pread(log, LOG_BYTES, start).rstrip(b"\0").decode(errors="replace")


def has_old_log(directory: Path) -> bool:
    """Return whether an older release started the machine, with a log on the disk."""
    return (directory / _OLD_LOG).exists()


def empty_old_log(directory: Path) -> None:
    """Empty a log on the disk if it has grown. Raises OSError."""
    log = directory / _OLD_LOG
    if log.stat().st_size > LOG_BYTES:
        os.truncate(log, 0)
