"""Stream the output of a process to its followers, and keep the tail for later followers."""

from __future__ import annotations

import threading
import time
from collections import deque
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    Chunk = tuple[str, bytes]

TAIL_BYTES = 256 << 10
"""Number of bytes to keep for later followers."""
WINDOW_BYTES = 1 << 20
"""Number of bytes by which the slowest follower may lag before the process is blocked."""
_OVERHEAD_BYTES = 100


class Output:
    """A queue of chunks ``(kind, data)``, followed by the end event.

    The slowest follower limits the speed of the process. Without followers, the process is never blocked.
    """

    def __init__(self) -> None:
        self._change_condition = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._size = 0
        self._first_position = 0
        self._followers: set[Follower] = set()
        self.end_event: dict[str, object] | None = None

    def wait_for_room(self, timeout: float | None) -> bool:
        """Wait until there is room for more output. Returns False if there is none after ``timeout`` seconds."""
        with self._change_condition:
            return self._change_condition.wait_for(self._has_room, timeout)

    def put(self, kind: str, data: bytes) -> None:
        with self._change_condition:
            self._chunks.append((kind, data))
            self._size += len(data) + _OVERHEAD_BYTES
            self._trim()
            self._change_condition.notify_all()

    def end(self, end_event: dict[str, object]) -> None:
        with self._change_condition:
            self.end_event = end_event
            self._change_condition.notify_all()

    def follow(self) -> Follower:
        """Return a new follower, which starts at the beginning of the tail."""
        with self._change_condition:
            follower = Follower(self, self._first_position)
            self._followers.add(follower)
            return follower

    def _has_room(self) -> bool:
        self._trim()
        return self._size <= WINDOW_BYTES

    def _trim(self) -> None:
        first_needed_position = min(
            (follower.position for follower in self._followers), default=self._first_position + len(self._chunks)
        )
        while self._size > TAIL_BYTES and self._first_position < first_needed_position:
            self._size -= len(self._chunks.popleft()[1]) + _OVERHEAD_BYTES
            self._first_position += 1


class Follower:
    """A reader of an Output. Callers must close it."""

    def __init__(self, output: Output, position: int) -> None:
        self._output = output
        self.position = position

    def take(self, timeout: float | None) -> tuple[list[Chunk], dict[str, object] | None]:
        """Wait at most ``timeout`` seconds for new chunks. Returns them, and the end event if they are the last."""
        output = self._output
        deadline = None if timeout is None else time.monotonic() + timeout
        with output._change_condition:
            while True:
                start = self.position - output._first_position
                chunks = list(islice(output._chunks, start, None))
                if chunks or output.end_event is not None:
                    break
                remaining_seconds = None if deadline is None else deadline - time.monotonic()
                if remaining_seconds is not None and remaining_seconds <= 0:
                    break
                output._change_condition.wait(remaining_seconds)
            self.position += len(chunks)
            output._trim()
            output._change_condition.notify_all()
            return chunks, output.end_event

    def close(self) -> None:
        with self._output._change_condition:
            self._output._followers.discard(self)
            self._output._trim()
            self._output._change_condition.notify_all()
