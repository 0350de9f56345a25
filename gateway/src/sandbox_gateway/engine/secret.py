"""The host's secret, from which the tokens of its sandboxes are derived."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from sandbox_gateway.errors import Invalid

_SECRET_LENGTH = 32
_MODE = 0o600
_REMEDY_WITHOUT_BACKUP = "pause and resume all running sandboxes to give them new tokens"


class Secret:
    """The host's secret. It must be loaded before use."""

    def __init__(self) -> None:
        self.key = b""

    def load(self, path: Path) -> None:
        self.key = load_secret(path)

    @property
    def gateway_id(self) -> str:
        """A public id of this gateway, 16 hexadecimal digits."""
        return self.derive("gateway id")[:16]

    def derive(self, purpose: str) -> str:
        """Derive the secret for ``purpose``. The derivation is deterministic, so the result need not be stored."""
        return hmac.new(self.key, purpose.encode(), hashlib.sha256).hexdigest()


def load_secret(path: Path, remedy_without_backup: str = _REMEDY_WITHOUT_BACKUP) -> bytes:
    """Return the 32-byte secret stored in ``path``, creating the file on first use.

    The secret never leaves this host. Raises Invalid if the file has the wrong length: if it were empty, for example,
    anyone could compute the tokens. ``remedy_without_backup``: what to do if a new secret replaces a lost one.
    """
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        return _create_secret(path)
    if len(secret) != _SECRET_LENGTH:
        raise Invalid(
            f"the secret file {path} is {len(secret)} bytes long instead of {_SECRET_LENGTH}: restore it from a "
            f"backup. If there is no backup, remove the file, start the gateway, and {remedy_without_backup}"
        )
    # `sandbox-gateway check` also reads the secret, and should change nothing.
    if stat.S_IMODE(path.stat().st_mode) != _MODE:
        path.chmod(_MODE)
    return secret


def _create_secret(path: Path) -> bytes:
    secret = secrets.token_bytes(_SECRET_LENGTH)
    # The secret must be on the disk before the first token is derived from it.
    write_durably(path, secret)
    return secret


def write_durably(path: Path, data: bytes) -> None:
    """Create or replace a file that only root can read. After a power failure, it is complete, or as it was before."""
    temporary_path = path.with_name(f".{path.name}.new")
    temporary_path.unlink(missing_ok=True)
    file_fd = os.open(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    with os.fdopen(file_fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file_fd)
    temporary_path.rename(path)
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory_fd)
    finally:
        os.close(directory_fd)
