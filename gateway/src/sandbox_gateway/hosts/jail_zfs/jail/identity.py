"""The identity of a jail: files on the host, mounted read-only in the jail at IDENTITY."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Container, Sequence
from pathlib import Path

from sandbox_gateway.hosts.jail_zfs.jail.jails import IDENTITY
from sandbox_gateway.records import Sandbox

_KEY = "gateway-key"


class Identities:
    """The directory with the identities of all instances."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, instance: str) -> Path:
        return self._directory / instance

    def remove(self, instance: str) -> None:
        shutil.rmtree(self.path(instance), ignore_errors=True)

    def sweep(self, kept: Container[str]) -> None:
        """Remove the identities of instances that are not in ``kept``."""
        if self._directory.is_dir():
            for path in self._directory.iterdir():
                if path.name not in kept:
                    shutil.rmtree(path, ignore_errors=True)


def write_identity(directory: Path, sandbox: Sandbox, dns: Sequence[str]) -> None:
    """Write the files that the jail sees at IDENTITY. The machine id stays the same across starts."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    machine = hashlib.sha256(f"machine {sandbox.id}".encode()).hexdigest()[:32]
    (directory / "hostname").write_text(f"{sandbox.hostname}\n")
    (directory / "machine-id").write_text(f"{machine}\n")
    (directory / "resolv.conf").write_text("".join(f"nameserver {address}\n" for address in dns))


def write_gateway_key(directory: Path) -> None:
    """Write the key by which the agent of a jail that is about to start recognises the gateway.

    All users of the host share the gateway's address on the bridge, and pf cannot distinguish their packets. Only root
    can read the file, on the host and in the jail.
    """
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = directory / _KEY
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))


def gateway_key(directory: Path) -> str:
    """Return the gateway key; empty for a jail that was started without one."""
    try:
        return (directory / _KEY).read_text()
    except FileNotFoundError:
        return ""


def can_mount_identity(root: Path) -> bool:
    """Check that IDENTITY is a directory not reached through symbolic links, which root in the sandbox may create."""
    place = root
    for part in Path(IDENTITY).parts[1:]:
        place /= part
        if place.is_symlink() or not place.is_dir():
            return False
    return True
