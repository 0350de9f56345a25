"""Limit queries about the disks of sandboxes: guests decide how long they take, and clients how often they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_MAX_CONCURRENT_QUERIES = 16


class DiskQueries:
    """Runs at most one query at a time for each instance, and at most 16 in all."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[Any]] = {}
        """By instance. A query continues after its callers have given up, because a thread cannot be stopped."""
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT_QUERIES)

    async def run(self, instance: str, query: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        # The result of a query that runs already may miss the latest changes.
        while running_query := self._running.get(instance):
            await asyncio.wait({running_query})
        task = asyncio.ensure_future(self._run_in_slot(query))
        self._running[instance] = task
        task.add_done_callback(lambda _: self._running.pop(instance))
        return await asyncio.shield(task)

    async def _run_in_slot(self, query: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        async with self._slots:
            return await query()
