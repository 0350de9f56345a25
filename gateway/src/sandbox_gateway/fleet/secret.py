"""The secret that all members share, so that tokens and signed URLs hold on every host."""

from __future__ import annotations

import hashlib
import hmac
import stat
from pathlib import Path

from sandbox_gateway.engine.secret import write_durably
from sandbox_gateway.errors import Invalid

_LENGTH = 32


def check_secret_file(path: Path) -> None:
    """Raise Invalid if the file cannot hold the fleet's secret. Unlike a host's own secret, it is never created."""
    remedy = f"create it once with `head -c {_LENGTH} /dev/urandom > FILE; chmod 600 FILE`, and copy it to every host"
    try:
        status = path.stat()
    except FileNotFoundError:
        raise Invalid(f"fleet.secret_file {path} does not exist: {remedy}") from None
    except OSError as error:
        raise Invalid(f"fleet.secret_file {path} cannot be read ({error.strerror}): check its permissions") from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise Invalid(f"other users can read fleet.secret_file {path}: run chmod 600 {path}")
    if status.st_size != _LENGTH:
        raise Invalid(f"fleet.secret_file {path} is {status.st_size} bytes long instead of {_LENGTH}: {remedy}")


def compute_fingerprint(key: bytes) -> str:
    """Return a value that shows whether two secrets are the same, and nothing else of them."""
    return hmac.new(key, b"fleet fingerprint", hashlib.sha256).hexdigest()


def has_own_secret(state_root: Path, fleet_key: bytes) -> bool:
    """Return whether the host has a secret of its own, from the time before it joined, that differs from the fleet's.

    The machines that run since then know only tokens that were made from it.
    """
    try:
        return not hmac.compare_digest((state_root / "secret").read_bytes(), fleet_key)
    except FileNotFoundError:
        return False


def replace_own_secret(state_root: Path, fleet_key: bytes) -> None:
    """Make the fleet's secret the host's own, so that tokens also hold if it leaves the fleet."""
    write_durably(state_root / "secret", fleet_key)
