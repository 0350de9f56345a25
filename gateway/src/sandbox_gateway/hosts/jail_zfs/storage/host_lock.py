"""Ensure that only one gateway uses a root dataset.

A file lock excludes other gateways on the same machine, and is released when its holder exits. It does not protect
against gateways in other containers. To exclude those, the user property ``sandbox:owner`` on the root dataset
identifies the owner by its host name, its process id, and the start times of its process and of the kernel. A gateway
takes over only from an owner that is known to have exited.

Commands that a killed gateway started keep running, and could change datasets that its successor has already scanned.
They inherit the lock, so the successor waits until they have exited.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import time
from pathlib import Path
from typing import IO

import zfs_core
from zfs_core import process

from sandbox_gateway import command
from sandbox_gateway.errors import BackendFailed, Conflict

OWNER_PROPERTY = "sandbox:owner"
_RETRY_SECONDS = 0.05


class HostLock:
    """A lock that makes this gateway the only owner of the dataset ``root``. Its lock file is in ``directory``."""

    def __init__(self, root: str, directory: Path) -> None:
        self._root = root
        self._path = directory / f"sandbox-gateway-{hashlib.sha256(root.encode()).hexdigest()[:16]}.lock"
        self._file: IO[str] | None = None

    def acquire(self) -> list[str]:
        """Become the owner of the dataset.

        Returns a sentence if this gateway replaces an earlier owner. Raises Conflict if another owner may still be
        running, and BackendFailed if the lock file cannot be opened.
        """
        self._lock()
        try:
            notes = self._take_over()
            identity = _read_own_identity()
            zfs_core.lzc_set_prop(self._root, OWNER_PROPERTY, identity)
            if self._read_owner() != identity:
                raise Conflict(f"another gateway took over {self._root} at the same time: stop one of the two gateways")
        except BaseException:
            self._unlock()
            raise
        return notes

    def release(self) -> None:
        """Remove the owner property, and release the lock even if ZFS cannot be reached."""
        if self._file is None:
            return
        with contextlib.suppress(zfs_core.exceptions.ZFSError):
            zfs_core.lzc_inherit_prop(self._root, OWNER_PROPERTY)
        self._unlock()

    def _lock(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Any user who can open the file can lock it, and thereby keep the gateway from starting.
            file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
            self._path.chmod(0o600)
        except OSError as error:
            raise BackendFailed(
                f"the lock file {self._path} cannot be opened ({error.strerror}): run the gateway as root"
            ) from None
        deadline = time.monotonic() + process.TIMEOUT_SECONDS
        while not _try_to_lock(file):
            if not self._is_orphaned():
                file.close()
                raise Conflict(
                    f"another gateway on this machine uses {self._root} (lock {self._path}): stop it, or "
                    "configure a different root dataset for this one"
                )
            if time.monotonic() > deadline:
                file.close()
                raise Conflict(
                    f"zfs commands of an earlier gateway still use {self._root} after {process.TIMEOUT_SECONDS:g} s: "
                    f"find the processes that have {self._path} open, stop them, and start the gateway again"
                )
            time.sleep(_RETRY_SECONDS)
        self._file = file
        process.inherit_file(file)

    def _is_orphaned(self) -> bool:
        """Return whether the last owner has exited, so that only commands that it started still hold the lock.

        An owner that stopped normally has removed the property.
        """
        owner_text = self._read_owner()
        if not owner_text:
            return True
        with contextlib.suppress(ValueError, KeyError, TypeError):
            owner = json.loads(owner_text)
            is_on_this_machine = (owner["host"], owner["kernel"]) == (socket.gethostname(), _read_boot_identity())
            return is_on_this_machine and _read_process_start_time(int(owner["pid"])) != owner["started"]
        return False

    def _unlock(self) -> None:
        if self._file is not None:
            process.stop_inheriting(self._file)
            self._file.close()
            self._file = None

    def _read_owner(self) -> str:
        owner = zfs_core.get_props([self._root], [OWNER_PROPERTY])[self._root][OWNER_PROPERTY]
        return owner.value if owner.is_local else ""

    def _take_over(self) -> list[str]:
        owner_text = self._read_owner()
        if not owner_text:
            return []
        try:
            fields = {key: str(value) for key, value in json.loads(owner_text).items()}
            host, pid, start_time, kernel = fields["host"], int(fields["pid"]), fields["started"], fields["kernel"]
        except (ValueError, KeyError, AttributeError):
            return [f"{self._root}: replaced the recorded owner {owner_text[:80]!r}, which is not valid"]
        owner_description = f"process {pid} of host {host}"
        if kernel != _read_boot_identity():
            return [f"{self._root}: taken over from {owner_description}, which exited when its machine stopped"]
        if host != socket.gethostname():
            raise Conflict(
                f"{self._root} belongs to a gateway in another container on this machine ({owner_description}): stop "
                f"it. If it no longer exists, run `zfs inherit {OWNER_PROPERTY} {self._root}`"
            )
        if _read_process_start_time(pid) == start_time and pid != os.getpid():
            raise Conflict(
                f"{self._root} belongs to a gateway that is still running ({owner_description}): stop it first"
            )
        return [f"{self._root}: taken over from {owner_description}, which has exited"]


def _try_to_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read_own_identity() -> str:
    return json.dumps(
        {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _read_process_start_time(os.getpid()),
            "kernel": _read_boot_identity(),
        }
    )


def _read_process_start_time(pid: int) -> str:
    """Return a string that identifies the process's start time, or "" if the process does not exist."""
    stat_path = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            return stat_path.read_text().rpartition(")")[2].split()[19]
        except OSError:
            return ""
    return command.run(["ps", "-o", "lstart=", "-p", str(pid)], timeout=10, check=False).stdout.strip()


def _read_boot_identity() -> str:
    boot_id_path = Path("/proc/sys/kernel/random/boot_id")
    if boot_id_path.exists():
        return boot_id_path.read_text().strip()
    # Not kern.boottime: it changes whenever the clock is set.
    return command.run(["sysctl", "-inx", "kern.boot_id"], timeout=10).stdout.strip()
