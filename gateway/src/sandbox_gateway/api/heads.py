"""What a service in a sandbox may send before the body of its answer: interim answers (100, 103) have no end by
themselves, and thousands of them fit into one read."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import anyio.lowlevel
import httpcore

MOST_BYTES = 64 << 10
"""Of an answer's head, with all interim answers before it."""
_PIECE = 16 << 10
"""Bytes that are parsed in one turn of the event loop."""
_AT_ONCE = 256 << 10
"""As much as asyncio reads in one turn."""
_head: ContextVar[Head | None] = ContextVar("head", default=None)


class Head:
    """Counts what comes until the head of one answer is complete. Its ``trace`` belongs into the request's extensions,
    and the request is sent from the task that made it."""

    def __init__(self) -> None:
        self._left = MOST_BYTES
        self.reading = False
        _head.set(self)

    async def trace(self, event: str, _: dict[str, Any]) -> None:
        if event.startswith("http11.receive_response_headers."):
            self.reading = event.endswith(".started")

    def take(self, count: int) -> None:
        """Raises httpcore.RemoteProtocolError."""
        self._left -= count
        if self._left < 0:
            raise httpcore.RemoteProtocolError(f"its answer's head has more than {MOST_BYTES} bytes")


class CountedStream(httpcore.AsyncNetworkStream):
    """A connection on which a ``Head`` is counted."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._unread = b""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        head = _head.get()
        if head is None or not head.reading:
            return await self._read(max_bytes, timeout)
        data = await self._read(min(max_bytes, _PIECE), timeout)
        head.take(len(data))
        return data

    async def _read(self, max_bytes: int, timeout: float | None) -> bytes:
        # anyio would keep the rest where nobody can ask for it.
        if self._unread:
            await anyio.lowlevel.checkpoint()
        else:
            self._unread = await self._stream.read(_AT_ONCE, timeout)
        data, self._unread = self._unread[:max_bytes], self._unread[max_bytes:]
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable" and self._unread:
            return True
        return self._stream.get_extra_info(info)
