"""Server-sent events of every change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from sandbox_gateway.api.view import EngineDep
from sandbox_gateway.engine.events import Event

router = APIRouter(tags=["gateway"])
HEARTBEAT_SECONDS = 15


@router.get("/events", summary="Server-sent events of every change", response_class=StreamingResponse)
async def events(
    request: Request,
    engine: EngineDep,
    operation: Annotated[str, Query(max_length=64, description="Only those of this X-Operation-Id")] = "",
) -> StreamingResponse:
    stream = _stream(engine.events.subscribe(), operation, request.app.state.closing)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _stream(source: AsyncIterator[Event], operation: str, closing: asyncio.Event) -> AsyncIterator[str]:
    """Ends when the gateway closes; a comment now and then shows that the connection lives."""
    coming: asyncio.Future[Any] = asyncio.ensure_future(anext(source))
    ending = asyncio.ensure_future(closing.wait())
    try:
        await asyncio.sleep(0)
        yield ": connected\n\n"
        while not closing.is_set():
            await asyncio.wait({coming, ending}, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                yield ": alive\n\n"
                continue
            try:
                event = coming.result()
            except StopAsyncIteration:
                return
            coming = asyncio.ensure_future(anext(source))
            if not operation or event.data.get("operation") == operation:
                yield render(event)
    finally:
        ending.cancel()
        coming.cancel()


def render(event: Event) -> str:
    data = {"at": event.at, **event.data}
    return f"event: {event.type}\ndata: {json.dumps(data, default=_text)}\n\n"


def _text(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
