"""Take snapshots of running sandboxes.

docs/design.md ("A capture, step by step") describes the steps for virtual machines, and docs/jail_zfs.md ("A capture,
step by step") those for jails.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable

from sandbox_gateway.engine.agents import Agents
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.durations import set_memory_mode
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.engine.record_changes import save_sandbox, save_snapshot
from sandbox_gateway.engine.removal import Removal
from sandbox_gateway.engine.room import RoomMonitor
from sandbox_gateway.engine.volume_records import add_volume_snapshot
from sandbox_gateway.errors import BackendFailed, GatewayError, Invalid
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind, Volume, VolumeCapture, VolumeSnapshot

_FREEZE_SECONDS = 20
"""After this time the guest can write again, even if the gateway has not sent the request to thaw."""
_SYNC_TIMEOUT_SECONDS = 10

log = Logger("engine")


class Captures:
    def __init__(self, context: Context, locking: Locking, agents: Agents, removal: Removal, room: RoomMonitor) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._locking = locking
        self._agents = agents
        self._removal = removal
        self._room = room

    def create_snapshot_record(self, sandbox: Sandbox, kind: SnapshotKind) -> Snapshot:
        """Create the record of a snapshot that is about to be taken of ``sandbox``."""
        parent = self._index.snapshots.get(sandbox.head)
        return Snapshot(
            kind=kind,
            source_sandbox=sandbox.id,
            origin_sandbox=(parent.origin_sandbox if parent else "") or sandbox.id,
            template_id=sandbox.template_id,
            parent=sandbox.head,
            origin=(parent.origin if parent else "") or sandbox.template_id or sandbox.head,
            mounts=list(sandbox.mounts),
        )

    async def capture(
        self, sandbox: Sandbox, snapshot: Snapshot, *, memory: bool, volumes: Iterable[str] = (), fork_count: int = 0
    ) -> Snapshot:
        """Capture a sandbox. The snapshot becomes the sandbox's head, unless it is a pause snapshot.

        The parameters are those of ``capture_state``.

        On failure, the snapshot is removed, unless the sandbox stopped after the capture: then the snapshot remains,
        and the error names it.
        """
        snapshot = await self.capture_state(sandbox, snapshot, memory=memory, volumes=volumes, fork_count=fork_count)
        try:
            snapshot = await self._add_to_lineage(sandbox, snapshot)
        except BaseException:
            await self.undo(snapshot.id)
            raise
        self._context.events.publish(
            "snapshot.created", snapshotID=snapshot.id, sandboxID=sandbox.id, pauseMs=snapshot.pause_ms
        )
        if snapshot.kind is not SnapshotKind.PAUSE:
            self._context.durations.capture_listener(snapshot)
        if reason := self._host.find_end_reason(sandbox):
            raise BackendFailed(
                f"snapshot {snapshot.id} was taken and is valid, but the source sandbox stopped afterwards: "
                f"{reason}. Resume the sandbox, or use the snapshot"
            )
        return snapshot

    async def _add_to_lineage(self, sandbox: Sandbox, snapshot: Snapshot) -> Snapshot:
        head = self._index.get_sandbox(sandbox.id).head
        if head != snapshot.parent:
            # The previous head was deleted during the capture.
            snapshot = await save_snapshot(self._context, snapshot.id, parent=head)
        if snapshot.kind is not SnapshotKind.PAUSE:
            await save_sandbox(self._context, sandbox.id, head=snapshot.id)
        return snapshot

    async def restore_head(self, sandbox: Sandbox, snapshot: Snapshot) -> None:
        """Make the previous head the head of ``sandbox`` again, so that the capture ``snapshot`` can be collected."""
        previous_head = self._index.get_any_snapshot(snapshot.id).parent
        try:
            await save_sandbox(self._context, sandbox.id, required_values={"head": snapshot.id}, head=previous_head)
        except GatewayError as error:
            log.warning(
                "the previous head could not be restored",
                sandbox=sandbox.id,
                snapshot=snapshot.id,
                reason=error.message,
            )

    async def undo(self, id: str) -> None:
        """Remove a snapshot, if it was committed, after a later step of the operation has failed."""
        snapshot = self._index.snapshots.get(id)
        if snapshot is None:
            return
        try:
            await self._removal.remove_snapshot(snapshot)
        except GatewayError as error:
            log.warning("the snapshot of a failed operation could not be removed", snapshot=id, reason=error.message)

    async def capture_state(
        self, sandbox: Sandbox, snapshot: Snapshot, *, memory: bool, volumes: Iterable[str] = (), fork_count: int = 0
    ) -> Snapshot:
        """Capture a sandbox and ``volumes``. ``memory``: include the sandbox's memory, if the host supports that.

        Raises NoSpace, before anything is changed, if the host has no room for the capture, or for ``fork_count``
        machines that will be started from it.

        Does not change the sandbox's record, which need not be saved yet.
        """
        memory = memory and self._host.abilities.memory
        await self._room.require_room_for_capture(sandbox, memory=memory, fork_count=fork_count)
        async with self._locking.volumes_locked(self._require_mounted_volumes(sandbox, volumes)) as locked_volumes:
            volume_snapshots = _create_volume_snapshot_records(snapshot, locked_volumes)
            async with self._guest_flushed(sandbox, freeze=not memory and not self._host.abilities.atomic_capture):
                snapshot = await self._host.capture(sandbox, snapshot, memory=memory, volumes=volume_snapshots)
            set_memory_mode(snapshot.memory)
            for volume, volume_snapshot in zip(locked_volumes, volume_snapshots, strict=True):
                add_volume_snapshot(self._context, volume, volume_snapshot)
        self._index.put(snapshot)
        return snapshot

    def _require_mounted_volumes(self, sandbox: Sandbox, refs: Iterable[str]) -> list[str]:
        """Return the ids of the volumes in ``refs``. Raises Invalid unless ``sandbox`` mounts all of them."""
        volumes = [self._index.get_volume(ref) for ref in refs]
        for volume in volumes:
            if all(mount.volume != volume.id for mount in sandbox.mounts):
                raise Invalid(
                    f"volume {volume.name} is not mounted in sandbox {sandbox.name}: attach it first, "
                    "or take a snapshot of the volume alone"
                )
        return [volume.id for volume in volumes]

    async def _sync_guest(self, sandbox: Sandbox) -> None:
        """Make the guest write its cache to the disk, so that the captured disk is usable without the memory.

        This also makes the sandbox's disk match its new head. A guest that is too busy is captured anyway, because the
        captured memory includes the cache.
        """
        try:
            await self._agents.create_client(sandbox).sync(seconds=_SYNC_TIMEOUT_SECONDS)
        except GatewayError as error:
            log.debug("the sync before a capture failed", sandbox=sandbox.id, reason=error.message)

    @contextlib.asynccontextmanager
    async def _guest_flushed(self, sandbox: Sandbox, *, freeze: bool) -> AsyncIterator[None]:
        """Flush the guest's cache to the disk. ``freeze``: also block the guest's writes inside this context."""
        if not freeze:
            await self._sync_guest(sandbox)
            yield
            return
        agent = self._agents.create_client(sandbox)
        if not await agent.freeze(seconds=_FREEZE_SECONDS):
            raise BackendFailed("the sandbox's file system could not be frozen: take the snapshot with memory instead")
        try:
            yield
        finally:
            # By now the snapshot may be committed, and the agent thaws the file system itself after a while.
            try:
                await agent.thaw()
            except GatewayError as error:
                log.warning("thaw failed", sandbox=sandbox.id, reason=error.message)


def _create_volume_snapshot_records(snapshot: Snapshot, volumes: Iterable[Volume]) -> list[VolumeSnapshot]:
    """Create the records of the volume snapshots that are part of ``snapshot``, and add them to its record."""
    records = [
        VolumeSnapshot(name=snapshot.id, volume=each.id, size_mb=each.size_mb, sandbox_snapshot=snapshot.id)
        for each in volumes
    ]
    snapshot.volumes = [VolumeCapture(volume=each.volume, snapshot=each.id) for each in records]
    return records
