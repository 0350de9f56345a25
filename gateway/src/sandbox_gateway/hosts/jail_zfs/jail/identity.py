"""Write the identity of a jail: files on the host that are mounted read-only in the jail at IDENTITY."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Container, Sequence
from pathlib import Path

from sandbox_gateway.hosts.tree_removal import remove_tree
from sandbox_gateway.records import Sandbox

IDENTITY = "/run/sandbox"
"""The directory in a jail at which the host mounts the jail's identity, read-only."""
_KEY_FILE_NAME = "gateway-key"


class Identities:
    """Manages the directory that contains the identities of all instances."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self) -> None:
        """Create the directory, or correct its mode.

        All users of a jail can read its identity, but users of the host cannot reach it.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._directory.chmod(0o700)

    def path(self, instance: str) -> Path:
        return self._directory / instance

    def remove(self, instance: str) -> None:
        remove_tree(self.path(instance), ignore_errors=True)

    def sweep(self, in_use: Container[str]) -> None:
        """Remove the identities of instances that are not in ``in_use``."""
        if self._directory.is_dir():
            for path in self._directory.iterdir():
                if path.name not in in_use:
                    remove_tree(path, ignore_errors=True)


def write_identity(directory: Path, sandbox: Sandbox, dns: Sequence[str]) -> None:
    """Write the files that the jail finds at IDENTITY. The machine id depends only on the sandbox's id."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    machine_id = hashlib.sha256(f"machine {sandbox.id}".encode()).hexdigest()[:32]
    (directory / "hostname").write_text(f"{sandbox.hostname}\n")
    (directory / "machine-id").write_text(f"{machine_id}\n")
    (directory / "resolv.conf").write_text("".join(f"nameserver {address}\n" for address in dns))


def write_gateway_key(directory: Path) -> None:
    """Write a new key with which the gateway authenticates to the agent of a jail. Call it before the jail starts.

    All users of the host share the gateway's address on the bridge, and pf cannot distinguish their packets. Only root
    can read the file, on the host and in the jail.
    """
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = directory / _KEY_FILE_NAME
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))


def read_gateway_key(directory: Path) -> str:
    """Return the gateway key, or "" for a jail that was started without one."""
    try:
        return (directory / _KEY_FILE_NAME).read_text()
    except FileNotFoundError:
        return ""


def can_mount_identity(root: Path) -> bool:
    """Return whether IDENTITY is a directory under ``root`` whose path has no symbolic links.

    The sandbox's root user may have replaced it.
    """
    path = root
    for part in Path(IDENTITY).parts[1:]:
        path /= part
        if path.is_symlink() or not path.is_dir():
            return False
    return True
