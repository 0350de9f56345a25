"""Authorize control-plane requests that carry an API key or arrive over the Unix socket."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sandbox_gateway.api.access.signed_urls import is_signed_upload
from sandbox_gateway.engine.secret import Secret
from sandbox_gateway.engine.start_slots import Requester, requester
from sandbox_gateway.errors import Forbidden, Invalid, Unauthorized, Unsupported
from sandbox_gateway.records import check_name

MIN_KEY_LENGTH = 16
OPEN_PATHS = frozenset({"/health", "/healthz"})
_VOLUME_FILES_PREFIX = "/volumecontent/"
"""The prefix of the paths that E2B's clients use to access the files of volumes."""
_EXEC_PATH_PATTERN = re.compile(r"/sandboxes/[^/]+/exec|/v1/sandboxes/[^/]+/(exec|eval|ping)")
_ADMIN_PATH_PATTERN = re.compile(
    r"(/volumes/[^/]+)?/snapshots/[^/]+/export|/templates/[^/]+/files/[^/]+|/interrupted-imports|/artifacts"
)
"""GET requests to these paths require the scope `admin`.

Exports contain the disk and the memory of a machine, or a volume, with all secrets in them. The paths of template files
return a URL for uploads. The list of interrupted imports contains tokens for exports. `/artifacts` uses the gateway's
credentials for registries.
"""
_CONTROL_CHARACTER_PATTERN = re.compile(r"[\x00-\x1f\x7f]")
_PLANS_PATH = "/plans"
_PLAN_REQUEST_PATTERN = re.compile(r"/plans/([0-9a-f]{32})(/.+)")
"""A path with the id of a plan session, followed by the path of a request in that session.

The id is in the path instead of a header, because a proxy may remove a header, and the request would reach the host.
"""
_PLAN_KEY = "sandbox_gateway.plan"
_RUNS_PATH = "/applied-runs"
_RUN_REQUEST_PATTERN = re.compile(r"/applied-runs/([0-9a-f]{32})(/.+)")
"""A path with the id of a run that applies a plan, followed by the path of a request, which needs its usual scope."""
_RUN_KEY = "sandbox_gateway.applied_run"
_CALLER_KEY = "sandbox_gateway.caller"
_LOCAL_KEY = "sandbox_gateway.local"
FORWARDED_CALLER_KEY = "sandbox_gateway.forwarded_caller"
"""The key in an ASGI scope of the caller that another gateway of the fleet has authorized."""
_request_numbers = itertools.count()


class Permission(IntEnum):
    """The rights of a caller; each includes the ones before it."""

    READ = 1
    EXEC = 2
    ADMIN = 3


@dataclass(frozen=True)
class Caller:
    name: str
    permission: Permission


@dataclass(frozen=True)
class Key:
    name: str
    permission: Permission
    digest: bytes
    """SHA-256 of the key, so that all compared values have the same length."""


def hash_secret(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


class Keys:
    """The API keys; empty if none are configured."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str) -> Caller | None:
        """Return the caller whose key is ``secret``, or None. Compares ``secret`` with each key in constant time."""
        offered_digest, caller = hash_secret(secret), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, offered_digest):
                caller = Caller(key.name, key.permission)
        return caller

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Read a key file with one `name scope key` per line and comments that begin with `#`. Raises Invalid."""
        try:
            with path.open() as file:
                _check_permissions(path, os.fstat(file.fileno()))
                lines = file.read().splitlines()
        except FileNotFoundError:
            raise Invalid(
                f"the key file {path} does not exist: create it with a line `name admin key` and mode 0600"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise Invalid(f"the key file {path} cannot be read ({error}): check the file and its permissions") from None
        keys: dict[str, Key] = {}
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                key = _parse_line(line, f"key file {path}, line {number}")
                if key.name in keys:
                    raise Invalid(
                        f"key file {path}, line {number}: the name {key.name!r} occurs twice: give each key its "
                        "own name"
                    )
                keys[key.name] = key
        return cls(keys.values())


def _check_permissions(path: Path, status: os.stat_result) -> None:
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise Invalid(f"other users can read the key file {path}: run chmod 600 {path}")
    if status.st_uid not in (0, os.geteuid()):
        raise Invalid(f"the key file {path} belongs to user {status.st_uid}: run chown root {path}")


def _parse_line(line: str, location: str) -> Key:
    words = line.split()
    if len(words) != 3:
        raise Invalid(f"{location}: the line has {len(words)} words instead of 3: write `name scope key`")
    name, scope, secret = words
    try:
        check_name(name)
        permission = Permission[scope.upper()]
    except ValueError as error:
        raise Invalid(f"{location}: {error}") from None
    except KeyError:
        raise Invalid(f"{location}: the scope {scope!r} is unknown: use read, exec or admin") from None
    if len(secret) < MIN_KEY_LENGTH:
        raise Invalid(
            f"{location}: the key is {len(secret)} characters long, but must be at least {MIN_KEY_LENGTH}: create one "
            "with `echo e2b_$(openssl rand -hex 24)`"
        )
    return Key(name, permission, hash_secret(secret))


class LocalPeerMiddleware:
    """Middleware for the Unix socket: anyone who can open the socket has administrator rights.

    It sets a flag in the ASGI scope, which request headers cannot change.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_LOCAL_KEY] = True
        await self.app(scope, receive, send)


def extract_secrets(headers: Headers) -> list[str]:
    """Return the secrets that a request sends as API keys."""
    secrets = [headers.get("x-api-key", "")]
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        secrets.append(value.strip())
    return [secret for secret in secrets if secret]


def identify(scope: Scope, keys: Keys) -> Caller | None:
    """Return the caller of a request, or None if the request has no valid key and did not use the Unix socket."""
    if is_local(scope):
        caller: Caller | None = Caller("local", Permission.ADMIN)
    elif FORWARDED_CALLER_KEY in scope:
        caller = scope[FORWARDED_CALLER_KEY]
    else:
        callers = [keys.find(secret) for secret in extract_secrets(Headers(scope=scope))]
        caller = max((match for match in callers if match), key=lambda match: match.permission, default=None)
    if caller:
        scope[_CALLER_KEY] = caller
    return caller


def get_caller(scope: Scope) -> Caller:
    """Return the caller of an authorized request."""
    caller: Caller = scope[_CALLER_KEY]
    return caller


def get_plan_id(scope: Scope) -> str:
    """Return the id of the plan session that a request belongs to, or "" if there is none."""
    plan_id: str = scope.get(_PLAN_KEY, "")
    return plan_id


def is_local(scope: Scope) -> bool:
    """Return whether a request came over the Unix socket."""
    return _LOCAL_KEY in scope


def get_applied_run_id(scope: Scope) -> str:
    """Return the id of the applied run that a request belongs to, or "" if there is none."""
    run_id: str = scope.get(_RUN_KEY, "")
    return run_id


def is_identified(scope: Scope) -> bool:
    """Return whether a request has a valid key or came over the Unix socket. Routes without access control use this."""
    return _CALLER_KEY in scope


def create_unauthorized_error(scope: Scope, keys: Keys) -> Unauthorized:
    if not len(keys):
        return Unauthorized("no API key is configured for this address: set server.key_file, or use the Unix socket")
    if extract_secrets(Headers(scope=scope)):
        return Unauthorized("the API key is unknown: check the key, and the gateway's server.key_file")
    return Unauthorized("the request has no API key: send X-API-Key: KEY or Authorization: Bearer KEY")


def determine_required_permission(method: str, path: str, *, is_in_plan: bool = False) -> Permission:
    """Return the permission that a control-plane request requires. ``is_in_plan``: whether it is in a plan session."""
    if _ADMIN_PATH_PATTERN.fullmatch(path) and not is_in_plan:
        return Permission.ADMIN
    if (
        method in ("GET", "HEAD", "OPTIONS")
        or is_in_plan
        or f"{path}/".startswith((f"{_PLANS_PATH}/", f"{_RUNS_PATH}/"))
    ):
        return Permission.READ
    return Permission.EXEC if runs_code(method, path) else Permission.ADMIN


def runs_code(method: str, path: str) -> bool:
    """Return whether a request runs a command or code in a sandbox."""
    return method == "POST" and _EXEC_PATH_PATTERN.fullmatch(path) is not None


class AuthMiddleware:
    """Middleware that rejects control-plane requests whose caller does not have the required permission."""

    def __init__(self, app: ASGIApp, keys: Keys, secret: Secret) -> None:
        self.app = app
        self.keys = keys
        self.secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # The `$` in the router's patterns also matches before a line feed at the end of a path.
            if _CONTROL_CHARACTER_PATTERN.search(scope["path"]):
                raise Invalid("the path contains a control character: remove it")
            caller = identify(scope, self.keys)
            for key, pattern in ((_PLAN_KEY, _PLAN_REQUEST_PATTERN), (_RUN_KEY, _RUN_REQUEST_PATTERN)):
                if match := pattern.fullmatch(scope["path"]):
                    scope[key], scope["path"] = match.groups()
                    scope["raw_path"] = quote(scope["path"]).encode()
                    break  # the two prefixes cannot be nested
            requester.set(Requester(caller.name if caller else "", str(next(_request_numbers))))
            if scope["path"].startswith(_VOLUME_FILES_PREFIX):
                # The client sends the token of the volume, not a key, and would read a 404 as a missing path.
                raise Unsupported(
                    "the gateway does not support direct access to the files of a volume: mount the volume in a "
                    "sandbox, and use the file calls of the sandbox"
                )
            is_in_plan = _PLAN_KEY in scope
            is_prefixed = is_in_plan or _RUN_KEY in scope
            is_open = scope["path"] in OPEN_PATHS or is_signed_upload(self.secret, scope, time.time())
            if is_prefixed or not is_open:
                if caller is None:
                    raise create_unauthorized_error(scope, self.keys)
                require_permission(
                    caller, determine_required_permission(scope["method"], scope["path"], is_in_plan=is_in_plan)
                )
        await self.app(scope, receive, send)


def require_permission(caller: Caller, permission: Permission) -> None:
    if caller.permission < permission:
        raise create_insufficient_scope_error(caller, permission)


def create_insufficient_scope_error(caller: Caller, permission: Permission) -> Forbidden:
    return Forbidden(
        f"the key {caller.name!r} has scope {caller.permission.name.lower()}, but this request needs a key "
        f"with scope {permission.name.lower()}"
    )
