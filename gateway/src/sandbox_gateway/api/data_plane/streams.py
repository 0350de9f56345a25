"""The parts of forwarding that the data plane and the fleet share: headers, bodies, and the end of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import anyio
import httpx
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Send

from sandbox_gateway.api.access.limits import TooSlow
from sandbox_gateway.api.errors import ClientGone

HOP_BY_HOP_HEADERS = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that belong to one connection."""


SMALL_PIECE_BYTES = 4096
"""Thousands of pieces smaller than this may arrive in one read, so other tasks get a turn after each of them."""


def lowercase_name(name: bytes) -> str:
    return name.decode("latin-1").lower()


def parse_connection_options(headers: Headers) -> set[str]:
    """Return the header names that `Connection` lists, which must not be forwarded (RFC 9110, 7.6.1)."""
    return {word.strip().lower() for value in headers.getlist("connection") for word in value.split(",")}


def has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


class RequestBody(httpx.AsyncByteStream):
    """A stream of the request's body, empty unless ``has_body``. Raises TooSlow after ``seconds`` without data."""

    def __init__(self, receive: Receive, seconds: float, *, has_body: bool) -> None:
        self.receive = receive
        self.seconds = seconds
        self.fully_read_event = asyncio.Event()
        """Set once the whole body has been read: only the client's disconnect can follow."""
        if not has_body:
            self.fully_read_event.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            has_more = True
            while has_more:
                message = await self._receive_piece()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                has_more = message.get("more_body", False)
                if chunk := message.get("body", b""):
                    yield chunk
        finally:
            self.fully_read_event.set()

    async def _receive_piece(self) -> Message:
        try:
            async with asyncio.timeout(self.seconds):
                return await self.receive()
        except TimeoutError:
            raise TooSlow.create_for_stalled_body(self.seconds) from None


async def forward_response_body(response: httpx.Response, send: Send) -> None:
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for chunk in response.stream:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if len(chunk) < SMALL_PIECE_BYTES:
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def run_unless_interrupted(
    work: Coroutine[Any, Any, None], body: RequestBody, end_future: asyncio.Future[None]
) -> bool:
    """Await ``work`` and return True, or cancel it and return False if ``end_future`` is done first.

    If the client disconnects first, cancel ``work`` and raise ClientGone.
    """
    cancel_scope = anyio.CancelScope()

    async def run_in_cancel_scope() -> None:
        # httpcore shields its cleanup from the cancellation of a scope, but not of a task.
        with cancel_scope:
            await work

    worker, watcher = asyncio.ensure_future(run_in_cancel_scope()), asyncio.ensure_future(_wait_for_disconnect(body))
    try:
        await asyncio.wait({worker, watcher, end_future}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
            return True
        if end_future.done():
            return False
        raise ClientGone
    finally:
        watcher.cancel()
        if not worker.done():
            cancel_scope.cancel()
            await asyncio.wait({worker})


async def _wait_for_disconnect(body: RequestBody) -> None:
    await body.fully_read_event.wait()
    while (await body.receive())["type"] != "http.disconnect":
        pass
