"""Operations on volumes (storage that outlives sandboxes) and on their snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.durations import measured
from sandbox_gateway.engine.index import sort_oldest_first
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.engine.name_claims import NameClaim
from sandbox_gateway.engine.names import require_valid_name
from sandbox_gateway.engine.record_changes import copy_with_changes
from sandbox_gateway.engine.references import References
from sandbox_gateway.engine.removal import Removal
from sandbox_gateway.engine.volume_records import add_volume_snapshot, create_volume
from sandbox_gateway.errors import Invalid, NameTaken
from sandbox_gateway.hosts.base import VolumeState
from sandbox_gateway.records import Mount, Sandbox, Volume, VolumeSnapshot, new_id
from sandbox_gateway.tasks import finish_despite_cancellation

_DEFAULT_SIZE_MB = 1024
_MIN_SIZE_MB = 64
_MAX_SIZE_MB = 1 << 26


class Volumes:
    """Operations on volumes."""

    def __init__(
        self, context: Context, locking: Locking, references: References, collector: Collector, removal: Removal
    ) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._events = context.events
        self._locking = locking
        self._references = references
        self._collector = collector
        self._removal = removal

    def get(self, ref: str) -> Volume:
        return self._index.get_volume(ref)

    def list(self) -> Sequence[Volume]:
        return sort_oldest_first(self._index.volumes.values())

    def list_mounts(self, volume: Volume) -> Sequence[tuple[Sandbox, Mount]]:
        """Return the mounts of a volume, each with the running or paused sandbox that mounts it."""
        return self._index.list_mounts(volume)

    async def get_state(self, ref: str) -> VolumeState:
        return await self._host.read_volume_state(self.get(ref))

    @measured("volume.create")
    async def create(self, name: str, size_mb: int | None = None, from_snapshot: str | None = None) -> Volume:
        """Create an empty volume, or a volume from a snapshot ("VOLUME@SNAPSHOT", or the snapshot's id).

        The default size is the size of the snapshot, or 1024 MiB.
        """
        source = self._find_source(from_snapshot) if from_snapshot else None
        if size_mb is None:
            size_mb = source.size_mb if source else _DEFAULT_SIZE_MB
        _check_size(size_mb)
        if source and size_mb < source.size_mb:
            raise Invalid(
                f"the size of {size_mb} MiB is less than the {source.size_mb} MiB of snapshot {source.id}: "
                f"request at least {source.size_mb} MiB"
            )
        name = require_valid_name(name)
        volume = Volume(name=name, size_mb=size_mb, from_snapshot=source.id if source else "")
        async with self._collector.pinned_then_collected(*([source] if source else [])):
            with self._index.reserved([name]):
                async with self._context.name_claims.held([NameClaim(volume, [name])]):
                    return await finish_despite_cancellation(create_volume(self._context, volume, source))

    @measured("volume.grow")
    async def grow(self, ref: str, size_mb: int) -> Volume:
        """Enlarge a volume. Sandboxes that mount it see the new size immediately. A volume never shrinks."""
        async with self._locked(ref) as volume:
            _check_size(size_mb)
            if size_mb < volume.size_mb:
                raise Invalid(
                    f"volume {volume.name} has a size of {volume.size_mb} MiB and cannot shrink to {size_mb} MiB: "
                    "request a larger size"
                )
            if size_mb > volume.size_mb:
                volume = await finish_despite_cancellation(self._grow(volume, size_mb))
            return volume

    async def _grow(self, volume: Volume, size_mb: int) -> Volume:
        grown_volume = copy_with_changes(volume)
        await self._host.grow_volume(grown_volume, size_mb)
        self._index.put(grown_volume)
        self._events.publish("volume.grown", volumeID=volume.name, sizeMB=size_mb)
        return grown_volume

    @measured("volume.delete")
    async def delete(self, ref: str, with_snapshots: bool = False) -> None:
        """Remove a volume that no sandbox mounts. Raises InUse, which lists all users, if it is in use.

        ``with_snapshots``: remove its snapshots too. By default, they count as users.
        """
        async with self._locked(ref) as volume:
            if refusal := self._references.find_volume_refusal(volume, with_snapshots=with_snapshots):
                raise refusal
            await finish_despite_cancellation(self._removal.remove_volume(volume))

    def list_snapshots(self, ref: str) -> Sequence[VolumeSnapshot]:
        return self._index.list_volume_snapshots(self.get(ref))

    @measured("volume.snapshot")
    async def create_snapshot(self, ref: str, name: str = "") -> VolumeSnapshot:
        """Take a point-in-time snapshot of a volume. Sandboxes that mount the volume keep running.

        ``name``: the snapshot's name, by default its id.
        """
        async with self._locked(ref) as volume:
            id = new_id()
            snapshot = VolumeSnapshot(
                id=id, name=require_valid_name(name) if name else id, volume=volume.id, size_mb=volume.size_mb
            )
            conflicts = [
                each for each in self._index.list_volume_snapshots(volume) if snapshot.name in (each.name, each.id)
            ]
            if conflicts:
                raise NameTaken(
                    f"volume {volume.name} already has a snapshot {name!r}: choose a different name, or delete "
                    "that snapshot",
                    blockers=[conflicts[0].id],
                )
            return await finish_despite_cancellation(self._create_snapshot(volume, snapshot))

    async def _create_snapshot(self, volume: Volume, snapshot: VolumeSnapshot) -> VolumeSnapshot:
        await self._host.capture_volume(volume, snapshot)
        add_volume_snapshot(self._context, volume, snapshot)
        return snapshot

    @measured("volume.delete_snapshot")
    async def delete_snapshot(self, ref: str, snapshot_ref: str) -> None:
        """Remove a volume snapshot. Raises InUse, for example if it is part of a sandbox's snapshot."""
        async with self._locked(ref) as volume:
            snapshot = self._index.get_volume_snapshot(snapshot_ref, volume)
            if refusal := self._references.find_volume_snapshot_refusal(volume, snapshot):
                raise refusal
            await finish_despite_cancellation(self._removal.remove_volume_snapshot(snapshot))

    @measured("volume.rollback")
    async def rollback(self, ref: str, snapshot_ref: str, force: bool = False) -> Volume:
        """Roll the contents of a volume back to a snapshot. The volume keeps its current size.

        Raises InUse if a running or paused sandbox mounts the volume read-write, because the sandbox's unwritten data
        would be lost or would overwrite the restored files. ``force``: roll back anyway.
        """
        async with self._locked(ref) as volume:
            snapshot = self._index.get_volume_snapshot(snapshot_ref, volume)
            if refusal := self._references.find_volume_rollback_refusal(volume, force=force):
                raise refusal
            return await finish_despite_cancellation(self._rollback(volume, snapshot))

    async def _rollback(self, volume: Volume, snapshot: VolumeSnapshot) -> Volume:
        rolled_back_volume = copy_with_changes(volume)
        await self._host.rollback_volume(rolled_back_volume, snapshot)
        self._index.put(rolled_back_volume)
        self._events.publish("volume.rolled-back", volumeID=volume.name, snapshotID=snapshot.id)
        return rolled_back_volume

    def _find_source(self, ref: str) -> VolumeSnapshot:
        volume_ref, separator, name = ref.rpartition("@")
        return self._index.get_volume_snapshot(name, self.get(volume_ref) if separator else None)

    @contextlib.asynccontextmanager
    async def _locked(self, ref: str) -> AsyncIterator[Volume]:
        async with self._locking.volumes_locked([ref]) as (volume,):
            yield volume
        if volume.owner or volume.from_snapshot:
            # The collector skips locked volumes, and this volume may have been the last user of a hidden snapshot.
            await self._collector.collect()


def _check_size(size_mb: int) -> None:
    if not _MIN_SIZE_MB <= size_mb <= _MAX_SIZE_MB:
        raise Invalid(f"a volume size of {size_mb} MiB is out of range: request {_MIN_SIZE_MB} to {_MAX_SIZE_MB} MiB")
