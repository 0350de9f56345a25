"""The log of a process that a guest can make write, and that outlives the gateway: memory of a fixed size.

A file on disk would grow until the disk is full. A pipe needs a reader: without one the writer blocks or is killed, and
the gateway may restart at any time. A sealed memfd needs neither: a write beyond its end fails and changes nothing for
the writer. It keeps the first bytes and refuses the rest. The error that ends a failed start is among the first; a
guest that fills the log hides only the last words of its own machine. The memory is the process's: a restarted gateway
reads it through the process's standard error, and it is gone with the process.
"""

from __future__ import annotations

import fcntl
import os

LOG_BYTES = 1 << 16


def create_log() -> int:
    """A descriptor of an empty log, to be a process's standard output and error."""
    log = os.memfd_create("log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(log, LOG_BYTES)
    fcntl.fcntl(log, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return log


def open_log_of(pid: int) -> int:
    """A descriptor of a running process's log. Raises OSError."""
    return os.open(f"/proc/{pid}/fd/2", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def read_log(log: int) -> str:
    """What the log holds: its last ``LOG_BYTES`` bytes where it is a file of an older release."""
    start = max(0, os.fstat(log).st_size - LOG_BYTES)
    return os.pread(log, LOG_BYTES, start).rstrip(b"\0").decode(errors="replace")
