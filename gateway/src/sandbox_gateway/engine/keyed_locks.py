"""Locks that are identified by a key and have a timeout."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from sandbox_gateway.errors import Busy


class KeyedLocks:
    """A lock for each key. A lock is deleted when no task holds it or waits for it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    def is_held(self, key: str) -> bool:
        """Return whether a task holds the lock for ``key`` or waits for it."""
        return key in self._locks

    @contextlib.asynccontextmanager
    async def held(self, key: str, description: str) -> AsyncIterator[None]:
        """Hold the lock for ``key``, which protects ``description``. Raises Busy if it cannot be acquired in time."""
        lock, user_count = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, user_count + 1)
        try:
            try:
                # asyncio.wait_for() in Python 3.11 loses a cancellation that arrives just after the lock is acquired.
                async with asyncio.timeout(self._seconds):
                    await lock.acquire()
            except TimeoutError:
                raise Busy(f"another request keeps {description} locked: try again later") from None
            try:
                yield
            finally:
                lock.release()
        finally:
            lock, user_count = self._locks[key]
            if user_count == 1:
                del self._locks[key]
            else:
                self._locks[key] = (lock, user_count - 1)
