"""The runs that apply a plan. Their requests act on the host, but see generations without the run's own changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from sandbox_gateway.engine.own_changes import OwnChanges
from sandbox_gateway.engine.plans.open_runs import OpenRuns, create_token, derive_id, find_largest_owner
from sandbox_gateway.errors import Busy, Gone
from sandbox_gateway.records import now

MAX_RUNS = 1024
MAX_RUNS_PER_KEY = 256
IDLE_SECONDS = 86400.0
"""A run ends when it has not sent a request for this long. A play may wait for hours."""
MIN_IDLE_SECONDS = 900.0
"""If there are too many runs, one that has not sent a request for this long ends to make room for a new one."""
_REMEDY = "Make a new plan with a check-mode run"


@dataclass
class AppliedRun:
    """The changes on this host by a run that applies a plan.

    ``owner``: the name of its API key. ``home``: see ``OpenRun``.
    """

    id: str
    owner: str
    home: str = ""
    opened_at: datetime = field(default_factory=now)
    used_at: float = 0.0
    """The time of the run's last request, by the event loop's clock."""
    token: str = field(default_factory=create_token)
    changes: OwnChanges = field(default_factory=OwnChanges)


class AppliedRuns:
    """The applied runs of a gateway, least recently used first. Their number is limited; a restart discards them."""

    def __init__(self) -> None:
        self._runs: OpenRuns[AppliedRun] = OpenRuns()
        self.end_listener: Callable[[AppliedRun], None] = lambda _run: None
        """Called with each run that has ended."""

    def open(self, owner: str, name: str) -> AppliedRun:
        """Return the run with this name, and open it if it does not exist. ``name``: a name that only this run uses.

        Raises Busy if there are too many runs, and Gone if the run has ended.
        """
        id = derive_id(owner, name)
        self._end_idle_runs()
        run = self._runs.find(owner, id)
        if run is None or run.home:
            if run is not None or self._runs.has_ended(id):
                raise Gone(
                    f"the gateway has discarded this run, because it sent no request for a long time: {_REMEDY.lower()}"
                )
            self._make_room(owner)
            run = AppliedRun(id, owner)
        return self._runs.touch(run)

    def get(self, owner: str, id: str) -> AppliedRun:
        """Return a run, which stays open for another ``IDLE_SECONDS``. Raises Gone."""
        self._end_idle_runs()
        return self._runs.touch(self._find(owner, id))

    def open_part(self, owner: str, id: str, home: str) -> AppliedRun:
        """Return the part of another gateway's run on this host, and open it if it does not exist.

        ``home``: the token of that run. Raises Busy if there are too many runs, and Gone if the part has ended, or
        belongs to another run with this name.
        """
        self._end_idle_runs()
        run = self._runs.find(owner, id)
        if run is None and not self._runs.has_ended(id):
            self._make_room(owner)
            run = AppliedRun(id, owner, home)
        if run is None or run.home != home:
            raise Gone(f"the run has ended, or has been opened at two gateways of the fleet. {_REMEDY}")
        return self._runs.touch(run)

    def find_part(self, owner: str, id: str, home: str) -> AppliedRun | None:
        """Return the part of another gateway's run, which then stays open, or None if it has ended."""
        self._end_idle_runs()
        part = self._runs.find_part(owner, id, home)
        return self._runs.touch(part) if part is not None else None

    def find(self, owner: str, id: str) -> AppliedRun | None:
        """Return an open run of this gateway, but not a part of another gateway's run."""
        return self._runs.find_at_home(owner, id)

    def has_ended(self, id: str) -> bool:
        return self._runs.has_ended(id)

    def end_part(self, owner: str, id: str, home: str) -> None:
        """End the part of another gateway's run, if it is open."""
        if (part := self.find_part(owner, id, home)) is not None:
            self._end(part)

    def list(self, owner: str) -> list[AppliedRun]:
        """Return the runs of a key, without the parts of other gateways' runs."""
        self._end_idle_runs()
        return self._runs.list_at_home(owner)

    def close(self, owner: str, id: str) -> None:
        """End a run. Raises Gone."""
        self._end(self._find(owner, id))

    def _end(self, run: AppliedRun) -> None:
        self._runs.remove(run)
        self.end_listener(run)

    def _find(self, owner: str, id: str) -> AppliedRun:
        run = self._runs.find(owner, id)
        if run is None:
            # Not NotFound, which would say that the requested object does not exist.
            raise Gone(
                f"applied run {id[:80]!r} not found: it has ended, it sent no request for a long time, or the gateway "
                f"was restarted. {_REMEDY}"
            )
        return run

    def _make_room(self, owner: str) -> None:
        """At a limit, end the least recently used run of ``owner``, or of the key with the most runs. Raises Busy."""
        counts = Counter(each.owner for each in self._runs)
        if counts[owner] >= MAX_RUNS_PER_KEY:
            self._end_oldest_run(owner, f"{MAX_RUNS_PER_KEY} applied runs for the key {owner!r}")
        elif len(self._runs) >= MAX_RUNS:
            self._end_oldest_run(find_largest_owner(counts, owner), f"{MAX_RUNS} applied runs for this gateway")

    def _end_oldest_run(self, owner: str, limit: str) -> None:
        oldest_run = self._runs.list_by_owner(owner)[0]
        if not self._runs.is_idle(oldest_run, MIN_IDLE_SECONDS):
            raise Busy(
                f"the limit of {limit} has been reached: wait until another run has finished, or end one with "
                "DELETE /applied-runs/{id}"
            )
        self._end(oldest_run)

    def _end_idle_runs(self) -> None:
        for run in self._runs.list_idle_runs(IDLE_SECONDS):
            self._end(run)
