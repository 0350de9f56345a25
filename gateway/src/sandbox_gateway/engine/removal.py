"""Remove snapshots and volumes. The callers check first that they are unused. A removal that fails is undone.

Before a snapshot is removed, its descendants get its parent as theirs.
"""

from __future__ import annotations

import asyncio
import contextlib

from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.in_use import external_users_named
from sandbox_gateway.engine.record_changes import record_locked, save_sandbox, save_snapshot
from sandbox_gateway.errors import GatewayError, NotFound
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Record, Sandbox, Snapshot, Volume, VolumeSnapshot
from sandbox_gateway.tasks import finish_despite_cancellation

log = Logger("engine")


class Removal:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._lineage_lock = asyncio.Lock()
        self._snapshots_being_removed: dict[str, Snapshot] = {}
        """Snapshots that are still on the host but no longer in the index, with their current parents."""

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Remove an unused snapshot and the volume snapshots that are part of it.

        The children of the snapshot become children of its parent.
        """
        self._index.remove(snapshot.id)
        self._snapshots_being_removed[snapshot.id] = snapshot
        await finish_despite_cancellation(self._remove_snapshot(snapshot.id))

    async def _remove_snapshot(self, id: str) -> None:
        old_records: list[Sandbox | Snapshot] = []
        parent = ""
        try:
            # Move the children first, so that they stay in their tree even after a crash.
            async with self._lineage_lock:
                parent = self._snapshots_being_removed[id].parent
                old_records = await self._reparent(id, parent)
            async with record_locked(self._context, self._snapshots_being_removed[id]):
                snapshot = self._snapshots_being_removed[id]
                with external_users_named(snapshot):
                    await self._host.remove_snapshot(snapshot)
        except BaseException:
            async with self._lineage_lock:
                self._index.put(self._snapshots_being_removed.pop(id))
                await self._undo_reparent(id, parent, old_records)
            raise
        del self._snapshots_being_removed[id]
        if not snapshot.is_hidden:
            self._context.events.publish("snapshot.deleted", snapshotID=id)
        for each in self._index.list_included_volume_snapshots(snapshot):
            try:
                await self.remove_volume_snapshot(each)
            except GatewayError as error:
                log.warning("a volume snapshot could not be removed", volume_snapshot=each.id, reason=error.message)

    async def _reparent(self, id: str, parent: str) -> list[Sandbox | Snapshot]:
        """Make ``parent`` the parent of the children of ``id``, and return their old records.

        A child whose record cannot be saved keeps its parent, so that a full disk does not prevent a removal. The
        children's generations do not increase, because their contents stay the same.
        """
        old_records: list[Sandbox | Snapshot] = []
        attempted_ids: set[str] = set()
        # A concurrent capture can add children.
        while children := [each for each in self._find_children(id) if each.id not in attempted_ids]:
            for each in children:
                attempted_ids.add(each.id)
                try:
                    if isinstance(each, Sandbox):
                        await save_sandbox(
                            self._context, each.id, required_values={"head": id}, counts_as_change=False, head=parent
                        )
                    else:
                        await save_snapshot(
                            self._context,
                            each.id,
                            required_values={"parent": id},
                            counts_as_change=False,
                            parent=parent,
                        )
                    old_records.append(each)
                except NotFound:
                    pass  # the child was removed in the meantime
                except GatewayError as error:
                    log.warning(
                        "the new parent of a child could not be saved",
                        id=each.id,
                        parent=parent,
                        reason=error.message,
                    )
        for other_id, snapshot in self._snapshots_being_removed.items():
            if snapshot.parent == id:
                self._snapshots_being_removed[other_id] = snapshot.model_copy(update={"parent": parent})
        return old_records

    async def _undo_reparent(self, id: str, parent: str, old_records: list[Sandbox | Snapshot]) -> None:
        """Undo ``_reparent`` for children that have not changed since."""
        for each in old_records:
            with contextlib.suppress(GatewayError):
                if isinstance(each, Sandbox):
                    conditions = {"head": parent, "instance": each.instance}
                    await save_sandbox(
                        self._context, each.id, required_values=conditions, counts_as_change=False, head=id
                    )
                else:
                    await save_snapshot(
                        self._context, each.id, required_values={"parent": parent}, counts_as_change=False, parent=id
                    )

    def _find_children(self, id: str) -> list[Sandbox | Snapshot]:
        return [
            *(each for each in self._index.snapshots.values() if each.parent == id),
            *(each for each in self._index.sandboxes.values() if each.head == id),
        ]

    async def remove_volume_snapshot(self, snapshot: VolumeSnapshot) -> None:
        self._index.remove(snapshot.id)
        try:
            volume = self._index.volumes.get(snapshot.volume)
            with external_users_named(snapshot, volume.name if volume else snapshot.volume):
                await self._host.remove_volume_snapshot(snapshot)
        except BaseException:
            self._index.put(snapshot)
            raise

    async def remove_volume(self, volume: Volume) -> None:
        """Remove an unused volume and its snapshots."""
        records: list[Record] = [volume, *self._index.list_volume_snapshots(volume)]
        for record in records:
            self._index.remove(record.id)
        try:
            with external_users_named(volume):
                await self._host.remove_volume(volume)
        except BaseException:
            for record in records:
                self._index.put(record)
            raise
        self._context.events.publish("volume.deleted", volumeID=volume.name)
