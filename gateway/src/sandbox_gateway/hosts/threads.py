"""Run blocking work in new threads, where it cannot exhaust a thread pool and may change its thread's namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from sandbox_gateway.errors import BackendFailed, Timeout

_P = ParamSpec("_P")
_T = TypeVar("_T")


def start_thread(work: Callable[[], _T], name: str) -> asyncio.Future[_T]:
    """Start ``work`` in a new daemon thread, which cannot be stopped. Returns a future for its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def set_outcome(result: _T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result: _T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop is closed, so no task waits for the result.
            loop.call_soon_threadsafe(set_outcome, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def run_in_thread(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run ``work`` like ``asyncio.to_thread``, but in a new thread.

    The event loop's pool has few threads. If all of them wait for a hung file system, no other work can start.
    """
    context = contextvars.copy_context()
    return await start_thread(partial(context.run, work, *args, **kwargs), name="blocking work")


async def run_with_timeout(work: Callable[[], _T], seconds: float, failure: str) -> _T:
    """Run ``work`` in a new thread, and wait at most ``seconds`` for its result.

    If the thread does not finish in time, for example because it is blocked in the kernel, it keeps running.
    ``failure`` is the beginning of the error message. Raises Timeout, or BackendFailed for an OSError in ``work``.
    """

    def run() -> _T:
        try:
            return work()
        except TimeoutError:
            raise Timeout(f"{failure} within {seconds:g} s") from None
        except OSError as error:
            raise BackendFailed(f"{failure}: {error.strerror or error}") from None

    try:
        async with asyncio.timeout(seconds):
            return await start_thread(run, name="volume")
    except TimeoutError:
        raise Timeout(f"{failure} within {seconds:g} s") from None
