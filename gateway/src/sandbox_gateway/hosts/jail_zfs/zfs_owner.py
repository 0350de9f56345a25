"""One gateway to a root dataset.

A lock on a file keeps two gateways of one machine apart, and dies with its holder. Where they do not see each other's
files (containers), or the machine went down, the user property ``sandbox:owner`` on the root dataset tells: it holds
host, process, the process's start and the kernel's start. Whoever is provably gone is succeeded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
from pathlib import Path
from typing import IO

from sandbox_gateway import command
from sandbox_gateway.errors import BackendFailed, Conflict
from sandbox_gateway.hosts.jail_zfs import zfs

OWNER = "sandbox:owner"


class Ownership:
    """``take`` and ``give_back`` the dataset ``root``; the lock's file is in ``directory``."""

    def __init__(self, root: str, directory: Path) -> None:
        self._root = root
        self._path = directory / f"sandbox-gateway-{hashlib.sha256(root.encode()).hexdigest()[:16]}.lock"
        self._file: IO[str] | None = None

    def take(self) -> list[str]:
        """Returns a sentence if somebody was succeeded. Raises Conflict, naming who has it and how to mend it."""
        self._lock()
        try:
            notes = self._succeed()
            mine = _myself()
            zfs.lzc_set_prop(self._root, OWNER, mine)
            if self._owner() != mine:
                raise Conflict(f"another gateway took {self._root} at the same moment: stop one of them")
        except BaseException:
            self._unlock()
            raise
        return notes

    def give_back(self) -> None:
        """The property goes while the lock is still held; that ZFS does not answer is no reason to keep the lock."""
        if self._file is None:
            return
        with contextlib.suppress(zfs.exceptions.ZFSError):
            zfs.lzc_inherit_prop(self._root, OWNER)
        self._unlock()

    def _lock(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = self._path.open("a+")
        except OSError as error:
            raise BackendFailed(f"the lock {self._path} cannot be opened: {error.strerror}; run as root") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise Conflict(
                f"another gateway on this machine works on {self._root} (lock {self._path}): "
                "stop it, or give this one another root dataset"
            ) from None
        self._file = file

    def _unlock(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _owner(self) -> str:
        found = zfs.get_props([self._root], [OWNER])[self._root][OWNER]
        return found.value if found.local else ""

    def _succeed(self) -> list[str]:
        text = self._owner()
        if not text:
            return []
        try:
            other = {key: str(value) for key, value in json.loads(text).items()}
            host, pid, started, kernel = other["host"], int(other["pid"]), other["started"], other["kernel"]
        except (ValueError, KeyError, AttributeError):
            return [f"{self._root}: its owner {text[:80]!r} makes no sense and was replaced"]
        who = f"process {pid} of host {host}"
        if kernel != _kernel_start():
            return [f"{self._root}: taken over from {who}, which ended with its machine"]
        if host != socket.gethostname():
            raise Conflict(
                f"{self._root} belongs to a gateway in another container of this machine ({who}): stop it; "
                f"if it is gone, `zfs inherit {OWNER} {self._root}` says so"
            )
        if _start_of(pid) == started and pid != os.getpid():
            raise Conflict(f"{self._root} belongs to a gateway that still runs ({who}): stop it first")
        return [f"{self._root}: taken over from {who}, which is gone"]


def _myself() -> str:
    return json.dumps(
        {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _start_of(os.getpid()),
            "kernel": _kernel_start(),
        }
    )


def _start_of(pid: int) -> str:
    """When the process began, in words that stay the same; empty: there is none."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            return stat.read_text().rpartition(")")[2].split()[19]
        except OSError:
            return ""
    return command.run(["ps", "-o", "lstart=", "-p", str(pid)], timeout=10, check=False).stdout.strip()


def _kernel_start() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    if boot_id.exists():
        return boot_id.read_text().strip()
    return command.run(["sysctl", "-n", "kern.boottime"], timeout=10).stdout.partition("}")[0].strip()
