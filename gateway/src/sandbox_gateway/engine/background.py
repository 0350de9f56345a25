"""Background tasks, which outlive their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from sandbox_gateway.log import Logger

log = Logger("engine")
T = TypeVar("T")


class Background:
    """A set of background tasks, which no caller awaits."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Awaitable[Any]) -> None:
        """Run ``work``; a failure is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("background task failed", reason=str(error) or type(error).__name__)


async def finish_despite_cancellation(work: Awaitable[T]) -> T:
    """Await ``work``. If the caller is cancelled meanwhile, the cancellation takes effect when ``work`` is done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
