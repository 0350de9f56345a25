"""Waits for asynchronous changes."""

from __future__ import annotations

import time
from collections.abc import Callable

_SECONDS = 30


def eventually(what: Callable[[], object], seconds: float = _SECONDS) -> None:
    """Raises AssertionError unless ``what()`` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)
