"""The runs that apply a plan. Their requests act on the host, but see generations without the run's own changes."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sandbox_gateway.engine.own_changes import OwnChanges
from sandbox_gateway.errors import Busy, Gone
from sandbox_gateway.records import now

MAX_RUNS = 1024
MAX_RUNS_PER_KEY = 256
IDLE_SECONDS = 86400.0
"""A run ends when it has not sent a request for this long. A play may wait for hours."""
MIN_IDLE_SECONDS = 900.0
"""If there are too many runs, one that has not sent a request for this long ends to make place for a new one."""
_MAX_ENDED_IDS = 10_000
_REMEDY = "Make a new plan with a check run"


@dataclass
class AppliedRun:
    """A run that applies a plan. ``owner``: the name of its API key."""

    id: str
    owner: str
    opened_at: datetime = field(default_factory=now)
    used_at: float = 0.0
    """The time of the run's last request, by the event loop's clock."""
    changes: OwnChanges = field(default_factory=OwnChanges)


class AppliedRuns:
    """The applied runs of a gateway, oldest use first. Their number is limited, and they are lost with the gateway."""

    def __init__(self) -> None:
        self._runs: dict[str, AppliedRun] = {}
        self._ended_ids: dict[str, None] = {}
        """Ids of runs that have ended. They must not continue, because their own changes are no longer known."""

    def open(self, owner: str, name: str) -> AppliedRun:
        """Return the run with this name, and open it if it does not exist. ``name``: only this run uses it.

        Raises Busy if there are too many runs, and Gone if the run has ended.
        """
        id = hashlib.sha256(f"{owner}\0{name}".encode()).hexdigest()[:32]
        self._end_idle()
        if id not in self._runs:
            if id in self._ended_ids:
                raise Gone(
                    f"this run has ended for the gateway, because it sent no request for a long time: {_REMEDY.lower()}"
                )
            self._make_place(owner)
            self._runs[id] = AppliedRun(id, owner)
        return self._touch(self._runs[id])

    def get(self, owner: str, id: str) -> AppliedRun:
        """Return a run, which stays open for another ``IDLE_SECONDS``. Raises Gone."""
        self._end_idle()
        return self._touch(self._find(owner, id))

    def list(self, owner: str) -> list[AppliedRun]:
        self._end_idle()
        return [each for each in self._runs.values() if each.owner == owner]

    def close(self, owner: str, id: str) -> None:
        """End a run. Raises Gone."""
        self._end(self._find(owner, id))

    def _find(self, owner: str, id: str) -> AppliedRun:
        run = self._runs.get(id)
        if run is None or run.owner != owner:
            # Not NotFound, which would say that the requested object does not exist.
            raise Gone(
                f"applied run {id[:80]!r} not found: it ended, sent no request for a long time, or the gateway was "
                f"restarted. {_REMEDY}"
            )
        return run

    def _touch(self, run: AppliedRun) -> AppliedRun:
        run.used_at = asyncio.get_running_loop().time()
        self._runs[run.id] = self._runs.pop(run.id)
        return run

    def _make_place(self, owner: str) -> None:
        """End a run if no other can be opened: the oldest of its key, or of the key with the most runs. Raises Busy."""
        counts = Counter(each.owner for each in self._runs.values())
        if counts[owner] >= MAX_RUNS_PER_KEY:
            self._end_oldest(owner, f"{MAX_RUNS_PER_KEY} applied runs for the key {owner!r}")
        elif len(self._runs) >= MAX_RUNS:
            largest_owner = max(counts, key=lambda name: (counts[name], name == owner))
            self._end_oldest(largest_owner, f"{MAX_RUNS} applied runs for this gateway")

    def _end_oldest(self, owner: str, limit: str) -> None:
        oldest: AppliedRun = next(each for each in self._runs.values() if each.owner == owner)
        if oldest.used_at > asyncio.get_running_loop().time() - MIN_IDLE_SECONDS:
            raise Busy(
                f"the limit of {limit} has been reached: wait until another run has ended, or end one with "
                "DELETE /applied-runs/{id}"
            )
        self._end(oldest)

    def _end_idle(self) -> None:
        deadline = asyncio.get_running_loop().time() - IDLE_SECONDS
        ended_runs: Sequence[AppliedRun] = [each for each in self._runs.values() if each.used_at <= deadline]
        for run in ended_runs:
            self._end(run)

    def _end(self, run: AppliedRun) -> None:
        del self._runs[run.id]
        self._ended_ids[run.id] = None
        if len(self._ended_ids) > _MAX_ENDED_IDS:
            del self._ended_ids[next(iter(self._ended_ids))]
