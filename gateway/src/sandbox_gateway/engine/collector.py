"""Find and remove snapshots and volumes that are no longer needed, except those that a request is using."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from sandbox_gateway.engine.backoff import Backoff
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.record_changes import save_snapshot
from sandbox_gateway.engine.references import References
from sandbox_gateway.engine.removal import Removal
from sandbox_gateway.engine.retention import Surplus
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Snapshot, VolumeSnapshot, now
from sandbox_gateway.tasks import finish_despite_cancellation

log = Logger("engine")


class Collector:
    def __init__(self, context: Context, references: References, removal: Removal) -> None:
        self._context = context
        self._index = context.index
        self._references = references
        self._removal = removal
        self._backoff = Backoff()
        """Delays the retries of failed removals, each of which writes the records of all children twice."""
        self._surplus = Surplus(context.index)

    async def retry(self) -> None:
        """Retry failed removals whose delay is over."""
        if due_ids := self._backoff.list_due_ids():
            await self.collect()
            # Objects that are still due have been removed, or are in use again.
            self._backoff.forget({*due_ids}.intersection(self._backoff.list_due_ids()))

    async def collect(self) -> None:
        """Remove what is no longer used: hidden and expired snapshots, and clones of volumes that no sandbox mounts.

        Every request that ends a use, or adds a snapshot with a retention rule, calls this before it responds, so that
        its effects do not depend on when a background task runs.
        """
        await self._collect_volumes()
        await self._collect_volume_snapshots()
        await self._collect_snapshots()
        await self.collect_expired_snapshots()
        # The first pass cannot remove a volume while one of its snapshots is in use.
        await self._collect_volumes()

    @contextlib.asynccontextmanager
    async def pinned_then_collected(self, *records: Snapshot | VolumeSnapshot) -> AsyncIterator[None]:
        """Prevent the removal of snapshots inside this context. On exit, collect those that have become unused."""
        try:
            with self._index.pinned(*records):
                yield
        finally:
            ids = {each.id if isinstance(each, Snapshot) else each.sandbox_snapshot for each in records}
            if not self._index.collectable_ids.isdisjoint(ids):
                await finish_despite_cancellation(self.collect())

    async def _collect_snapshots(self) -> None:
        for id in [each.id for each in self._index.list_grouped_snapshots(self._index.collectable_ids)]:
            # Read the record late, because removing one snapshot changes the records of other snapshots.
            snapshot = self._index.snapshots.get(id)
            if snapshot is None or not self._backoff.is_due(id) or not self._references.can_collect_snapshot(snapshot):
                continue
            await self._remove(snapshot)

    async def collect_expired_snapshots(self) -> None:
        """Remove unused snapshots that have expired, or that no retention rule keeps."""
        current_time = now()
        expired_ids = [
            id
            for id in self._index.expiring_ids
            if (self._index.snapshots[id].expires_at or current_time) <= current_time
        ]
        surplus_ids = self._surplus.find(current_time)
        for id in [*expired_ids, *surplus_ids]:
            snapshot = self._index.snapshots.get(id)
            if snapshot is None or not self._backoff.is_due(id) or self._references.find_snapshot_refusal(snapshot):
                continue
            if await self._remove(snapshot) and id in surplus_ids:
                self._context.events.publish("snapshot.pruned", snapshotID=id, sandboxID=snapshot.source_sandbox)

    async def _remove(self, snapshot: Snapshot) -> bool:
        """Remove a snapshot. If this fails, delay the next attempt, and return False."""
        try:
            await self._removal.remove_snapshot(snapshot)
        except Exception as error:
            # Even an unexpected error must not fail the request that collects, nor stop the removal of other snapshots.
            log.warning("an unused snapshot could not be removed", snapshot=snapshot.id, reason=str(error))
            self._backoff.delay(snapshot.id)
            return False
        return True

    async def _collect_volume_snapshots(self) -> None:
        """Remove unused volume snapshots that are part of captures for clones.

        The captures themselves may remain for a long time, as the heads of their source sandboxes.
        """
        for snapshot in self._index.list_grouped_snapshots(self._index.collectable_ids):
            if not self._references.can_collect_volume_snapshots(snapshot):
                continue
            try:
                for each in self._index.list_included_volume_snapshots(snapshot):
                    await finish_despite_cancellation(self._removal.remove_volume_snapshot(each))
                await save_snapshot(self._context, snapshot.id, volumes=[])
            except GatewayError as error:
                log.warning("unused volume snapshots could not be removed", snapshot=snapshot.id, reason=error.message)

    async def _collect_volumes(self) -> None:
        if self._context.unreadable_sandboxes:
            return
        for volume in list(self._index.volumes.values()):
            if not volume.owner or self._context.locks.is_held(volume.id) or not self._backoff.is_due(volume.id):
                continue
            if self._references.find_volume_refusal(volume, with_snapshots=False):
                continue
            try:
                await finish_despite_cancellation(self._removal.remove_volume(volume))
            except GatewayError as error:
                log.warning("an unused volume could not be removed", volume=volume.id, reason=error.message)
                self._backoff.delay(volume.id)
