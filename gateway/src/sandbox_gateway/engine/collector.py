"""Remove snapshots and volumes, either on request or when they become unused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from sandbox_gateway.engine.backoff import Backoff
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.record_changes import record_locked, save_sandbox, save_snapshot
from sandbox_gateway.engine.references import References, naming_external_users
from sandbox_gateway.errors import GatewayError, NotFound
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Record, Sandbox, Snapshot, Volume, VolumeSnapshot
from sandbox_gateway.tasks import finish_despite_cancellation

log = Logger("engine")


class Collector:
    def __init__(self, context: Context, references: References) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._references = references
        self._lineage_lock = asyncio.Lock()
        self._backoff = Backoff()
        """Delays the retries of failed removals, each of which writes the records of all descendants twice."""
        self._removing: dict[str, Snapshot] = {}
        """Snapshots that are still on the host but no longer in the index, with their current parents."""

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Remove an unused snapshot and its snapshots of volumes.

        Its parent becomes the parent of its descendants.
        """
        self._index.remove(snapshot.id)
        self._removing[snapshot.id] = snapshot
        await finish_despite_cancellation(self._remove_snapshot(snapshot.id))

    async def _remove_snapshot(self, id: str) -> None:
        former_records: list[Sandbox | Snapshot] = []
        parent = ""
        try:
            # Move the descendants first, so that they stay in their tree even after a crash.
            async with self._lineage_lock:
                parent = self._removing[id].parent
                former_records = await self._reparent(id, parent)
            async with record_locked(self._context, self._removing[id]):
                snapshot = self._removing[id]
                with naming_external_users(snapshot):
                    await self._host.remove_snapshot(snapshot)
        except BaseException:
            async with self._lineage_lock:
                self._index.put(self._removing.pop(id))
                await self._undo_reparent(id, parent, former_records)
            raise
        del self._removing[id]
        if not snapshot.is_hidden:
            self._context.events.publish("snapshot.deleted", snapshotID=id)
        for each in self._index.volume_snapshots_in(snapshot):
            try:
                await self.remove_volume_snapshot(each)
            except GatewayError as error:
                log.warning("a volume snapshot could not be removed", volume_snapshot=each.id, reason=error.message)

    async def _reparent(self, id: str, parent: str) -> list[Sandbox | Snapshot]:
        """Make ``parent`` the parent of the children of ``id``. Return their former records.

        A child whose record cannot be saved keeps its parent, so that a full disk does not prevent a removal.
        """
        former_records: list[Sandbox | Snapshot] = []
        attempted_ids: set[str] = set()
        # A concurrent capture can add descendants.
        while descendants := [each for each in self._descendants(id) if each.id not in attempted_ids]:
            for each in descendants:
                attempted_ids.add(each.id)
                try:
                    if isinstance(each, Sandbox):
                        await save_sandbox(self._context, each.id, only_if={"head": id}, head=parent)
                    else:
                        await save_snapshot(self._context, each.id, only_if={"parent": id}, parent=parent)
                    former_records.append(each)
                except NotFound:
                    pass  # the child was removed in the meantime
                except GatewayError as error:
                    log.warning(
                        "the new parent of a descendant could not be saved",
                        id=each.id,
                        parent=parent,
                        reason=error.message,
                    )
        for other_id, snapshot in self._removing.items():
            if snapshot.parent == id:
                self._removing[other_id] = snapshot.model_copy(update={"parent": parent})
        return former_records

    async def _undo_reparent(self, id: str, parent: str, former_records: list[Sandbox | Snapshot]) -> None:
        """Undo ``_reparent`` for children that have not changed since."""
        for each in former_records:
            with contextlib.suppress(GatewayError):
                if isinstance(each, Sandbox):
                    conditions = {"head": parent, "instance": each.instance}
                    await save_sandbox(self._context, each.id, only_if=conditions, head=id)
                else:
                    await save_snapshot(self._context, each.id, only_if={"parent": parent}, parent=id)

    def _descendants(self, id: str) -> list[Sandbox | Snapshot]:
        return [
            *(each for each in self._index.snapshots.values() if each.parent == id),
            *(each for each in self._index.sandboxes.values() if each.head == id),
        ]

    async def remove_volume_snapshot(self, snapshot: VolumeSnapshot) -> None:
        self._index.remove(snapshot.id)
        try:
            volume = self._index.volumes.get(snapshot.volume)
            with naming_external_users(snapshot, volume.name if volume else snapshot.volume):
                await self._host.remove_volume_snapshot(snapshot)
        except BaseException:
            self._index.put(snapshot)
            raise

    async def remove_volume(self, volume: Volume) -> None:
        """Remove an unused volume and its snapshots."""
        records: list[Record] = [volume, *self._index.snapshots_of(volume)]
        for record in records:
            self._index.remove(record.id)
        try:
            with naming_external_users(volume):
                await self._host.remove_volume(volume)
        except BaseException:
            for record in records:
                self._index.put(record)
            raise
        self._context.events.publish("volume.deleted", volumeID=volume.name)

    async def retry(self) -> None:
        """Retry failed removals whose wait is over."""
        if due_ids := self._backoff.list_due():
            await self.collect()
            # Objects that are still due have been removed, or are in use again.
            self._backoff.forget({*due_ids}.intersection(self._backoff.list_due()))

    async def collect(self) -> None:
        """Remove hidden snapshots without users, and clones of volumes that no sandbox mounts any more."""
        await self._collect_volumes()
        await self._collect_volume_snapshots()
        await self._collect_snapshots()
        # The first pass cannot remove a volume while one of its snapshots is in use.
        await self._collect_volumes()

    @contextlib.asynccontextmanager
    async def pinned(self, *records: Snapshot | VolumeSnapshot) -> AsyncIterator[None]:
        """Prevent the removal of snapshots inside this context. On exit, collect those that have become unused."""
        try:
            with self._index.pinned(*records):
                yield
        finally:
            ids = {each.id if isinstance(each, Snapshot) else each.sandbox_snapshot for each in records}
            if not self._index.collectable.isdisjoint(ids):
                await finish_despite_cancellation(self.collect())

    async def _collect_snapshots(self) -> None:
        for id in [each.id for each in self._index.snapshots_in(self._index.collectable)]:
            # Read the record late, because removing one snapshot changes the records of others.
            snapshot = self._index.snapshots.get(id)
            if snapshot is None or not self._backoff.is_due(id) or not self._references.can_collect(snapshot):
                continue
            try:
                await self.remove_snapshot(snapshot)
            except GatewayError as error:
                log.warning("an unused snapshot could not be removed", snapshot=snapshot.id, reason=error.message)
                self._backoff.delay(id)

    async def _collect_volume_snapshots(self) -> None:
        """Remove unused volume snapshots that are part of clone captures.

        The captures themselves may be kept for a long time, as the heads of their sources.
        """
        for snapshot in self._index.snapshots_in(self._index.collectable):
            if not self._references.can_collect_volumes(snapshot):
                continue
            try:
                for each in self._index.volume_snapshots_in(snapshot):
                    await finish_despite_cancellation(self.remove_volume_snapshot(each))
                await save_snapshot(self._context, snapshot.id, volumes=[])
            except GatewayError as error:
                log.warning("unused volume snapshots could not be removed", snapshot=snapshot.id, reason=error.message)

    async def _collect_volumes(self) -> None:
        if self._context.unreadable_sandboxes:
            return
        for volume in list(self._index.volumes.values()):
            if not volume.owner or self._context.locks.is_held(volume.id) or not self._backoff.is_due(volume.id):
                continue
            if self._references.volume_refusal(volume, with_snapshots=False):
                continue
            try:
                await finish_despite_cancellation(self.remove_volume(volume))
            except GatewayError as error:
                log.warning("an unused volume could not be removed", volume=volume.id, reason=error.message)
                self._backoff.delay(volume.id)
