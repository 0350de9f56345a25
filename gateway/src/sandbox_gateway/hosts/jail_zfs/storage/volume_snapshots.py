"""Manage snapshots of volumes.

Neither a snapshot nor its volume can be removed while another volume is a clone of the snapshot. The clone shares the
snapshot's blocks, so hiding the snapshot would not free any space, and `zfs promote` would move snapshots to the clone.
"""

from __future__ import annotations

from collections.abc import Sequence

import zfs_core

from sandbox_gateway.errors import InUseExternally
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import (
    RECORD_PROPERTY,
    build_volume_snapshot_property,
    encode,
)
from sandbox_gateway.hosts.jail_zfs.storage.root import RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_names import SnapshotNames
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_removal import destroy_snapshot
from sandbox_gateway.hosts.jail_zfs.storage.volume_datasets import VolumeDatasets
from sandbox_gateway.hosts.jail_zfs.storage.zfs_errors import translate_errors
from sandbox_gateway.records import VolumeSnapshot


class VolumeSnapshots:
    """Manages snapshots of volumes in ZFS. Methods block, are thread-safe, and raise GatewayError or ZFSError."""

    def __init__(self, root: RootDataset, datasets: VolumeDatasets) -> None:
        self._root = root
        self._datasets = datasets
        self.names = SnapshotNames(root, "volume snapshot")

    # ---- taking ----

    @translate_errors
    def capture(self, record: VolumeSnapshot) -> None:
        """Take a snapshot of a volume and store the record in it."""
        names, props = self.describe([record])
        zfs_core.lzc_snapshot(names.values(), props)
        self.names.add(names)

    def describe(self, records: Sequence[VolumeSnapshot]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the names and properties of new snapshots, as ``({id: full name}, {property: value})``."""
        names = {record.id: f"{self._datasets.get_current(record.volume)}@{record.id}" for record in records}
        return names, {
            build_volume_snapshot_property(record.id): encode(record, 1)[RECORD_PROPERTY] for record in records
        }

    # ---- removing ----

    @translate_errors
    def destroy(self, snapshot_id: str, *, deferred: bool = False) -> None:
        """Remove a volume's snapshot.

        Unless ``deferred``, raises InUseExternally, with the names of all users, if the snapshot is held or another
        volume is a clone of it. If its own volume was rolled back to it, the snapshot is hidden until
        its last clone is removed.
        """
        with self._root.tree_locked():
            name = self.names.find(snapshot_id)
            self.names.call_with_name(snapshot_id, lambda name: self._destroy(name, deferred))
            self.names.remove(snapshot_id)
            self._datasets.tree.destroy_if_unused(name.partition("@")[0])

    def _destroy(self, name: str, deferred: bool) -> None:
        if not zfs_core.lzc_exists(name):
            raise zfs_core.exceptions.SnapshotNotFound(name)
        destroy_snapshot(name, deferred=deferred, check_clones=lambda: self.check_no_cloned_volumes([name]))

    def check_no_cloned_volumes(self, names: Sequence[str]) -> None:
        """Raise InUseExternally if another volume's dataset is a clone of any of the snapshots ``names``."""
        if not names:
            return
        clones: dict[str, str] = {}
        facts = zfs_core.get_props(zfs_core.list_datasets(self._root.dataset.partition("/")[0]), ["origin"])
        for clone, props in facts.items():
            origin = props["origin"].value
            if origin in names and self._datasets.find_owner(clone) != self._datasets.find_owner(
                origin.partition("@")[0]
            ):
                clones.update([self._datasets.identify(clone)])
        if clones:
            raise InUseExternally({"ZFS clone": clones}, "Remove them first.")

    def check_only_own_snapshots(self, names: Sequence[str]) -> None:
        """Raise InUseExternally if any of the snapshots ``names`` is held, or was taken by a different tool."""
        if not names:
            return
        held_snapshots = {
            name for name, facts in zfs_core.get_props(names, ["userrefs"]).items() if facts["userrefs"].number
        }
        own_snapshots = self.names.list_all()
        # Hidden snapshots are not in the index, but are not foreign: ZFS destroys them with their last clone.
        deferral_props = zfs_core.get_props(names, ["defer_destroy"])
        hidden_snapshots = {name for name, facts in deferral_props.items() if facts["defer_destroy"].is_on}
        foreign_snapshots = set(names) - own_snapshots - hidden_snapshots - held_snapshots
        if held_snapshots or foreign_snapshots:
            users = {
                "hold": {name: name for name in sorted(held_snapshots)},
                "foreign snapshot": {name: name for name in sorted(foreign_snapshots)},
            }
            raise InUseExternally(users, "Release or destroy them first (`zfs release`, `zfs destroy`).")
