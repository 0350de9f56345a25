"""Limit how slowly a client may send or receive a file, which counts towards ``limits.transfers``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

MIN_BYTES_PER_SECOND = 64 << 10
Result = TypeVar("Result")


class Pace:
    """The pace of one transfer. Only the time during which the gateway waits for the client counts.

    In each ``seconds`` of that time, the client must send or receive an average of MIN_BYTES_PER_SECOND.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._start_period()

    def _start_period(self) -> None:
        self._remaining_seconds = self._seconds
        self._missing_bytes = self._seconds * MIN_BYTES_PER_SECOND

    async def wait_for_client(self, work: Awaitable[Result]) -> Result:
        """Await ``work``. Raises TimeoutError if the client is too slow."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        async with asyncio.timeout(self._remaining_seconds):
            result = await work
        self._remaining_seconds -= loop.time() - started_at
        return result

    def count(self, size: int) -> None:
        """Count bytes that the client has sent or received."""
        self._missing_bytes -= size
        if self._missing_bytes <= 0:
            self._start_period()
