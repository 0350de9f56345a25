"""Record when the agent of a fork answers the request that sets its identity.

A fork can be used as soon as its agent has answered, which may be before or after the engine returns.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from benchmarks.timers import Span, Timers
from sandbox_gateway.engine.agent_client import AgentClient

_SECONDS = 60.0


class Answers:
    """``with watching() as answers: …`` records every answer of an agent to the identity exchange."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers

    def forget(self) -> None:
        self._timers.take()

    def wait(self, count: int) -> list[Span]:
        """Return the exchanges that agents have answered since ``forget``, in the order in which they ended.

        Waits until there are ``count`` exchanges. Returns fewer after a timeout.
        """
        deadline = time.perf_counter() + _SECONDS
        while len(found := self._answered_exchanges()) < count and time.perf_counter() < deadline:
            time.sleep(0.0005)
        return sorted(found, key=lambda span: span.end)

    def _answered_exchanges(self) -> list[Span]:
        return self._timers.returned("line") + self._timers.returned("exchange", "/identity")


@contextlib.contextmanager
def watching() -> Iterator[Answers]:
    timers = Timers()
    with timers.watching({"exchange": (AgentClient, "_exchange"), "line": (AgentClient, "_send_over_line")}):
        if timers.missing:
            raise RuntimeError(
                f"{timers.missing[0]} does not exist any more: adapt benchmarks/answers.py to its replacement"
            )
        yield Answers(timers)
