"""Locks by key, with a bounded wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from sandbox_gateway.errors import Busy


class KeyedLocks:
    """Locks by key. A lock is dropped when no task holds or awaits it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    def is_held(self, key: str) -> bool:
        """Return whether a task holds ``key`` or waits for it."""
        return key in self._locks

    @contextlib.asynccontextmanager
    async def hold(self, key: str, what: str) -> AsyncIterator[None]:
        """Hold ``key``; ``what`` names it in the error. Raises Busy if it is not free in time."""
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        try:
            try:
                await asyncio.wait_for(lock.acquire(), self._seconds)
            except TimeoutError:
                raise Busy(f"{what} is busy with another request: try again later") from None
            try:
                yield
            finally:
                lock.release()
        finally:
            lock, users = self._locks[key]
            if users == 1:
                del self._locks[key]
            else:
                self._locks[key] = (lock, users - 1)
