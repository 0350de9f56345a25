"""Open, find and end plan sessions. Their number, size and lifetime are limited; a restart discards them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice

from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.name_claims import NameClaims
from sandbox_gateway.engine.own_changes import OwnChanges
from sandbox_gateway.engine.plans.agent import PlannedAgents
from sandbox_gateway.engine.plans.host import PlannedHost
from sandbox_gateway.engine.plans.open_runs import OpenRuns, create_token, derive_id, find_largest_owner
from sandbox_gateway.errors import Busy, Gone, NotFound, OverQuota
from sandbox_gateway.records import PLANNED_PREFIX, Snapshot, SnapshotKind, now

MAX_SESSIONS = 32
MAX_SESSIONS_PER_KEY = 16
MAX_IDS = 10_000
"""Maximum number of ids that a session creates. An object needs one or two."""
_MAX_NUMBER = 0xFFFF
"""The largest number that a planned id can end in."""
MAX_BYTES_PER_SESSION = 64 << 20
"""Maximum memory for the records that a session has saved, and the bodies of its requests.

Records still count after the session has replaced or deleted them, or undone the request that saved them.
"""
MAX_BYTES_PER_KEY = 128 << 20
MAX_BYTES = 256 << 20
IDLE_SECONDS = 900.0
"""A session ends when it has not been used for this long."""
MIN_IDLE_SECONDS = 30.0
"""If there are too many sessions, one that has not been used for this long ends to make room for a new one."""


@dataclass
class PlanSession:
    """The changes that one run would make, on this host.

    ``owner``: the name of the API key that opened it. ``home``: see ``OpenRun``.
    """

    id: str
    owner: str
    home: str = ""
    engine: Engine = field(init=False)
    opened_at: datetime = field(default_factory=now)
    used_at: float = 0.0
    """The time of the last request in this session, by the event loop's clock."""
    token: str = field(default_factory=create_token)
    id_count: int = 0
    """How many ids it has created."""
    part_id_count: int = 0
    """How many ids its parts on other hosts have created."""
    last_number: int = 0
    """The largest number that the ids of this session, or of its parts on other hosts, can end in so far."""
    allotted_numbers: Sequence[range] = ()
    """For a part: the numbers of its ids, in the order of their use."""
    size: int = 0
    """The memory that counts toward the limits, in bytes."""
    changes: OwnChanges = field(default_factory=OwnChanges)
    recent_captures: Sequence[Snapshot] = ()
    """The newest snapshots when the session was opened, from which the costs of new ones are estimated."""

    async def compute_load_change(self) -> tuple[int, int]:
        """Return how much memory the session frees on this host, in bytes, and how many sandboxes it adds.

        Both can be negative.
        """
        host = self.engine.host
        assert isinstance(host, PlannedHost)
        return await host.compute_freed_memory(), len(self.engine.index.sandboxes) - host.count_sandboxes()

    def new_id(self) -> str:
        """Return the next id of an object that exists only in this session. Raises OverQuota."""
        number = self._find_allotted_number() if self.home else self.allot_numbers(1)[0]
        self.id_count += 1
        return f"{PLANNED_PREFIX}{number:04x}"

    def _find_allotted_number(self) -> int:
        """Return the number of a part's next id."""
        index = self.id_count
        for numbers in self.allotted_numbers:
            if index < len(numbers):
                return numbers[index]
            index -= len(numbers)
        raise OverQuota(
            "the request would create more objects than a plan session can have on another host at once: split the task"
        )

    def allot_numbers(self, count: int) -> range:
        """Return numbers that only the caller may use for ids, such as a part of this session. Raises OverQuota."""
        if self.id_count + self.part_id_count >= MAX_IDS or self.last_number + count > _MAX_NUMBER:
            raise OverQuota(
                f"the plan would create more than {MAX_IDS} objects: split the play, or run parts of it with --limit"
            )
        self.last_number += count
        return range(self.last_number - count + 1, self.last_number + 1)


class PlanSessions:
    """The plan sessions of a gateway, least recently used first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sessions: OpenRuns[PlanSession] = OpenRuns()
        self._timer: asyncio.TimerHandle | None = None
        self.create_name_claims: Callable[[PlanSession], NameClaims] | None = None
        """In a fleet: returns the object with which a new session claims names on all hosts."""
        self.end_listener: Callable[[PlanSession], None] = lambda _session: None
        """Called with each session that has ended."""

    def open(self, owner: str, run: str) -> PlanSession:
        """Return the session of a run, and open it if it does not exist. ``run``: a name that only this run uses.

        All tasks of a run find their session with the same arguments. Raises Busy if there are too many sessions, and
        Gone if the session has ended.
        """
        id = derive_id(owner, run)
        self._end_idle_sessions()
        if (open_session := self._sessions.find(owner, id)) is not None and not open_session.home:
            return self._touch(open_session)
        if open_session is not None or self._sessions.has_ended(id):
            raise Gone(
                "the plan session of this run has ended, because it was idle or was closed to make room for other "
                "runs: start the check-mode run again"
            )
        return self._open(id, owner)

    def open_part(self, owner: str, id: str, home: str) -> PlanSession:
        """Return the part of another gateway's session on this host, and open it if it does not exist.

        ``home``: the token of that session. Raises Busy if there are too many sessions, and Gone if the part has ended,
        or belongs to another session of the same run.
        """
        self._end_idle_sessions()
        session = self._sessions.find(owner, id)
        if session is None and not self._sessions.has_ended(id):
            return self._open(id, owner, home)
        if session is None or session.home != home:
            raise Gone(
                "the plan session of this run has ended, or has been opened at two gateways of the fleet: start the "
                "check-mode run again"
            )
        return self._touch(session)

    def find_part(self, owner: str, id: str, home: str) -> PlanSession | None:
        """Return the part of another gateway's session, which then stays open, or None if it has ended."""
        self._end_idle_sessions()
        part = self._sessions.find_part(owner, id, home)
        return self._touch(part) if part is not None else None

    def find(self, owner: str, id: str) -> PlanSession | None:
        """Return an open session of this gateway, but not a part of another gateway's session."""
        return self._sessions.find_at_home(owner, id)

    def has_ended(self, id: str) -> bool:
        return self._sessions.has_ended(id)

    def end_part(self, owner: str, id: str, home: str) -> None:
        """End the part of another gateway's session, if it is open."""
        if (part := self.find_part(owner, id, home)) is not None:
            self._end(part)

    def _open(self, id: str, owner: str, home: str = "") -> PlanSession:
        self._make_room(owner, count=1)
        recent_captures = [*islice(self._engine.index.walk_snapshots([SnapshotKind.SNAPSHOT], backwards=True), 20)]
        session = PlanSession(id, owner, home, recent_captures=recent_captures)
        session.engine = self._copy_engine(recent_captures, lambda size: self.charge(session, size))
        if self.create_name_claims is not None:
            session.engine.use_name_claims(self.create_name_claims(session))
        return self._touch(session)

    def charge(self, session: PlanSession, size: int) -> None:
        """Count ``size`` bytes of memory for a session. Raises OverQuota, or Busy if other sessions use the memory."""
        if session.size + size > MAX_BYTES_PER_SESSION:
            raise OverQuota(
                f"the plan would take more than {MAX_BYTES_PER_SESSION >> 20} MiB of the gateway's memory: split the "
                "play, run parts of it with --limit, or shorten metadata and other long values"
            )
        self._make_room(session.owner, size=size)
        session.size += size

    def _make_room(self, owner: str, *, count: int = 0, size: int = 0) -> None:
        """End the least recently used sessions until there is room for more. Raises Busy.

        If the sessions of all keys together exceed a limit, end a session of the key that uses the most, so that a key
        with many check-mode runs does not end the sessions of other keys.
        """
        while True:
            sessions = [*self._sessions]
            owned_sessions = self._sessions.list_by_owner(owner)
            if len(owned_sessions) + count > MAX_SESSIONS_PER_KEY:
                self._end_oldest_session(owned_sessions, f"{MAX_SESSIONS_PER_KEY} plan sessions for the key {owner!r}")
            elif _sum_sizes(owned_sessions) + size > MAX_BYTES_PER_KEY:
                limit = f"{MAX_BYTES_PER_KEY >> 20} MiB for the plan sessions of the key {owner!r}"
                self._end_oldest_session(owned_sessions, limit)
            elif len(sessions) + count > MAX_SESSIONS:
                largest_owner = find_largest_owner(Counter(each.owner for each in sessions), owner)
                limit = f"{MAX_SESSIONS} plan sessions for this gateway"
                self._end_oldest_session(self._sessions.list_by_owner(largest_owner), limit)
            elif _sum_sizes(sessions) + size > MAX_BYTES:
                sizes: Counter[str] = Counter()
                for each in sessions:
                    sizes[each.owner] += each.size
                limit = f"{MAX_BYTES >> 20} MiB for the plan sessions of this gateway"
                self._end_oldest_session(self._sessions.list_by_owner(find_largest_owner(sizes, owner)), limit)
            else:
                return

    def _end_oldest_session(self, sessions: Sequence[PlanSession], limit: str) -> None:
        if not self._sessions.is_idle(sessions[0], MIN_IDLE_SECONDS):
            raise Busy(
                f"the limit of {limit} has been reached: wait until another check-mode run has finished, or end a "
                "session with DELETE /plans/{id}"
            )
        self._end(sessions[0])

    def get(self, owner: str, id: str) -> PlanSession:
        """Return a session, which stays open for another ``IDLE_SECONDS``. Raises NotFound."""
        self._end_idle_sessions()
        return self._touch(self._find(owner, id))

    def _touch(self, session: PlanSession) -> PlanSession:
        self._sessions.touch(session)
        self._schedule()
        return session

    def list(self, owner: str) -> list[PlanSession]:
        """Return the sessions of a key, without the parts of other gateways' sessions."""
        self._end_idle_sessions()
        return self._sessions.list_at_home(owner)

    async def close(self, owner: str, id: str) -> None:
        """End a session. Raises NotFound."""
        await self._end(self._find(owner, id))

    def _find(self, owner: str, id: str) -> PlanSession:
        session = self._sessions.find(owner, id)
        if session is None:
            message = (
                f"plan session {id[:80]!r} not found: it has ended, it was idle for {IDLE_SECONDS:.0f} s, or the "
                "gateway was restarted. Start the check-mode run again"
            )
            raise NotFound("plan", id[:80], message=message)
        return session

    def _copy_engine(self, recent_captures: Sequence[Snapshot], charge: Callable[[int], None]) -> Engine:
        host = PlannedHost(self._engine, recent_captures, charge)
        engine = Engine(host, self._engine.config, index=self._engine.index.copy(), agents_class=PlannedAgents)
        engine.secret.key = self._engine.secret.key
        engine.follow_fleet(self._engine)
        engine.templates.copy_builds(self._engine.templates)
        return engine

    def _schedule(self) -> None:
        """Schedule the end of the session that will be idle for too long first."""
        if self._timer is None and self._sessions:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._sessions.find_next_idle_time(IDLE_SECONDS), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._end_idle_sessions()
        self._schedule()

    def _end_idle_sessions(self) -> None:
        for session in self._sessions.list_idle_runs(IDLE_SECONDS):
            self._end(session)

    def _end(self, session: PlanSession) -> asyncio.Task[None]:
        self._sessions.remove(session)
        self.end_listener(session)
        return self._engine.background.start(session.engine.background.cancel())


def _sum_sizes(sessions: Sequence[PlanSession]) -> int:
    return sum(each.size for each in sessions)
