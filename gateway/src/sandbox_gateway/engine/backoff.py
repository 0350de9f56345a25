"""Exponential backoff for work that fails repeatedly on the same object."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable

_FIRST_DELAY_SECONDS = 1.0
_MAX_DELAY_SECONDS = 60.0


class Backoff:
    """The delays before work on objects is retried. Each failure doubles an object's delay, up to a minute."""

    def __init__(self) -> None:
        self._delays: dict[str, tuple[float, float]] = {}
        """By id: the delay in seconds, and the monotonic time when it ends."""

    def is_due(self, id: str) -> bool:
        return id not in self._delays or self._delays[id][1] <= time.monotonic()

    def delay(self, id: str) -> None:
        """Delay the next attempt on an object after a failed one."""
        seconds = min(2 * self._delays[id][0], _MAX_DELAY_SECONDS) if id in self._delays else _FIRST_DELAY_SECONDS
        self._delays[id] = seconds, time.monotonic() + seconds

    def list_due_ids(self) -> list[str]:
        """Return the ids of the objects whose delay is over."""
        return [id for id in self._delays if self.is_due(id)]

    def retain_only(self, ids: Container[str]) -> None:
        """Forget all objects except those in ``ids``."""
        self.forget([each for each in self._delays if each not in ids])

    def forget(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._delays.pop(id, None)
