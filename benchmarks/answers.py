"""Record when the agent of a fork answers the request that sets the fork's identity.

A fork can be used as soon as its agent has answered, which may be before or after the engine returns.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from benchmarks.timers import Span, Timers
from sandbox_gateway.engine.agent_client import AgentClient

_TIMEOUT_SECONDS = 60.0


class Answers:
    """The answers of agents to requests that set an identity: ``with recording_answers() as answers: …``"""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers

    def forget(self) -> None:
        """Forget all answers recorded so far."""
        self._timers.take()

    def wait(self, count: int) -> list[Span]:
        """Wait until ``count`` requests have been answered since ``forget``. Return them in the order of the answers.

        After a timeout, returns only the requests that have been answered.
        """
        deadline = time.perf_counter() + _TIMEOUT_SECONDS
        while len(exchanges := self._find_answered_exchanges()) < count and time.perf_counter() < deadline:
            time.sleep(0.0005)
        return sorted(exchanges, key=lambda span: span.end)

    def _find_answered_exchanges(self) -> list[Span]:
        return self._timers.find_completed_calls("line") + self._timers.find_completed_calls("exchange", "/identity")


@contextlib.contextmanager
def recording_answers() -> Iterator[Answers]:
    """Record the answers of all agents inside this context."""
    timers = Timers()
    with timers.recording({"exchange": (AgentClient, "_exchange"), "line": (AgentClient, "_send_over_line")}):
        if timers.missing_functions:
            raise RuntimeError(
                f"{timers.missing_functions[0]} no longer exists: adapt benchmarks/answers.py to its replacement"
            )
        yield Answers(timers)
