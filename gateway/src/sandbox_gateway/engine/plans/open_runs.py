"""The open runs of a gateway (plan sessions and applied runs), least recently used first."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

_MAX_ENDED_IDS = 10_000


class OpenRun(Protocol):
    """An open run.

    ``owner``: the name of an API key. ``used_at``: the time of the last request, by the event loop's clock.
    """

    id: str
    owner: str
    used_at: float


_Run = TypeVar("_Run", bound=OpenRun)


class OpenRuns(Generic[_Run]):
    """Open runs, least recently used first, and the ids of runs that have ended."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._ended_ids: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[_Run]:
        return iter(self._runs.values())

    def find(self, owner: str, id: str) -> _Run | None:
        run = self._runs.get(id)
        return run if run is not None and run.owner == owner else None

    def list_by_owner(self, owner: str) -> list[_Run]:
        return [run for run in self if run.owner == owner]

    def touch(self, run: _Run) -> _Run:
        """Mark ``run`` as the most recently used. Adds it if it is new."""
        run.used_at = asyncio.get_running_loop().time()
        self._runs.pop(run.id, None)
        self._runs[run.id] = run
        return run

    def is_idle(self, run: _Run, seconds: float) -> bool:
        """Return whether a run has not been used for ``seconds``."""
        return run.used_at <= asyncio.get_running_loop().time() - seconds

    def list_idle_runs(self, seconds: float) -> list[_Run]:
        return [run for run in self if self.is_idle(run, seconds)]

    def remove(self, run: _Run) -> None:
        del self._runs[run.id]
        self._ended_ids[run.id] = None
        if len(self._ended_ids) > _MAX_ENDED_IDS:
            del self._ended_ids[next(iter(self._ended_ids))]

    def has_ended(self, id: str) -> bool:
        """Return whether a run with this id has ended. It must not continue, because its state is lost."""
        return id in self._ended_ids


def derive_id(owner: str, run: str) -> str:
    """Return the id that all tasks of a run use to find the run. ``run``: a name that only this run uses."""
    return hashlib.sha256(f"{owner}\0{run}".encode()).hexdigest()[:32]


def find_largest_owner(amounts: Counter[str], owner: str) -> str:
    """Return the owner with the largest amount. In a tie, ``owner`` is preferred."""
    return max(amounts, key=lambda name: (amounts[name], name == owner))
