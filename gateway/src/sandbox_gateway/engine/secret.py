"""The host's secret, from which the tokens of its sandboxes are derived."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from sandbox_gateway.errors import Invalid

_BYTES = 32


class Secret:
    """The host's secret. It must be loaded before use."""

    def __init__(self) -> None:
        self.key = b""

    def load(self, path: Path) -> None:
        self.key = load_secret(path)

    def derive(self, purpose: str) -> str:
        """Derive a secret for one purpose. The result is always the same, so it need not be stored."""
        return hmac.new(self.key, purpose.encode(), hashlib.sha256).hexdigest()


def load_secret(path: Path) -> bytes:
    """Load the 32-byte secret from ``path``. Create the file on first use. The secret never leaves this host.

    Raises Invalid if the file has the wrong length, because anyone could compute tokens derived from an empty secret.
    """
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        return _create_secret(path)
    if len(secret) != _BYTES:
        raise Invalid(
            f"the secret file {path} is {len(secret)} bytes long instead of {_BYTES}: restore it from a backup. "
            "If there is no backup, remove the file, start the gateway, and pause and resume all running sandboxes to "
            "give them new tokens"
        )
    path.chmod(0o600)
    return secret


def _create_secret(path: Path) -> bytes:
    secret = secrets.token_bytes(_BYTES)
    partial = path.with_name(f".{path.name}.new")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(descriptor)
    partial.rename(path)
    # The secret must be on the disk before the first token is derived from it.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return secret
