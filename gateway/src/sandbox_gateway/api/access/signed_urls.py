"""Verify signed URLs of files, which E2B's clients create, and sign and verify URLs for uploading files for a build.

This module also finds the sandbox whose token signed the URL of a file.

A client signs with the access token of a sandbox: `sha256(path:operation:user:token[:expiration])`. If the URL has the
gateway's own address (`E2B_SANDBOX_URL`), only the signature identifies the sandbox. The signature is a hash, so the
gateway has to compute it with the token of each sandbox, which takes about a microsecond per sandbox. The text before
the token is hashed only once, so that its length does not matter.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode

from starlette.types import Scope

from sandbox_gateway.errors import Unauthorized

if TYPE_CHECKING:
    from sandbox_gateway.engine.engine import Engine
    from sandbox_gateway.engine.secret import Secret
    from sandbox_gateway.records import Sandbox

_OPERATION_BY_METHOD = {"GET": "read", "POST": "write"}
_FILES_PATH = b"/files"
_VERSION_PREFIX = "v1_"
_MAX_EXPIRATION_DIGITS = 15
_MAX_CACHED_URLS = 1024
UPLOAD_PREFIX = "/build-files/"
_UPLOAD_PATH = re.compile(rf"{UPLOAD_PREFIX}[0-9a-f]{{64}}")
_UPLOAD_SECONDS = 3600


@dataclass(frozen=True)
class SignedUrl:
    path: str
    operation: str
    user: str
    signature: str
    expiration: str | None

    @property
    def query(self) -> bytes:
        """The query to forward: only the signed fields that the agent reads."""
        fields = {"path": self.path, "username": self.user} if self.user else {"path": self.path}
        return urlencode(fields, quote_via=quote).encode()

    def find_signers(self, tokens: dict[str, bytes]) -> list[str]:
        """Return the keys of ``tokens`` whose token signed the URL. Checks all tokens, each in constant time."""
        try:
            signed_digest = base64.b64decode(self.signature.removeprefix(_VERSION_PREFIX) + "=", validate=True)
        except ValueError:
            return []
        if self.signature != f"{_VERSION_PREFIX}{_encode(signed_digest)}":
            return []
        prefix_hash = hashlib.sha256(f"{self.path}:{self.operation}:{self.user}:".encode())
        suffix = b"" if self.expiration is None else f":{self.expiration}".encode()
        matching_keys = []
        for key, token in tokens.items():
            token_hash = prefix_hash.copy()
            token_hash.update(token + suffix)
            if hmac.compare_digest(token_hash.digest(), signed_digest):
                matching_keys.append(key)
        return matching_keys

    def check_expiration(self, now: float) -> None:
        """Raise Unauthorized if the URL has expired. Call this only after the signature has been verified."""
        if self.expiration is not None and now > int(self.expiration):
            raise Unauthorized("the signature of this URL has expired: create a new URL")


def _encode(digest: bytes) -> str:
    return base64.b64encode(digest).rstrip(b"=").decode()


def parse_signed_url(method: str, query: bytes) -> SignedUrl | None:
    """Return the signed fields of a `/files` URL, or None if there is no signature that could be valid.

    A user name with a colon is rejected, because it could contain what the client signed as the operation or the path.
    """
    operation = _OPERATION_BY_METHOD.get(method)
    try:
        fields = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict")
    except ValueError:
        return None
    parameters = dict(fields)
    path, user, signature = parameters.get("path", ""), parameters.get("username", ""), parameters.get("signature", "")
    expiration = parameters.get("signature_expiration")
    if operation is None or len(parameters) != len(fields) or not path or not signature or ":" in user:
        return None
    if expiration is not None and not (
        expiration.isascii() and expiration.isdigit() and len(expiration) <= _MAX_EXPIRATION_DIGITS
    ):
        return None
    return SignedUrl(path, operation, user, signature, expiration)


def get_signed_url(scope: Scope) -> SignedUrl | None:
    if scope["type"] != "http" or scope.get("raw_path") != _FILES_PATH:
        return None
    return parse_signed_url(scope["method"], scope.get("query_string", b""))


def verify_signed_query(method: str, query: bytes, token: str, now: float) -> bytes | None:
    """Return the query to forward for a `/files` URL, or None if it was not signed with ``token``.

    Raises Unauthorized if the signature has expired.
    """
    url = parse_signed_url(method, query)
    if url is None or not url.find_signers({"": token.encode()}):
        return None
    url.check_expiration(now)
    return url.query


class SignerFinder:
    """Finds the sandbox whose token signed a URL, and caches the result for repeated requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens: dict[str, bytes] = {}
        self._cached_ids: OrderedDict[SignedUrl, str] = OrderedDict()

    def find(self, url: SignedUrl) -> Sandbox | None:
        """Return the sandbox whose token signed ``url``, or None. Raises Unauthorized if the signature has expired."""
        id = self._cached_ids.get(url, "")
        if id not in self._engine.index.sandboxes:
            id = next(iter(url.find_signers(self._list_current_tokens())), "")
            if not id:
                return None
            self._cached_ids[url] = id
            if len(self._cached_ids) > _MAX_CACHED_URLS:
                self._cached_ids.popitem(last=False)
        url.check_expiration(time.time())
        return self._engine.index.sandboxes[id]

    def _list_current_tokens(self) -> dict[str, bytes]:
        ids = self._engine.index.sandboxes.keys()
        if self._tokens.keys() != ids:
            self._tokens = {id: self._tokens.get(id) or self._engine.secret.derive(id).encode() for id in ids}
        return self._tokens


def sign_upload(secret: Secret, digest: str, now: float) -> str:
    """Return the path and the query of a URL to which anyone may upload the archive ``digest`` for an hour."""
    path, expiration = f"{UPLOAD_PREFIX}{digest}", str(int(now) + _UPLOAD_SECONDS)
    return (
        f"{path}?{urlencode({'expires': expiration, 'signature': _compute_upload_signature(secret, path, expiration)})}"
    )


def is_signed_upload(secret: Secret, scope: Scope, now: float) -> bool:
    """Return whether a request is an upload with a valid signature; False if it has no signature.

    Raises Unauthorized if the signature is not valid.
    """
    if scope["method"] != "PUT" or not _UPLOAD_PATH.fullmatch(scope["path"]):
        return False
    parameters = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
    if "signature" not in parameters:
        return False
    expiration = parameters.get("expires", "")
    expected_signature = _compute_upload_signature(secret, scope["path"], expiration)
    if not hmac.compare_digest(expected_signature.encode(), parameters["signature"].encode()):
        raise Unauthorized("the signature of this URL is not valid: request a new URL for this upload")
    if now > int(expiration):
        raise Unauthorized("the signature of this URL has expired: request a new URL for this upload")
    return True


def _compute_upload_signature(secret: Secret, path: str, expiration: str) -> str:
    return secret.derive(f"upload to {path} until {expiration}")
