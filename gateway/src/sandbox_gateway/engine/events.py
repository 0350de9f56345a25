"""Distribute events to subscribers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sandbox_gateway.records import now

_MAX_QUEUE_LENGTH = 1000


@dataclass(frozen=True)
class Event:
    type: str
    """"sandbox.created", "fork.progress", …"""
    data: dict[str, Any]
    time: datetime = field(default_factory=now)


class Events:
    """A channel that sends each event to all subscribers.

    A subscriber that is too slow loses the oldest events, which limits the memory in use.
    """

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[Event]] = set()

    def publish(self, type: str, **data: Any) -> None:
        event = Event(type, data)
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)

    @contextlib.contextmanager
    def subscribed(self) -> Iterator[asyncio.Queue[Event]]:
        """Yield a queue that receives all events inside this context."""
        queue: asyncio.Queue[Event] = asyncio.Queue(_MAX_QUEUE_LENGTH)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)
