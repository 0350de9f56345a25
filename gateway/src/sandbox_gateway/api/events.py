"""Stream server-sent events for all changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from sandbox_gateway.api.dependencies import EngineDep
from sandbox_gateway.engine.events import Event, Events

router = APIRouter(tags=["gateway"])
HEARTBEAT_SECONDS = 15


@router.get("/events", summary="Stream server-sent events for all changes", response_class=StreamingResponse)
async def stream_events(
    request: Request,
    engine: EngineDep,
    operation: Annotated[str, Query(max_length=64, description="Only events of this X-Operation-Id")] = "",
) -> StreamingResponse:
    stream = _stream_events(engine.events, operation, request.app.state.closing)
    return EventStream(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


class EventStream(StreamingResponse):
    """A response that closes its generator when it ends.

    Starlette leaves the generator of a slow client to the garbage collector.
    """

    def __init__(self, stream: AsyncGenerator[str, None] | AsyncGenerator[bytes, None], **options: Any) -> None:
        super().__init__(stream, **options)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._stream):
            await super().__call__(scope, receive, send)


async def _stream_events(source: Events, operation: str, closing: asyncio.Event) -> AsyncGenerator[str, None]:
    """Yield events until the gateway shuts down, and a comment after every HEARTBEAT_SECONDS without an event."""
    closing_task = asyncio.ensure_future(closing.wait())
    try:
        with source.subscribed() as events:
            yield ": connected\n\n"
            while not closing.is_set():
                event_task = asyncio.ensure_future(events.get())
                try:
                    tasks = {event_task, closing_task}
                    await asyncio.wait(tasks, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    event_task.cancel()
                if not event_task.done():
                    yield ": alive\n\n"
                    continue
                event = event_task.result()
                if not operation or event.data.get("operation") == operation:
                    yield render(event)
    finally:
        closing_task.cancel()


def render(event: Event) -> str:
    data = {"at": event.time, **event.data}
    return f"event: {event.type}\ndata: {json.dumps(data, default=_to_text)}\n\n"


def _to_text(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
