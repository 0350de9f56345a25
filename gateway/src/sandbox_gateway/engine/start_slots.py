"""Limit concurrent machine starts, and give each client, and each request of a client, an equal share of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Requester:
    """The client and the request on whose behalf a task runs. Both are empty for the gateway's own tasks."""

    client: str = ""
    request: str = ""


requester: ContextVar[Requester] = ContextVar("requester", default=Requester())  # noqa: B039 (it is immutable)

_Queue = deque[asyncio.Future[None]]


class StartSlots:
    """A fixed number of slots, assigned to the clients in turn, and to the requests of each client in turn.

    A request for a hundred machines therefore delays a request for one machine by one start, not by a hundred.
    """

    def __init__(self, count: int, max_hold_seconds: float) -> None:
        self._free_count = count
        self._max_hold_seconds = max_hold_seconds
        self._waiting_tasks: dict[str, dict[str, _Queue]] = {}
        """The waiting tasks by client and request. In both dictionaries, the first key is the next one."""

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold a slot inside this context, but for at most ``max_hold_seconds``, because a start may hang."""
        await self._acquire()
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._release()

        timer = asyncio.get_running_loop().call_later(self._max_hold_seconds, release)
        try:
            yield
        finally:
            timer.cancel()
            release()

    async def _acquire(self) -> None:
        if self._free_count:
            self._free_count -= 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        current_requester = requester.get()
        requests = self._waiting_tasks.setdefault(current_requester.client, {})
        requests.setdefault(current_requester.request, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release()  # the slot and the cancellation arrived together
            raise

    def _release(self) -> None:
        while self._waiting_tasks:
            future = self._pop_next_future()
            if not future.done():
                future.set_result(None)
                return
        self._free_count += 1

    def _pop_next_future(self) -> asyncio.Future[None]:
        """Remove and return the future of the next waiting task. Its client and its request then come last."""
        client, requests = next(iter(self._waiting_tasks.items()))
        request, queue = next(iter(requests.items()))
        future = queue.popleft()
        del self._waiting_tasks[client], requests[request]
        if queue:
            requests[request] = queue
        if requests:
            self._waiting_tasks[client] = requests
        return future
