"""When a fork's agent has answered, by the exchange in which it learns who it is.

What the engine returns, and when, is its own affair and may change; that the agent itself has spoken is what counts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from benchmarks.timers import Span, Timers
from sandbox_gateway.engine.agent import AgentClient

_SECONDS = 60.0


class Answers:
    """``with watching() as answers: …`` sees every answer of an agent to who it is."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers

    def forget(self) -> None:
        self._timers.take()

    def wait(self, count: int) -> list[Span]:
        """What was said with the agents that have answered since ``forget``, in the order in which it ended.

        Returns once there are ``count``; with fewer when the time is up.
        """
        deadline = time.perf_counter() + _SECONDS
        while len(found := self._answered()) < count and time.perf_counter() < deadline:
            time.sleep(0.0005)
        return sorted(found, key=lambda span: span.end)

    def _answered(self) -> list[Span]:
        return self._timers.returned("line") + self._timers.returned("exchange", "/identity")


@contextlib.contextmanager
def watching() -> Iterator[Answers]:
    timers = Timers()
    with timers.watching({"exchange": (AgentClient, "_exchange"), "line": (AgentClient, "_tell")}):
        if timers.missing:
            raise RuntimeError(f"{timers.missing[0]} is gone: benchmarks/answers.py must know what took its place")
        yield Answers(timers)
