"""The output of a process: streamed to its followers; the tail is kept for later followers."""

from __future__ import annotations

import threading
import time
from collections import deque
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    Chunk = tuple[str, bytes]

TAIL = 256 << 10
"""Bytes kept for a later follower."""
WINDOW = 1 << 20
"""Bytes by which the slowest follower may lag before the process has to wait."""
_OVERHEAD = 100


class Output:
    """Chunks ``(kind, data)`` in order, and finally the end event.

    Without followers the process never waits; with followers it waits for the slowest.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._size = 0
        self._first = 0
        self._followers: set[Follower] = set()
        self.ending: dict[str, object] | None = None

    def wait_for_room(self, timeout: float | None) -> bool:
        """Wait until there is room for more output; False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(self._has_room, timeout)

    def put(self, kind: str, data: bytes) -> None:
        with self._changed:
            self._chunks.append((kind, data))
            self._size += len(data) + _OVERHEAD
            self._trim()
            self._changed.notify_all()

    def end(self, ending: dict[str, object]) -> None:
        with self._changed:
            self.ending = ending
            self._changed.notify_all()

    def follow(self) -> Follower:
        """Return a follower that starts with the tail."""
        with self._changed:
            follower = Follower(self, self._first)
            self._followers.add(follower)
            return follower

    def _has_room(self) -> bool:
        self._trim()
        return self._size <= WINDOW

    def _trim(self) -> None:
        needed = min((follower.position for follower in self._followers), default=self._first + len(self._chunks))
        while self._size > TAIL and self._first < needed:
            self._size -= len(self._chunks.popleft()[1]) + _OVERHEAD
            self._first += 1


class Follower:
    """A reader of an Output. Close it after use."""

    def __init__(self, output: Output, position: int) -> None:
        self._output = output
        self.position = position

    def take(self, timeout: float | None) -> tuple[list[Chunk], dict[str, object] | None]:
        """Wait at most ``timeout`` seconds for new chunks. Returns them, and the end event after the last chunk."""
        output = self._output
        until = None if timeout is None else time.monotonic() + timeout
        with output._changed:
            while True:
                start = self.position - output._first
                chunks = list(islice(output._chunks, start, None))
                if chunks or output.ending is not None:
                    break
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    break
                output._changed.wait(left)
            self.position += len(chunks)
            output._trim()
            output._changed.notify_all()
            return chunks, output.ending

    def close(self) -> None:
        with self._output._changed:
            self._output._followers.discard(self)
            self._output._trim()
            self._output._changed.notify_all()
