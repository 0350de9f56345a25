"""Forward requests to other gateways: their bodies, responses and WebSockets are streamed in both directions.

The other gateway gets the caller that this one has authorized instead of the caller's key, and the id of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from urllib.parse import quote

import httpx
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send
from websockets.exceptions import InvalidHandshake

from sandbox_gateway.api.access.auth import Keys, identify
from sandbox_gateway.api.access.forwarded import (
    CALLER_HEADER,
    INTERNAL_HEADERS,
    PART_HEADER,
    REQUEST_HEADER,
    assign_request_id,
    format_caller,
)
from sandbox_gateway.api.data_plane import websocket
from sandbox_gateway.api.data_plane.streams import (
    HOP_BY_HOP_HEADERS,
    RequestBody,
    forward_response_body,
    has_body,
    lowercase_name,
    parse_connection_options,
    run_unless_interrupted,
)
from sandbox_gateway.fleet.peers import Peers
from sandbox_gateway.log import Logger

HOST_HEADER = b"x-sandbox-host"
"""The header that names the host that has carried out a request."""
PART_KEY = "sandbox_gateway.part"
"""The key in an ASGI scope of the value of ``PART_HEADER`` for the other gateway."""
_REPLACED_HEADERS = INTERNAL_HEADERS | {"x-api-key", "expect"}
_RESPONSE_HEADERS_OF_THE_SERVER = frozenset({"date", "server", HOST_HEADER.decode()})

log = Logger("fleet")

RawHeaders = list[tuple[bytes, bytes]]


class Forwarder:
    def __init__(self, peers: Peers, keys: Keys, stalled_seconds: float) -> None:
        self.peers = peers
        self._keys = keys
        self._stalled_seconds = stalled_seconds

    async def forward(self, host: str, scope: Scope, receive: Receive, send: Send, body: bytes | None = None) -> None:
        """Let a host carry out a request. ``body``: the request's body, if it has been read. Raises HostUnavailable."""
        scope["sandbox_gateway.route"] = "fleet"
        if scope["type"] == "websocket":
            await self._forward_websocket(host, scope, receive, send)
            return
        stream = RequestBody(receive, self._stalled_seconds, has_body=body is None and has_body(Headers(scope=scope)))
        if body is not None:
            stream.fully_read_event.set()
        has_started = False

        async def send_started(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        with self.peers.watched(host) as silence:
            exchange = self._exchange(host, scope, send_started, stream, body)
            if await run_unless_interrupted(exchange, stream, silence):
                return
        if not has_started:
            raise self.peers.create_silence_error(host)
        # Returning before the response is complete makes uvicorn close the client's connection.
        log.warning("a forwarded response has ended early, because the host no longer answers", host=host)

    async def _exchange(self, host: str, scope: Scope, send: Send, stream: RequestBody, body: bytes | None) -> None:
        content: httpx.AsyncByteStream | bytes | None = body
        if body is None and has_body(Headers(scope=scope)):
            content = stream
        headers = self.build_headers(scope)
        async with self.peers.open(host, scope["method"], get_target(scope), headers, content) as response:
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status_code,
                    "headers": _build_response_headers(response.headers.raw, host),
                }
            )
            await forward_response_body(response, send)

    async def _forward_websocket(self, host: str, scope: Scope, receive: Receive, send: Send) -> None:
        with self.peers.watched(host) as silence:
            await self._tunnel(host, scope, receive, send, silence)

    async def _tunnel(
        self, host: str, scope: Scope, receive: Receive, send: Send, silence: asyncio.Future[None]
    ) -> None:
        headers = self.build_headers(scope)
        address, port = self.peers.split_address(host)
        client_host = Headers(scope=scope).get("host", "")
        tunnel = websocket.Tunnel(receive, send, silence, f"the gateway of host {host} no longer answers")
        connection_task = asyncio.ensure_future(
            websocket.connect(
                address,
                port,
                "localhost" if client_host.startswith("[") or not client_host else client_host,
                get_target(scope),
                [pair for pair in headers if pair[0] != b"host"],
                scope,
                self.peers.tls,
            )
        )
        try:
            connection = await tunnel.wait_until_open(connection_task)
        except websocket.HandshakeRefused as refusal:
            response_headers = _build_response_headers(_encode(refusal.response.headers.raw_items()), host)
            response_headers = [pair for pair in response_headers if pair[0] != b"content-length"]
            status = refusal.response.status_code
            await send({"type": "websocket.http.response.start", "status": status, "headers": response_headers})
            await send({"type": "websocket.http.response.body", "body": bytes(refusal.response.body)})
            return
        except (OSError, InvalidHandshake) as error:
            raise self.peers.create_error(host, error) from None
        if connection is None:
            raise self.peers.create_silence_error(host)
        assert connection.response is not None
        response_headers = _build_response_headers(_encode(connection.response.headers.raw_items()), host)
        accepted_headers = [
            pair for pair in response_headers if lowercase_name(pair[0]) not in websocket.HANDSHAKE_HEADERS
        ]
        await tunnel.run(connection, accepted_headers)

    def build_headers(self, scope: Scope) -> RawHeaders:
        """Return the headers of a request for another gateway."""
        headers = Headers(scope=scope)
        dropped_names = HOP_BY_HOP_HEADERS | _REPLACED_HEADERS | parse_connection_options(headers)
        if any(self._has_api_key(value) for value in headers.getlist("authorization")):
            dropped_names |= {"authorization"}
        forwarded = [(name, value) for name, value in headers.raw if lowercase_name(name) not in dropped_names]
        forwarded.append((REQUEST_HEADER.encode(), assign_request_id(scope).encode()))
        if caller := identify(scope, self._keys):
            forwarded.append((CALLER_HEADER.encode(), format_caller(caller)))
        if PART_KEY in scope:
            forwarded.append((PART_HEADER.encode(), scope[PART_KEY]))
        return forwarded

    def _has_api_key(self, authorization: str) -> bool:
        scheme, _, secret = authorization.partition(" ")
        return scheme.lower() == "bearer" and self._keys.find(secret.strip()) is not None


def get_target(scope: Scope) -> bytes:
    """Return the path and the query of a request."""
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    query: bytes = scope.get("query_string", b"")
    return path + b"?" + query if query else path


def _build_response_headers(raw_headers: Iterable[tuple[bytes, bytes]], host: str) -> RawHeaders:
    headers = Headers(raw=[(name.lower(), value) for name, value in raw_headers])
    dropped_names = HOP_BY_HOP_HEADERS | _RESPONSE_HEADERS_OF_THE_SERVER | parse_connection_options(headers)
    if "transfer-encoding" in headers:
        dropped_names |= {"content-length"}
    kept = [(name, value) for name, value in headers.raw if lowercase_name(name) not in dropped_names]
    return [*kept, (HOST_HEADER, host.encode())]


def _encode(items: Iterable[tuple[str, str]]) -> RawHeaders:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in items]
