"""Run blocking work in new threads, where it blocks no thread pool and may change properties of its thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from sandbox_gateway.errors import BackendFailed, Timeout

_T = TypeVar("_T")


def start_thread(work: Callable[[], _T], name: str) -> asyncio.Future[_T]:
    """Start ``work`` in a new daemon thread, which cannot be stopped. Returns a future of its result."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def body() -> None:
        result: _T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop is closed: no task waits any more.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return done


async def run_with_timeout(work: Callable[[], _T], seconds: float, failure: str) -> _T:
    """Run ``work`` in a new thread: if it blocks in the kernel, only its caller waits, for at most ``seconds``.

    ``failure`` is the beginning of the error message. Raises Timeout, or BackendFailed for an OSError in ``work``.
    """

    def explained() -> _T:
        try:
            return work()
        except TimeoutError:
            raise Timeout(f"{failure} within {seconds:g} s") from None
        except OSError as error:
            raise BackendFailed(f"{failure}: {error.strerror or error}") from None

    try:
        async with asyncio.timeout(seconds):
            return await start_thread(explained, name="volume")
    except TimeoutError:
        raise Timeout(f"{failure} within {seconds:g} s") from None
