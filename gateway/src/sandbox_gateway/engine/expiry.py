"""Apply sandbox timeouts, snapshot expiry times and retention rules."""

from __future__ import annotations

import asyncio
from datetime import datetime

from sandbox_gateway.engine.backoff import Backoff
from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.index import Index
from sandbox_gateway.engine.references import References
from sandbox_gateway.engine.retention import find_next_change, find_surplus
from sandbox_gateway.engine.sandboxes import Sandboxes
from sandbox_gateway.engine.snapshots import Snapshots
from sandbox_gateway.engine.timeouts import has_expired
from sandbox_gateway.errors import GatewayError, NotFound
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Snapshot, now

_CHECK_INTERVAL_SECONDS = 0.25

log = Logger("engine")


class Expiry:
    def __init__(
        self,
        context: Context,
        references: References,
        collector: Collector,
        snapshots: Snapshots,
        sandboxes: Sandboxes,
    ) -> None:
        self._index = context.index
        self._events = context.events
        self._background = context.background
        self._references = references
        self._collector = collector
        self._snapshots = snapshots
        self._sandboxes = sandboxes
        self._backoff = Backoff()
        self._surplus = _SurplusCache(context.index)
        self._expiring_ids: set[str] = set()
        """Ids of the sandboxes that are being paused or deleted, or whose lock is awaited."""

    async def watch(self) -> None:
        """Expire objects, checking every quarter of a second. Never returns."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_SECONDS)
            try:
                await self._check(now())
            except Exception as error:
                _log_failure(error)

    async def _check(self, at: datetime) -> None:
        self._backoff.retain_only(self._index)
        self._expire_sandboxes(at)
        await self._expire_snapshots(at)
        await self._collector.retry()

    def _expire_sandboxes(self, at: datetime) -> None:
        """Expire sandboxes in background tasks, so that a busy sandbox does not delay the others."""
        for sandbox in self._index.sandboxes.values():
            if has_expired(sandbox, at) and sandbox.id not in self._expiring_ids and self._backoff.is_due(sandbox.id):
                self._expiring_ids.add(sandbox.id)
                self._background.start(self._expire_sandbox(sandbox.id))

    async def _expire_sandbox(self, id: str) -> None:
        try:
            await self._sandboxes.expire(id)
        except NotFound:
            pass
        except Exception as error:
            _log_failure(error, sandbox=id)
            self._backoff.delay(id)
        finally:
            self._expiring_ids.discard(id)

    async def _expire_snapshots(self, at: datetime) -> None:
        for snapshot in self._index.snapshots_in(self._index.expiring):
            if snapshot.expires_at and snapshot.expires_at <= at:
                await self._expire_snapshot(snapshot)
        for snapshot in self._surplus.find(at):
            if await self._expire_snapshot(snapshot):
                self._events.publish("snapshot.pruned", snapshotID=snapshot.id, sandboxID=snapshot.source_sandbox)

    async def _expire_snapshot(self, snapshot: Snapshot) -> bool:
        """Remove an expired snapshot, unless it is in use or the last attempt failed recently.

        Returns whether the snapshot was removed.
        """
        if self._references.users_of(snapshot).blockers or not self._backoff.is_due(snapshot.id):
            return False
        try:
            return await self._snapshots.delete(snapshot.id)
        except Exception as error:
            _log_failure(error, snapshot=snapshot.id)
            self._backoff.delay(snapshot.id)
            return False


class _SurplusCache:
    """A cache of the snapshots that no retention rule keeps. Recomputed only when the result may have changed."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._version = -1
        self._snapshots: list[Snapshot] = []
        self._valid_until: datetime | None = None

    def find(self, at: datetime) -> list[Snapshot]:
        is_outdated = self._valid_until is not None and at >= self._valid_until
        if is_outdated or self._version != self._index.retained_version:
            retained_snapshots = self._index.snapshots_in(self._index.retained)
            self._snapshots = find_surplus(retained_snapshots, at)
            self._valid_until = find_next_change(retained_snapshots, at)
            self._version = self._index.retained_version
        return self._snapshots


def _log_failure(error: Exception, **fields: str) -> None:
    """Log a failure to expire an object. Other objects still expire."""
    if isinstance(error, GatewayError):
        log.warning("expiry failed", reason=error.message, **fields)
    else:
        log.error("expiry failed", exc_info=True, **fields)
