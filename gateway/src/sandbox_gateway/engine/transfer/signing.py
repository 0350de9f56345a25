"""Sign snapshots with the key of the gateway, and check the signatures of other gateways (Ed25519)."""

from __future__ import annotations

import hashlib
import re

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sandbox_gateway.errors import Invalid

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
_FINGERPRINT_PATTERN = re.compile(r"[0-9a-f]{64}")


class Signer:
    """A private key. ``seed``: its 32 bytes."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = self._key.public_key().public_bytes_raw()

    @property
    def fingerprint(self) -> str:
        return compute_fingerprint(self.public_key)

    def sign(self, purpose: bytes, data: bytes) -> bytes:
        """Sign ``data``. A signature for one purpose is not valid for another."""
        return self._key.sign(_build_message(purpose, data))


def has_valid_signature(public_key: bytes, signature: bytes, purpose: bytes, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _build_message(purpose, data))
    except (InvalidSignature, ValueError):
        return False
    return True


def compute_fingerprint(public_key: bytes) -> str:
    """Return the SHA-256 of a public key. People compare it to decide whether they trust the key."""
    return hashlib.sha256(public_key).hexdigest()


def check_fingerprint(text: str) -> str:
    """Return ``text`` if it has the form of a fingerprint. Raises Invalid."""
    if not _FINGERPRINT_PATTERN.fullmatch(text):
        raise Invalid(
            f"{text[:80]!r} is not the fingerprint of a signer: use the 64 hexadecimal digits that "
            "`sandboxctl snapshot signer` prints on the gateway that exported or pushed the snapshot"
        )
    return text


def _build_message(purpose: bytes, data: bytes) -> bytes:
    return b"grove.sandbox " + purpose + b"\0" + hashlib.sha256(data).digest()
