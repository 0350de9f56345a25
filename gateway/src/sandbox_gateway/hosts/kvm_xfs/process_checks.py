"""Check which process has a pid, from what the kernel knows about it.

Any user of the host can start a process with any command line, and a guest that has taken over a process of the gateway
can change the command line of that process. All functions raise OSError if the process has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_MAX_DESCRIPTORS = 4096
"""QEMU has a few dozen."""


def list_pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def program_name(pid: int) -> str:
    """Return the file name of the program that a process runs. It ends with " (deleted)" after an upgrade."""
    return Path(f"/proc/{pid}/exe").readlink().name


def read_arguments(pid: int) -> list[str]:
    """Return the command line of a process, which may contain anything."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")


def runs_as_gateway_user(pid: int) -> bool:
    """Return whether the real, effective and saved user ids of a process are the gateway's.

    The owner of /proc/PID does not tell this: it is root if a process of another user prevents core dumps.
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
