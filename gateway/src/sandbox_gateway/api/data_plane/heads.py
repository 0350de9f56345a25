"""Limit the size of the heads of services' responses, and the size of reads.

h11 limits each head separately, but a service may send interim responses (100, 103) endlessly, thousands in one read.
"""

from __future__ import annotations

import asyncio
import weakref
from contextvars import ContextVar
from typing import Any

import anyio.lowlevel
import httpcore

MAX_HEAD_BYTES = 64 << 10
"""Maximum size of a response's head, including all interim responses before it."""
_MAX_PARSED_BYTES = 16 << 10
"""Maximum number of bytes parsed per turn of the event loop."""
_MAX_READ_BYTES = 256 << 10
"""Maximum number of bytes per read. With 64 KiB, downloads take a fifth more CPU time."""
_MIN_READ_BYTES = 16 << 10
"""Size of reads when there are thousands of connections."""
_TOTAL_READ_BYTES = 64 << 20
"""Bytes shared by the reads of all connections: a connection to a slow client holds the data of its last read."""
_head_byte_counter: ContextVar[HeadByteCounter | None] = ContextVar("head_byte_counter", default=None)


class HeadByteCounter:
    """A counter of the bytes received until the head of one response is complete.

    Put its ``trace`` into the request's extensions, and send the request from the task that created the counter.
    """

    def __init__(self) -> None:
        self._remaining_bytes = MAX_HEAD_BYTES
        self.is_reading = False
        _head_byte_counter.set(self)

    async def trace(self, event: str, _: dict[str, Any]) -> None:
        if event.startswith("http11.receive_response_headers."):
            self.is_reading = event.endswith(".started")

    def count(self, size: int) -> None:
        """Count ``size`` more bytes. Raises httpcore.RemoteProtocolError if the total exceeds MAX_HEAD_BYTES."""
        self._remaining_bytes -= size
        if self._remaining_bytes < 0:
            raise httpcore.RemoteProtocolError(f"its response headers are longer than {MAX_HEAD_BYTES} bytes")


_streams: weakref.WeakSet[CountingStream] = weakref.WeakSet()
"""The open streams."""


class CountingStream(httpcore.AsyncNetworkStream):
    """A network stream that counts the bytes it reads for the ``HeadByteCounter`` of the current task.

    The more streams there are, the less each of them reads at a time.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream, transport: asyncio.BaseTransport) -> None:
        self._stream = stream
        self._transport = transport
        self._unread_data = b""
        _streams.add(self)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        counter = _head_byte_counter.get()
        if counter is None or not counter.is_reading:
            return await self._read(max_bytes, timeout)
        data = await self._read(min(max_bytes, _MAX_PARSED_BYTES), timeout)
        counter.count(len(data))
        return data

    async def _read(self, max_bytes: int, timeout: float | None) -> bytes:
        # Keep the rest here: in anyio's own buffer nothing could detect it (see ``get_extra_info``).
        if self._unread_data:
            await anyio.lowlevel.checkpoint()
        else:
            size = min(_MAX_READ_BYTES, max(_MIN_READ_BYTES, _TOTAL_READ_BYTES // max(1, len(_streams))))
            # anyio would keep the rest of a longer read in its own buffer.
            self._transport.max_size = size  # type: ignore[attr-defined]
            self._unread_data = await self._stream.read(size, timeout)
        data, self._unread_data = self._unread_data[:max_bytes], self._unread_data[max_bytes:]
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        _streams.discard(self)
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable" and self._unread_data:
            return True
        return self._stream.get_extra_info(info)
