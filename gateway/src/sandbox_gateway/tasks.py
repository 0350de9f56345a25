"""Tasks that outlive their callers: background tasks, and work that cancellation does not interrupt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sandbox_gateway.log import Logger

T = TypeVar("T")

_uninterruptible_tasks: WeakKeyDictionary[asyncio.AbstractEventLoop, set[asyncio.Future[Any]]] = WeakKeyDictionary()
"""The unfinished work of ``finish_despite_cancellation``, by event loop."""


class BackgroundTasks:
    """Tasks that need not be awaited. If a task fails, the event ``failure_event`` is logged."""

    def __init__(self, log: Logger, failure_event: str = "background task failed") -> None:
        self._log = log
        self._failure_event = failure_event
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` in the background and return its task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._handle_completion)
        return task

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until all tasks have finished, for at most ``seconds`` unless that is None."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._tasks:
                    await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have finished."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _handle_completion(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._log.error(self._failure_event, reason=str(error) or type(error).__name__)


async def finish_despite_cancellation(work: Awaitable[T]) -> T:
    """Await ``work``. If the caller is cancelled, the cancellation takes effect when ``work`` is done."""
    task = asyncio.ensure_future(work)
    tasks = _uninterruptible_tasks.setdefault(task.get_loop(), set())
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:  # may happen more than once
            cancellation = error
    if cancellation is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # the caller has given up, so no one else reads the exception
    raise cancellation


async def wait_for_uninterruptible_tasks(seconds: float) -> bool:
    """Wait until all work of ``finish_despite_cancellation`` in this event loop has finished.

    Returns False if work is still unfinished after ``seconds``. Call this before a shutdown: callers that were
    cancelled may no longer wait for their work.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            while tasks := _uninterruptible_tasks.get(loop):
                await asyncio.wait(tasks)
    except TimeoutError:
        return False
    return True


async def clean_up(log: Logger, *steps: Awaitable[Any]) -> None:
    """Await the ``steps`` that undo a failed operation, one after the other, despite failures and cancellation.

    Failures are only logged, so that the caller can raise the error of the operation.
    """

    async def run_steps() -> None:
        for step in steps:
            try:
                await step
            except Exception as error:
                log.error("clean-up failed", reason=str(error) or type(error).__name__)

    await finish_despite_cancellation(run_steps())


async def wait_for_all(*awaitables: Awaitable[Any]) -> list[Any]:
    """Wait until all ``awaitables`` have finished. Return their results, or raise the first error."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    if error := next((result for result in results if isinstance(result, BaseException)), None):
        raise error
    return results
