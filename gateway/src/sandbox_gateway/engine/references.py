"""Find the users of snapshots and volumes, and decide what can be removed. ``in_use`` creates the errors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.in_use import (
    create_snapshot_in_use_error,
    create_volume_in_use_error,
    create_volume_mounted_error,
    create_volume_snapshot_in_use_error,
)
from sandbox_gateway.engine.index import is_removed_when_unused, sort_oldest_first
from sandbox_gateway.errors import InUse
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot


@dataclass(frozen=True)
class SnapshotUsers:
    """The users of a snapshot or template, and of the volume snapshots that are part of it."""

    sandboxes: list[Sandbox]
    """The sandboxes that were forked from it, were rolled back to it, or resume from it."""
    blocking_sandboxes: list[Sandbox]
    """The subset of ``sandboxes`` that prevents the deletion of the snapshot on request."""
    blocking_volumes: list[Volume]
    """The clones of its volume snapshots that prevent its deletion."""
    is_busy: bool
    """Whether a request is using it."""

    @property
    def blockers(self) -> list[Sandbox | Volume]:
        """The sandboxes and volumes that prevent the deletion of the snapshot on request."""
        return [*self.blocking_sandboxes, *self.blocking_volumes]


class References:
    """The users of snapshots and volumes. All rules for requested and automatic removals are based on these users."""

    def __init__(self, context: Context) -> None:
        self._index = context.index
        self._host = context.host

    # -- snapshots of sandboxes, and templates ----------------------------------------------------------------------

    def find_users(self, snapshot: Snapshot) -> SnapshotUsers:
        sandboxes = self._index.list_dependent_sandboxes(snapshot)
        blocking_sandboxes = sandboxes
        if self._host.abilities.independent_snapshots:
            blocking_sandboxes = [each for each in sandboxes if snapshot.id in (each.forked_from, each.pause_snapshot)]
        volume_snapshots = self._index.list_included_volume_snapshots(snapshot)
        return SnapshotUsers(
            sandboxes=sandboxes,
            blocking_sandboxes=blocking_sandboxes,
            blocking_volumes=self._find_blocking_volumes(volume_snapshots),
            is_busy=self._index.is_pinned(snapshot) or any(map(self._index.is_pinned, volume_snapshots)),
        )

    def find_snapshot_refusal(self, snapshot: Snapshot) -> InUse | None:
        """Return the error that names all users of a snapshot or template, or None if it can be removed."""
        users = self.find_users(snapshot)
        return create_snapshot_in_use_error(
            snapshot,
            sandboxes=users.blocking_sandboxes,
            cloned_volumes=users.blocking_volumes,
            is_busy=users.is_busy,
        )

    def can_collect_snapshot(self, snapshot: Snapshot) -> bool:
        """Return whether a snapshot should be removed because it is unused."""
        if not is_removed_when_unused(snapshot):
            return False
        users = self.find_users(snapshot)
        if users.sandboxes or users.blocking_volumes or users.is_busy:
            return False
        # A capture for clones is kept while it is the head of a sandbox, unless it was deleted on request.
        return snapshot.doomed or all(each.head != snapshot.id for each in self._index.sandboxes.values())

    def can_collect_volume_snapshots(self, snapshot: Snapshot) -> bool:
        """Return whether the volume snapshots in a capture for clones are unused, even if the capture itself is not."""
        if snapshot.kind is not SnapshotKind.TRANSIENT or not self._index.list_included_volume_snapshots(snapshot):
            return False
        users = self.find_users(snapshot)
        return not (users.blocking_volumes or users.is_busy)

    # -- volumes and their snapshots --------------------------------------------------------------------------------

    def find_volume_refusal(self, volume: Volume, *, with_snapshots: bool) -> InUse | None:
        """Return the error that names all users of a volume, or None if it can be removed.

        ``with_snapshots``: the volume's own snapshots are removed too, so they do not count as users.
        """
        snapshots = self._index.list_volume_snapshots(volume)
        sandbox_snapshots = self._find_blocking_snapshots(snapshots)
        contained_ids = {
            capture.snapshot for sandbox_snapshot in sandbox_snapshots for capture in sandbox_snapshot.volumes
        }
        own_snapshots = [] if with_snapshots else [each for each in snapshots if each.id not in contained_ids]
        return create_volume_in_use_error(
            volume,
            mounting_sandboxes=[sandbox for sandbox, _ in self._index.list_mounts(volume)],
            sandbox_snapshots=sandbox_snapshots,
            own_snapshots=own_snapshots,
            clones=self._find_blocking_volumes(snapshots),
            is_busy=self._index.is_pinned(volume) or any(map(self._index.is_pinned, snapshots)),
        )

    def find_volume_snapshot_refusal(self, volume: Volume, snapshot: VolumeSnapshot) -> InUse | None:
        """Return the error that names all users of a volume snapshot, or None if it can be removed."""
        return create_volume_snapshot_in_use_error(
            snapshot,
            volume,
            sandbox_snapshots=self._find_blocking_snapshots([snapshot]),
            clones=self._find_blocking_volumes([snapshot]),
            is_busy=self._index.is_pinned(snapshot),
        )

    def find_volume_rollback_refusal(self, volume: Volume, *, force: bool) -> InUse | None:
        """Return the error that names the read-write mounts of a volume, or None if it can be rolled back.

        ``force``: allow the rollback despite the mounts.
        """
        writers = [sandbox for sandbox, mount in self._index.list_mounts(volume) if not (mount.read_only or force)]
        return create_volume_mounted_error(volume, writers=writers, is_busy=self._index.is_pinned(volume))

    def list_clones(self, snapshots: Iterable[VolumeSnapshot]) -> list[Volume]:
        """Return the volumes that were created from ``snapshots``, oldest first."""
        ids = {snapshot.id for snapshot in snapshots}
        if not ids:
            return []
        return sort_oldest_first(volume for volume in self._index.volumes.values() if volume.from_snapshot in ids)

    def _find_blocking_volumes(self, snapshots: Iterable[VolumeSnapshot]) -> list[Volume]:
        """Return the clones that prevent the deletion of ``snapshots``."""
        return [] if self._host.abilities.independent_snapshots else self.list_clones(snapshots)

    def _find_blocking_snapshots(self, snapshots: Iterable[VolumeSnapshot]) -> list[Snapshot]:
        """Return the sandbox snapshots that include any of ``snapshots``, except transient ones."""
        ids = {snapshot.id for snapshot in snapshots}
        return [
            each
            for each in self._index.snapshots.values()
            if each.kind is not SnapshotKind.TRANSIENT and any(capture.snapshot in ids for capture in each.volumes)
        ]
