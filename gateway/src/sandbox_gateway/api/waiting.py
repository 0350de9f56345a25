"""Cancel slow operations and uploads when their client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from sandbox_gateway.api.errors import ClientGone

Result = TypeVar("Result")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await ``work``; if the client disconnects first, cancel it, wait for its cleanup, and raise ClientGone.

    Work that has already committed finishes despite the cancellation; its result is then returned as usual.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            worker.cancel()
            await asyncio.wait({worker})
            if worker.cancelled():
                raise ClientGone
        return worker.result()
    except asyncio.CancelledError:
        worker.cancel()
        await asyncio.wait({worker})
        raise
    finally:
        watcher.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_file(request: Request) -> AsyncIterator[bytes]:
    """Yield the pieces of the body as they arrive. Raises ClientGone if the client disconnects before its end."""
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect:
        raise ClientGone from None
