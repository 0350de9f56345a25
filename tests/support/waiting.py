"""Waiting for asynchronous changes."""

from __future__ import annotations

import time
from collections.abc import Callable

_TIMEOUT_SECONDS = 30


def wait_until(condition: Callable[[], object], seconds: float = _TIMEOUT_SECONDS) -> None:
    """Wait until ``condition()`` is true. Raises AssertionError if it is not true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not become true within {seconds} s"
        time.sleep(0.05)
