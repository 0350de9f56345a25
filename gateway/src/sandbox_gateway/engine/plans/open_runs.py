"""The open runs of a gateway (plan sessions and applied runs), least recently used first."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

_MAX_ENDED_IDS = 10_000
_PART_FACTOR = 2
"""A part of a run may be idle for longer than the run itself, whose requests reach the part only now and then."""


class OpenRun(Protocol):
    """An open run, or the part of a run that another gateway of a fleet needs on this host.

    ``owner``: the name of an API key. ``used_at``: the time of the last request, by the event loop's clock.
    ``token``: distinguishes it from other runs with the same id. ``home``: for a part, the token of its run; otherwise
    empty.
    """

    id: str
    owner: str
    used_at: float
    token: str
    home: str


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

    def find_at_home(self, owner: str, id: str) -> _Run | None:
        """Return an open run of this gateway, but not a part of another gateway's run."""
        run = self.find(owner, id)
        return run if run is not None and not run.home else None

    def find_part(self, owner: str, id: str, home: str) -> _Run | None:
        """Return the part of the run with the token ``home`` of another gateway."""
        run = self.find(owner, id)
        return run if run is not None and run.home == home else None

    def list_by_owner(self, owner: str) -> list[_Run]:
        return [run for run in self if run.owner == owner]

    def list_at_home(self, owner: str) -> list[_Run]:
        """Return the runs of an owner, without the parts of other gateways' runs."""
        return [run for run in self.list_by_owner(owner) if not run.home]

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
        """Return the runs that have not been used for ``seconds``, or for ``_PART_FACTOR`` times as long as a part."""
        return [run for run in self if self.is_idle(run, seconds * (_PART_FACTOR if run.home else 1))]

    def find_next_idle_time(self, seconds: float) -> float:
        """Return when the next run will be in ``list_idle_runs``. There must be at least one run."""
        return min(run.used_at + seconds * (_PART_FACTOR if run.home else 1) for run in self)

    def remove(self, run: _Run) -> None:
        del self._runs[run.id]
        self._ended_ids[run.id] = None
        if len(self._ended_ids) > _MAX_ENDED_IDS:
            del self._ended_ids[next(iter(self._ended_ids))]

    def has_ended(self, id: str) -> bool:
        """Return whether a run with this id has ended. It must not continue, because its state is lost."""
        return id in self._ended_ids


def create_token() -> str:
    """Return the token of a new run."""
    return secrets.token_hex(8)


def derive_id(owner: str, run: str) -> str:
    """Return the id that all tasks of a run use to find the run. ``run``: a name that only this run uses."""
    return hashlib.sha256(f"{owner}\0{run}".encode()).hexdigest()[:32]


def find_largest_owner(amounts: Counter[str], owner: str) -> str:
    """Return the owner with the largest amount. In a tie, ``owner`` is preferred."""
    return max(amounts, key=lambda name: (amounts[name], name == owner))
