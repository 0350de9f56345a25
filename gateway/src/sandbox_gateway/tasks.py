"""Tasks that outlive their callers: background tasks, and work that a cancellation does not interrupt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sandbox_gateway.log import Logger

T = TypeVar("T")

_uninterrupted: WeakKeyDictionary[asyncio.AbstractEventLoop, set[asyncio.Future[Any]]] = WeakKeyDictionary()
"""The unfinished work of ``finish_despite_cancellation``, by event loop."""


class BackgroundTasks:
    """Tasks that no caller has to await. Their failures are logged with the event ``failure``."""

    def __init__(self, log: Logger, failure: str = "background task failed") -> None:
        self._log = log
        self._failure = failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` in the background. A failure is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until all tasks have ended, or for ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._tasks:
                    await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._log.error(self._failure, reason=str(error) or type(error).__name__)


async def finish_despite_cancellation(work: Awaitable[T]) -> T:
    """Await ``work``. If the caller is cancelled, the cancellation takes effect when ``work`` is done."""
    task = asyncio.ensure_future(work)
    uninterrupted = _uninterrupted.setdefault(task.get_loop(), set())
    uninterrupted.add(task)
    task.add_done_callback(uninterrupted.discard)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:  # even if it is repeated
            cancellation = error
    if cancellation is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # the caller has given up, so no one else reads the exception
    raise cancellation


async def wait_for_uninterrupted(seconds: float) -> bool:
    """Wait until all work of ``finish_despite_cancellation`` in this event loop has ended; False after ``seconds``.

    Before a shutdown: callers that were cancelled may not wait for their work any more.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            while tasks := _uninterrupted.get(loop):
                await asyncio.wait(tasks)
    except TimeoutError:
        return False
    return True


async def clean_up(log: Logger, *works: Awaitable[Any]) -> None:
    """Await all ``works``, one after the other, despite failures and cancellation.

    For the undoing of a failed operation: failures are logged, so that the caller can raise the first error.
    """

    async def work_off() -> None:
        for work in works:
            try:
                await work
            except Exception as error:
                log.error("clean-up failed", reason=str(error) or type(error).__name__)

    await finish_despite_cancellation(work_off())


async def wait_for_all(*works: Awaitable[Any]) -> list[Any]:
    """Wait until all ``works`` have ended, then return their results or raise the first error."""
    results = await asyncio.gather(*works, return_exceptions=True)
    if error := next((result for result in results if isinstance(result, BaseException)), None):
        raise error
    return results
