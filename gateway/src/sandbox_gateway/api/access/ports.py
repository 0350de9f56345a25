"""Authorize requests to ports in sandboxes: by API key, by one of the sandbox's two tokens, by signed URL, or without
a secret if the ports are public.

The tokens are derived from the sandbox's id, so the gateway can verify them even after the sandbox has been removed. A
caller with a valid token learns that the sandbox was removed. All other callers
get the same error as for an unknown sandbox.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from sandbox_gateway.api.access import auth
from sandbox_gateway.api.access.signed_urls import SignerFinder, get_signed_url
from sandbox_gateway.api.errors import clip
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import Forbidden, GatewayError, NotFound, Unauthorized
from sandbox_gateway.hosts.connect import AGENT_PORT, CODE_PORT
from sandbox_gateway.records import Sandbox

AGENT_PORTS = frozenset({AGENT_PORT, CODE_PORT})
"""Ports of the agent (E2B's envd, and the code interpreter): only requests to these get the agent's access token."""
TOKEN_HEADER = "x-access-token"
TRAFFIC_HEADERS = ("e2b-traffic-access-token", "cube-traffic-access-token")
SECRET_HEADERS = frozenset({"x-api-key", TOKEN_HEADER, *TRAFFIC_HEADERS})
"""Headers for the gateway only, which are not forwarded to services."""


class NotRunning(GatewayError):
    """The sandbox has no running machine. E2B's clients look for "was not found" in responses with status 502."""

    status = 502

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    @classmethod
    def create_for_missing_sandbox(cls, ref: str) -> NotRunning:
        return cls(NotFound.kind, f"sandbox {clip(ref, 80)!r} was not found: it was removed, or never existed")

    @classmethod
    def from_error(cls, error: GatewayError) -> NotRunning:
        return cls(error.kind, f"{error.message}; a running sandbox was not found")


@dataclass(frozen=True)
class Admission:
    """The result of ``admit``.

    For a signed URL, ``query`` replaces the query string of the request, and contains only the signed fields.
    """

    sandbox: Sandbox
    query: bytes | None = None


def derive_traffic_token(engine: Engine, sandbox_id: str) -> str:
    """Return the sandbox's second token, which is valid for every port except AGENT_PORT."""
    return engine.secret.derive(f"traffic {sandbox_id}")


def derive_port_token(token: str, port: int) -> str:
    """Return the token that the agent at ``port`` requires: ``token``, or one derived from it for the code interpreter.

    A program that listens on the interpreter's port while no agent runs must not learn the other port's token.
    """
    return token if port == AGENT_PORT else hashlib.sha256(f"code {token}".encode()).hexdigest()


class PortAccess:
    def __init__(self, engine: Engine, keys: auth.Keys) -> None:
        self.engine = engine
        self.keys = keys
        self._signer_finder = SignerFinder(engine)

    def admit_signed_url(self, scope: Scope) -> Admission | None:
        """Admit a request whose sandbox is identified only by the signature of the URL.

        Returns None if the URL is not signed. Raises Unauthorized if the signature is wrong or has expired.
        """
        url = get_signed_url(scope)
        if url is None:
            return None
        sandbox = self._signer_finder.find(url)
        if sandbox is None:
            raise Unauthorized(
                "the signature of this URL does not match any sandbox, because the URL was changed or its sandbox was "
                "removed: create a new URL"
            )
        return Admission(sandbox, url.query)

    def admit(self, scope: Scope, headers: Headers, ref: str, port: int) -> Admission:
        """Admit a request to a port of the sandbox ``ref``. Raises Unauthorized, Forbidden or NotRunning."""
        sandbox = self._find_sandbox(ref)
        id = sandbox.id if sandbox else ref
        caller = auth.identify(scope, self.keys)
        query = None
        if not (caller and caller.permission >= auth.Permission.EXEC):
            is_public = sandbox is not None and sandbox.network.allow_public_traffic and port not in AGENT_PORTS
            if not (is_public or self._has_valid_token(id, headers, port)):
                query = self._extract_signed_query(scope, id, port)
                if query is None:
                    raise self._create_refusal_error(scope, caller, headers, port)
        if sandbox is None:
            raise NotRunning.create_for_missing_sandbox(ref)
        return Admission(sandbox, query)

    def _find_sandbox(self, ref: str) -> Sandbox | None:
        try:
            return self.engine.sandboxes.get(ref)
        except NotFound:
            return None

    def _has_valid_token(self, id: str, headers: Headers, port: int) -> bool:
        token_pairs = [(headers.get(TOKEN_HEADER), self.engine.secret.derive(id))]
        if port != AGENT_PORT:
            token_pairs += [(headers.get(name), derive_traffic_token(self.engine, id)) for name in TRAFFIC_HEADERS]
        return any(
            hmac.compare_digest(auth.hash_secret(offered_token), auth.hash_secret(expected_token))
            for offered_token, expected_token in token_pairs
            if offered_token
        )

    def _extract_signed_query(self, scope: Scope, id: str, port: int) -> bytes | None:
        url = get_signed_url(scope) if port == AGENT_PORT else None
        if url is None or not url.find_signers({id: self.engine.secret.derive(id).encode()}):
            return None
        url.check_expiration(time.time())
        return url.query

    def _create_refusal_error(
        self, scope: Scope, caller: auth.Caller | None, headers: Headers, port: int
    ) -> GatewayError:
        """Return the error for a refused request, which does not reveal whether the sandbox exists.

        As in E2B and CubeSandbox, the status is 403 for services, and 401 for the agent and for unknown API keys.
        """
        if caller:
            return auth.create_insufficient_scope_error(caller, auth.Permission.EXEC)
        if port != AGENT_PORT and "x-api-key" not in headers:
            return Forbidden(
                "the ports of this sandbox are not public, and the request has no valid token for the sandbox: send "
                "E2B-Traffic-Access-Token: TOKEN (GET /sandboxes/ID returns it) or X-API-Key: KEY"
            )
        if any(name in headers for name in (TOKEN_HEADER, *TRAFFIC_HEADERS)):
            return Unauthorized(
                "no sandbox with that id has this access token, or the token is not valid for this port: "
                "GET /sandboxes/ID returns the tokens of a sandbox"
            )
        return auth.create_unauthorized_error(scope, self.keys)
