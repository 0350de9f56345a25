"""Carry out a request in this gateway, and keep its response."""

from __future__ import annotations

from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope

from sandbox_gateway.api.errors import ClientGone
from sandbox_gateway.fleet.peers import Answer


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that yields ``body`` first, as if it had not been read."""
    is_sent = False

    async def receive_again() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def read_body(receive: Receive) -> bytes:
    """Return the whole body of a request, whose size ``BodyLimitMiddleware`` limits. Raises ClientGone."""
    body = b""
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    return body


async def run_locally(app: ASGIApp, scope: Scope, receive: Receive, host: str) -> Answer:
    """Return the response of this gateway's own routes."""
    start: dict[str, Any] = {}
    pieces: list[bytes] = []

    async def keep(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    await app({**scope}, receive, keep)
    return Answer(host, start["status"], httpx.Headers(start["headers"]), b"".join(pieces))
