"""Find processes by what the kernel knows about them, and signal them.

Any user of the host can start a process with any command line. A guest that has taken over a process of the gateway can
change or erase the command line, close files, and exit threads, even the main thread. But it cannot leave its network
namespace: that requires unshare(2), setns(2) or a new process, which the seccomp filters of QEMU and of volume servers
refuse. Its user id cannot change either, but all machines may run as root, and a range of user ids may be
misconfigured. A control group may be missing, because the host lacks the controllers or the gateway died before it set
the limits.

A pid can be reused at any time, unless it belongs to a child that has not been waited for. So processes are identified
with an open pidfd (`find_processes`) and signalled only through it (`send_signal`). Functions that take a pid raise
OSError if the process has exited.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

_STOP_TIMEOUT_SECONDS = 5.0
_MAX_DESCRIPTORS = 4096
"""QEMU has a few dozen."""


_T = TypeVar("_T")


def find_processes(identify: Callable[[int, int], _T | None]) -> Iterator[tuple[int, int, _T]]:
    """Yield (pid, pidfd, identity) for each process for which ``identify(pid, pidfd)`` returns an identity.

    The caller closes the pidfd. ``identify`` may raise OSError, which counts as None.
    """
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        identity = None
        with contextlib.suppress(OSError):
            identity = identify(pid, pidfd)
        # If the process has exited, another may have its pid, and `identify` may have read about that process.
        if identity is None or wait_for_exit(pidfd, 0):
            os.close(pidfd)
        else:
            yield pid, pidfd, identity


def send_signal(pidfd: int, number: int) -> None:
    """Send a signal to a process, unless it has exited."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def wait_for_exit(pidfd: int, seconds: float) -> bool:
    """Wait at most ``seconds`` for a process to exit. Returns whether it has exited."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def identify_namespace(path: Path) -> tuple[int, int]:
    """Return the device and inode of a namespace's file, which identify the namespace."""
    status = path.stat()
    return status.st_dev, status.st_ino


def read_network_namespace(pid: int, pidfd: int) -> tuple[int, int]:
    """Return the identity of a process's network namespace, even if the main thread has exited."""
    namespace = _read_namespace_of_threads(pid)
    if namespace is None and not wait_for_exit(pidfd, 0):
        # All listed threads have exited, but new ones exist. Stop the process, so that it cannot create more.
        send_signal(pidfd, signal.SIGSTOP)
        deadline = time.monotonic() + _STOP_TIMEOUT_SECONDS
        try:
            while namespace is None and not wait_for_exit(pidfd, 0) and time.monotonic() < deadline:
                namespace = _read_namespace_of_threads(pid)
        finally:
            send_signal(pidfd, signal.SIGCONT)
    if namespace is None:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has exited, or could not be stopped")
    return namespace


def _read_namespace_of_threads(pid: int) -> tuple[int, int] | None:
    """Return the identity of the network namespace of the first thread that has not exited, or None if all have exited.

    Raises PermissionError if the gateway lacks the permission to find out, which a guest cannot cause.
    """
    for thread in Path(f"/proc/{pid}/task").iterdir():  # The main thread is the first one.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return identify_namespace(thread / "ns" / "net")
    return None


def read_program_name(pid: int) -> str:
    """Return the file name of the program that a process runs. It ends with " (deleted)" after an upgrade."""
    return Path(f"/proc/{pid}/exe").readlink().name


def read_arguments(pid: int) -> list[str]:
    """Return the command line of a process, which may contain anything."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")


def is_run_by_gateway_user(pid: int) -> bool:
    """Return whether the real, effective and saved user ids of a process are the gateway's.

    The owner of /proc/PID does not show this: it is root if the process disables core dumps, regardless of who runs it.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    user_ids = next(line.split()[1:4] for line in lines if line.startswith("Uid:"))
    return {int(user_id) for user_id in user_ids} == {os.geteuid()}


def can_write(pid: int, path: Path) -> bool:
    """Return whether a process has opened the file at ``path`` for writing, as one of its first descriptors."""
    status = path.stat()
    # A process of another user can have half a million descriptors.
    for descriptor in itertools.islice(Path(f"/proc/{pid}/fd").iterdir(), _MAX_DESCRIPTORS):
        with contextlib.suppress(FileNotFoundError):  # The process has just closed it.
            # The mode of the link shows how the file was opened. O_PATH requires no permission to read or write.
            if descriptor.lstat().st_mode & stat.S_IWUSR and os.path.samestat(descriptor.stat(), status):
                return True
    return False
