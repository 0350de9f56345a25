"""Plan the mounts of new sandboxes: shared volumes, and clones of volumes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.engine.mount_paths import check_mount_paths
from sandbox_gateway.engine.spec import MountSpec
from sandbox_gateway.engine.volume_records import create_volume
from sandbox_gateway.errors import Conflict, Invalid
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Mount, Sandbox, Snapshot, Volume, VolumeSnapshot, new_id
from sandbox_gateway.tasks import finish_despite_cancellation

_MAX_NAME_LENGTH = 64

log = Logger("engine")


@dataclass(frozen=True)
class PlannedMount:
    """A mount that each new sandbox gets."""

    volume: Volume
    path: str
    read_only: bool
    source: VolumeSnapshot | None = None
    """Each sandbox mounts its own clone of this snapshot. None: all sandboxes mount the volume itself."""


class MountPlanner:
    def __init__(self, context: Context, locking: Locking, collector: Collector) -> None:
        self._context = context
        self._index = context.index
        self._locking = locking
        self._collector = collector

    def plan(self, snapshot: Snapshot, specs: Sequence[MountSpec] | None) -> list[PlannedMount]:
        """Plan the mounts of forks of ``snapshot``. If ``specs`` is None, use the mounts of the snapshot's source."""
        if specs is None:
            return [self._inherit_mount(snapshot, mount) for mount in snapshot.mounts]
        volumes = self.resolve_volumes(specs)
        return [
            PlannedMount(volume, spec.path, spec.read_only, self._find_source(snapshot, volume) if spec.clone else None)
            for spec, volume in zip(specs, volumes, strict=True)
        ]

    def resolve_volumes(self, specs: Sequence[MountSpec]) -> list[Volume]:
        """Return the volumes in ``specs``. Raises NotFound, or Invalid if one sandbox cannot mount all of them."""
        volumes = [self._index.get_volume(spec.volume) for spec in specs]
        for volume in volumes:
            if volumes.count(volume) > 1:
                raise Invalid(
                    f"volume {volume.name} is listed more than once, but a sandbox can mount it at only one path: "
                    "list it once"
                )
        check_mount_paths(spec.path for spec in specs)
        return volumes

    def _inherit_mount(self, snapshot: Snapshot, mount: Mount) -> PlannedMount:
        if mount.volume not in self._index.volumes:
            raise Conflict(
                f"the source of snapshot {snapshot.id} mounted a volume at {mount.path}, but the volume no longer "
                "exists: list the volumes to mount in 'volumeMounts', or mount none with 'volumeMounts: []'"
            )
        return PlannedMount(self._index.volumes[mount.volume], mount.path, mount.read_only)

    def _find_source(self, snapshot: Snapshot, volume: Volume) -> VolumeSnapshot:
        for capture in snapshot.volumes:
            if capture.volume == volume.id and capture.snapshot in self._index.volume_snapshots:
                return self._index.volume_snapshots[capture.snapshot]
        raise Invalid(
            f"snapshot {snapshot.id} does not include volume {volume.name}, so the volume cannot be cloned: take a "
            "snapshot with the volume, or mount the volume itself"
        )

    def exclude_deleted_volumes(self, mounts: Iterable[Mount], sandbox: Sandbox) -> list[Mount]:
        """Return ``mounts`` without those of deleted volumes.

        A volume that ``sandbox`` currently mounts cannot have been deleted. If its record is missing, it may be
        restored.
        """
        mountable_ids = {*self._index.volumes, *(mount.volume for mount in sandbox.mounts)}
        remaining_mounts = [mount for mount in mounts if mount.volume in mountable_ids]
        for mount in mounts:
            if mount not in remaining_mounts:
                log.warning("a volume was not mounted because it was deleted", sandbox=sandbox.id, path=mount.path)
        return remaining_mounts

    @contextlib.asynccontextmanager
    async def mounts_added(
        self, planned_mounts: Sequence[PlannedMount], sandboxes: Sequence[Sandbox]
    ) -> AsyncIterator[dict[str, list[Volume]]]:
        """Add the planned mounts to the records of new sandboxes.

        Yields the records of the clones to create, by sandbox id. On exit, clones that no sandbox mounts are removed.
        """
        shared_volume_ids = [each.volume.id for each in planned_mounts if each.source is None]
        sources = [each.source for each in planned_mounts if each.source is not None]
        try:
            async with self._locking.volumes_shared(shared_volume_ids):
                clones: dict[str, list[Volume]] = {}
                names: set[str] = set()
                for sandbox in sandboxes:
                    clones[sandbox.id] = []
                    for each in planned_mounts:
                        volume = each.volume
                        if each.source is not None:
                            volume = self._create_clone_record(sandbox, volume, each.source, names)
                            clones[sandbox.id].append(volume)
                            names.add(volume.name)
                        sandbox.mounts.append(Mount(volume=volume.id, path=each.path, read_only=each.read_only))
                new_clones = [clone for sandbox_clones in clones.values() for clone in sandbox_clones]
                with self._index.reserved(names), self._index.pinned(*sources, *new_clones):
                    yield clones
        finally:
            if any(each.source or each.volume.owner for each in planned_mounts):
                await finish_despite_cancellation(self._collector.collect())

    async def create_clones(self, clones: Iterable[Volume]) -> None:
        for clone in clones:
            source = self._index.volume_snapshots[clone.from_snapshot]
            await finish_despite_cancellation(create_volume(self._context, clone, source))

    def _create_clone_record(
        self, sandbox: Sandbox, volume: Volume, source: VolumeSnapshot, taken_names: set[str]
    ) -> Volume:
        id, name = new_id(), f"{sandbox.name}-{volume.name}"
        if len(name) > _MAX_NAME_LENGTH or name in taken_names or not self._index.is_name_free(name):
            name = f"{name[: _MAX_NAME_LENGTH - len(id) - 1]}-{id}"
        return Volume(id=id, name=name, size_mb=source.size_mb, from_snapshot=source.id, owner=sandbox.id)
