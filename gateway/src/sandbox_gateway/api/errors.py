"""Convert all errors to one shape: `{code, message, error, kind, blockers}`, and `details` if there are any."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox_gateway.api.access.limits import TooSlow
from sandbox_gateway.api.client_requests import find_unsupported_request
from sandbox_gateway.api.metrics import Metrics
from sandbox_gateway.errors import GatewayError, Invalid, NotFound, OutputLost, Unsupported
from sandbox_gateway.log import Logger

log = Logger("api")

MAX_SHOWN_CHARS = 80
"""Maximum number of characters of a caller's input that an error message repeats."""
MAX_LISTED_FIELDS = 6
"""Maximum number of fields that a validation error names."""
MAX_MESSAGE_CHARS = 4000
"""Maximum length of an error message, in characters."""
RETRY_SECONDS = 1
CLIENT_CLOSED_REQUEST = 499
_MAX_LENGTH_DIGITS = 15
SWITCHING_PROTOCOLS = 101
"""The status recorded for an accepted WebSocket."""


WARNING_KEY = "sandbox_gateway.warning"
"""The key in an ASGI scope under which the `Warning` header of the response is stored."""


REQUEST_ID_KEY = "sandbox_gateway.request_id"
"""The key in an ASGI scope of the id of a request that several gateways of a fleet handle."""


class ErrorShape(BaseModel):
    """The JSON body of every error response."""

    code: int = Field(description="The HTTP status.")
    message: str = Field(description="A sentence that says what is wrong and how to fix it.")
    error: str = Field(description="The same sentence as in message.")
    kind: str = Field(
        description="A stable identifier of the error: not_found, in_use, name_taken, conflict, invalid, …"
    )
    blockers: list[str] = Field(description="Ids of the objects that block the operation.")
    details: dict[str, Any] = Field(
        {},
        description="The details of the message, as data. not_found: resource, parent; in_use: resource, users "
        "(kind, id, name), overrides (parameters of the request that remove an obstacle); a failed boot: console (its "
        "last lines).",
    )


class ClientGone(Exception):
    """The client disconnected before it received the response."""


class AmbiguousFraming(Invalid):
    """HTTP implementations could disagree about where this request ends, so its connection is closed."""


def clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def build_error_body(
    status: int, kind: str, message: str, blockers: Sequence[str] = (), details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    # A caller's input may contain lone surrogates, which cannot be encoded.
    sentence = clip(message, MAX_MESSAGE_CHARS).encode(errors="replace").decode()
    body = {"code": status, "message": sentence, "error": sentence, "kind": kind, "blockers": list(blockers)}
    return {**body, "details": details} if details else body


def build_error_response(
    status: int,
    kind: str,
    message: str,
    blockers: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    details: Mapping[str, Any] | None = None,
) -> JSONResponse:
    # Clients repeat a request after this time, which must not run a command twice.
    can_retry = status in (429, 503) and kind != OutputLost.kind
    retry_headers = {"Retry-After": str(RETRY_SECONDS)} if can_retry else {}
    body = build_error_body(status, kind, message, blockers, details)
    return JSONResponse(body, status, headers={**retry_headers, **(headers or {})})


def convert_to_response(error: GatewayError) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if isinstance(error, AmbiguousFraming | TooSlow):
        headers["Connection"] = "close"
    return build_error_response(error.status, error.kind, error.message, error.blockers, headers, error.details)


def register(app: FastAPI) -> None:
    """Register handlers that convert all errors to ErrorShape responses."""

    @app.exception_handler(GatewayError)
    async def _handle_gateway_error(request: Request, error: GatewayError) -> JSONResponse:
        return _convert_error(request.scope, error)

    @app.exception_handler(RequestValidationError)
    async def _handle_validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return build_error_response(400, "invalid", explain(error.errors()))

    @app.exception_handler(HTTPException)
    async def _handle_http_exception(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, GatewayError):
            return convert_to_response(error.__cause__)
        if unsupported := _find_unsupported_request(request.scope, error.status_code):
            return convert_to_response(unsupported)
        kind, message = _describe_routing_error(request, error)
        return build_error_response(error.status_code, kind, message, headers=error.headers)


def _convert_error(scope: Scope, error: GatewayError) -> JSONResponse:
    # A segment of an unsupported request may look like the name of an object, which is then missing.
    unsupported = _find_unsupported_request(scope, error.status) if isinstance(error, NotFound) else None
    return convert_to_response(unsupported or error)


def _find_unsupported_request(scope: Scope, status: int) -> Unsupported | None:
    return find_unsupported_request(_get_method(scope), scope["path"]) if status in (404, 405) else None


def _describe_routing_error(request: Request, error: HTTPException) -> tuple[str, str]:
    request_line = f"{request.method} {clip(request.url.path, MAX_SHOWN_CHARS)}"
    if error.status_code == 404:
        return "not_found", f"route {request_line} not found: GET /openapi.json lists the routes"
    if error.status_code == 405:
        allowed_methods = (error.headers or {}).get("Allow") or (error.headers or {}).get("allow") or "another method"
        return "invalid", f"{request_line} is not supported: this route accepts {allowed_methods}"
    if error.status_code == 400:
        return "invalid", "the body cannot be read: send a JSON object, with Content-Type: application/json"
    return "invalid", f"{request_line}: {error.detail}"


def explain(errors: Sequence[Any]) -> str:
    """Return one sentence that names each invalid field, with the reason and the shortened value."""
    parts = [_describe_field(item) for item in errors[:MAX_LISTED_FIELDS]]
    if len(errors) > MAX_LISTED_FIELDS:
        parts.append(f"and {len(errors) - MAX_LISTED_FIELDS} more")
    return "; ".join(parts)


def _describe_field(item: Mapping[str, Any]) -> str:
    if item["type"] == "json_invalid":
        position, reason = item["loc"][-1], item.get("ctx", {}).get("error", "cannot be read")
        return f"the body is not valid JSON: {reason} (at character {position})"
    location = [str(step) for step in item["loc"][1:]]
    if not location:
        if item["type"] == "missing":
            return "the request needs a body: a JSON object, with Content-Type: application/json"
        if item["type"] in ("model_attributes_type", "dict_type", "model_type"):
            return "the body must be a JSON object, with Content-Type: application/json"
    name = clip(".".join(location) or str(item["loc"][0] if item["loc"] else "request"), MAX_SHOWN_CHARS)
    reason = clip(item["msg"].removeprefix("Value error, "), 300)
    if item["type"] in ("missing", "value_error"):
        return f"{name}: {'this field is required' if item['type'] == 'missing' else reason}"
    return f"{name}: {reason} (got {_shorten(item.get('input'))})"


def _shorten(value: object) -> str:
    if isinstance(value, str | bytes):
        value = value[:MAX_SHOWN_CHARS]
    elif isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    elif isinstance(value, int) and value.bit_length() > 200:
        return "a very large number"
    return clip(repr(value), MAX_SHOWN_CHARS)


class ErrorMiddleware:
    """The outermost middleware, which catches every exception, and logs and counts every request once."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        started_at, status = time.perf_counter(), 0

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
                if WARNING_KEY in scope:
                    MutableHeaders(scope=message)["Warning"] = scope[WARNING_KEY]
            elif message["type"] == "websocket.accept":
                status = SWITCHING_PROTOCOLS
            await send(message)

        try:
            _check_framing(scope)
            await self.app(scope, receive, send_and_record)
        except ClientGone:
            status = status or CLIENT_CLOSED_REQUEST
        except GatewayError as error:
            if status:
                raise
            await _convert_error(scope, error)(scope, receive, send_and_record)
        except Exception as error:
            incident_id = secrets.token_hex(4)
            log.error(
                "internal error", exc_info=True, incident=incident_id, method=_get_method(scope), path=scope["path"]
            )
            if status:
                raise ConnectionError(f"incident {incident_id}") from error
            await _build_incident_response(incident_id)(scope, receive, send_and_record)
        finally:
            self._record_request(scope, status, time.perf_counter() - started_at)

    def _record_request(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "") or scope.get("sandbox_gateway.route", "other")
        method = _get_method(scope)
        self.metrics.record_request(method, route, status, seconds)
        caller = scope.get("sandbox_gateway.caller")
        log_request = log.debug if method in ("GET", "HEAD") and status < 500 else log.info
        log_request(
            "request",
            method=method,
            path=clip(scope["path"], 200),
            status=status,
            ms=round(seconds * 1000, 1),
            caller=caller.name if caller else "",
            **({"request": scope[REQUEST_ID_KEY]} if REQUEST_ID_KEY in scope else {}),
        )


def _check_framing(scope: Scope) -> None:
    headers = dict(scope["headers"])
    if b"content-length" in headers and b"transfer-encoding" in headers:
        raise AmbiguousFraming("the request has both Content-Length and Transfer-Encoding: send only one of them")
    if len(headers.get(b"content-length", b"")) > _MAX_LENGTH_DIGITS:
        # A service in a sandbox may parse it as a 64-bit number and read a different length.
        raise AmbiguousFraming(f"Content-Length has more than {_MAX_LENGTH_DIGITS} digits: send the length of the body")


def _get_method(scope: Scope) -> str:
    method: str = scope.get("method", "GET")
    return method


def _build_incident_response(incident_id: str) -> JSONResponse:
    return build_error_response(
        500,
        "internal",
        f"internal error in the gateway: please report incident {incident_id} with the gateway's log",
    )
