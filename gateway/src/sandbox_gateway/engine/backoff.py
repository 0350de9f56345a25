"""Exponential backoff for work that fails repeatedly on the same object."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable

_FIRST_DELAY_SECONDS = 1.0
_MAX_DELAY_SECONDS = 60.0


class Backoff:
    """Tracks when to retry each object. Each failure doubles the wait, up to a minute."""

    def __init__(self) -> None:
        self._waits: dict[str, tuple[float, float]] = {}
        """By id: the wait in seconds, and the monotonic time when it is over."""

    def is_due(self, id: str) -> bool:
        return id not in self._waits or self._waits[id][1] <= time.monotonic()

    def delay(self, id: str) -> None:
        """Delay the next attempt after a failed one."""
        seconds = min(2 * self._waits[id][0], _MAX_DELAY_SECONDS) if id in self._waits else _FIRST_DELAY_SECONDS
        self._waits[id] = seconds, time.monotonic() + seconds

    def list_due(self) -> list[str]:
        """Return the ids of the objects whose wait is over."""
        return [id for id in self._waits if self.is_due(id)]

    def retain_only(self, ids: Container[str]) -> None:
        """Forget all objects except ``ids``."""
        self.forget([each for each in self._waits if each not in ids])

    def forget(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._waits.pop(id, None)
