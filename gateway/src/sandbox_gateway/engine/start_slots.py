"""Limit how many machines start at the same time, and give clients and their requests equal turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Requester:
    """The client and the request for which the current task runs. The gateway itself has empty values."""

    client: str = ""
    request: str = ""


requester: ContextVar[Requester] = ContextVar("requester", default=Requester())  # noqa: B039 (it is immutable)

_Queue = deque[asyncio.Future[None]]


class StartSlots:
    """A limited number of slots. A free slot goes to the next client in turn, and there to the next request in turn.

    Thus a request for a hundred machines delays the only machine of another request by one start, not by a hundred.
    """

    def __init__(self, count: int, seconds: float) -> None:
        self._free = count
        self._seconds = seconds
        self._waiting: dict[str, dict[str, _Queue]] = {}
        """The waiting tasks by client and request. In both dictionaries, the first key is the next one."""

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold a slot inside this context, but not longer than ``seconds``, because a start may hang."""
        await self._acquire()
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._release()

        timer = asyncio.get_running_loop().call_later(self._seconds, release)
        try:
            yield
        finally:
            timer.cancel()
            release()

    async def _acquire(self) -> None:
        if self._free:
            self._free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        current = requester.get()
        requests = self._waiting.setdefault(current.client, {})
        requests.setdefault(current.request, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._release()  # the slot and the cancellation arrived together
            raise

    def _release(self) -> None:
        while self._waiting:
            granted = self._next()
            if not granted.done():
                granted.set_result(None)
                return
        self._free += 1

    def _next(self) -> asyncio.Future[None]:
        """Remove and return the next waiting task's future, and put its client and its request last."""
        client, requests = next(iter(self._waiting.items()))
        request, queue = next(iter(requests.items()))
        granted = queue.popleft()
        del self._waiting[client], requests[request]
        if queue:
            requests[request] = queue
        if requests:
            self._waiting[client] = requests
        return granted
