"""The identity of the callers of forwarded requests.

Another gateway of the fleet has authorized the caller, and names it in a header. The header counts only on the listener
for gateways, which requires a certificate of the fleet. A flag in the ASGI scope, which headers cannot change, marks
the requests that arrive there.
"""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sandbox_gateway.api.access.auth import FORWARDED_CALLER_KEY, Caller, Permission
from sandbox_gateway.api.errors import REQUEST_ID_KEY

CALLER_HEADER = "x-sandbox-gateway-caller"
REQUEST_HEADER = "x-sandbox-gateway-request"
"""The header with the id of a request, between gateways."""
HOLD_HEADER = "x-sandbox-gateway-hold"
"""The header, between gateways, with the id of the fork whose share a request creates."""
PART_HEADER = "x-sandbox-gateway-part"
"""The header, between gateways, of a request for the part of a plan session or of an applied run on another host."""
INTERNAL_HEADERS = frozenset({CALLER_HEADER, REQUEST_HEADER, HOLD_HEADER, PART_HEADER})
"""The headers that only gateways send to each other. Those of a client are removed."""
_CLIENT_REQUEST_HEADER = "x-request-id"
_FORWARDED_KEY = "sandbox_gateway.forwarded"
_REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")


class ForwardedMiddleware:
    """Middleware for the listener for gateways: its requests are marked, and have the caller that the header names."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_FORWARDED_KEY] = True
        permission, _, name = Headers(scope=scope).get(CALLER_HEADER, "").partition(" ")
        if name and permission in Permission.__members__:
            scope[FORWARDED_CALLER_KEY] = Caller(name, Permission[permission])
        assign_request_id(scope)
        await self.app(scope, receive, send)


def is_forwarded(scope: Scope) -> bool:
    """Return whether another gateway has forwarded a request. It must never be forwarded again."""
    return _FORWARDED_KEY in scope


def format_caller(caller: Caller) -> bytes:
    return f"{caller.permission.name} {caller.name}".encode()


def assign_request_id(scope: Scope) -> str:
    """Return the id of a request, which all gateways that handle it log: the client's, if it is a short word."""
    if REQUEST_ID_KEY not in scope:
        header = REQUEST_HEADER if is_forwarded(scope) else _CLIENT_REQUEST_HEADER
        requested_id = Headers(scope=scope).get(header, "")
        is_valid = _REQUEST_ID_PATTERN.fullmatch(requested_id) is not None
        scope[REQUEST_ID_KEY] = requested_id if is_valid else secrets.token_hex(8)
    request_id: str = scope[REQUEST_ID_KEY]
    return request_id
