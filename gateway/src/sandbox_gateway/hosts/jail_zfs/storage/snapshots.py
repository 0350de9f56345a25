"""Manage snapshots of sandboxes, and the templates from which they descend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import zfs_core

from sandbox_gateway.errors import InUseExternally
from sandbox_gateway.hosts.jail_zfs.storage.instances import InstanceStorage
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import encode
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import TEMPLATE_PREFIX, UNMOUNTED_PROPERTIES, RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_names import SnapshotNames
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_removal import destroy_snapshot
from sandbox_gateway.hosts.jail_zfs.storage.volume_snapshots import VolumeSnapshots
from sandbox_gateway.hosts.jail_zfs.storage.zfs_errors import translate_errors
from sandbox_gateway.records import Snapshot, VolumeSnapshot

BASE_NAME = "base"


class SnapshotStorage:
    """Manages the snapshots in ZFS. Methods block, are thread-safe, and raise GatewayError."""

    def __init__(
        self,
        root: RootDataset,
        records: PropertyStore,
        names: SnapshotNames,
        instances: InstanceStorage,
        volume_snapshots: VolumeSnapshots,
    ) -> None:
        self._root = root
        self._records = records
        self._names = names
        self._instances = instances
        self._volume_snapshots = volume_snapshots

    def get_full_name(self, snapshot_id: str) -> str:
        """Return the current full name of a snapshot, ``dataset@snapshot``. Raises NotFound."""
        return self._names.find(snapshot_id)

    @translate_errors
    def create_base(self, record: Snapshot, fill: Callable[[Path], None]) -> Snapshot:
        """Create a template's dataset, call ``fill`` with its directory, and take the snapshot ``@base`` of the result.

        Destroys the dataset if ``fill`` raises an exception.
        """
        dataset = f"{self._root.dataset}/{TEMPLATE_PREFIX}{record.id}"
        zfs_core.lzc_create(dataset, props=UNMOUNTED_PROPERTIES)
        try:
            zfs_core.mount(dataset)
            fill(self._root.mountpoint / f"{TEMPLATE_PREFIX}{record.id}")
            zfs_core.unmount(dataset)
            self._capture(f"{dataset}@{BASE_NAME}", record)
        except BaseException:
            with suppress(zfs_core.exceptions.ZFSError):
                self._instances.tree.destroy(dataset)
            raise
        return record

    @translate_errors
    def capture(self, instance: str, record: Snapshot, volumes: Sequence[VolumeSnapshot] = ()) -> Snapshot:
        """Take snapshots of an instance's file system and of volumes in one all-or-nothing operation.

        They contain everything that programs have written. Memory-mapped data is included only if it was synced.
        """
        self._capture(f"{self._instances.dataset(instance)}@{record.id}", record, volumes)
        return record

    def _capture(self, name: str, record: Snapshot, volumes: Sequence[VolumeSnapshot] = ()) -> None:
        props = encode(record, 1)
        volume_names, volume_props = self._volume_snapshots.describe(volumes)
        # The volumes come first: if the command is interrupted, their snapshots are ignored unless the sandbox's
        # snapshot exists.
        zfs_core.lzc_snapshot([*volume_names.values(), name], volume_props | props)
        with self._root.index_lock:
            self._volume_snapshots.names.add(volume_names)
            self._names.add({record.id: name})
            self._records.add_generations({record.id: 1})
            if len(props) > 1:
                self._records.note_multipart_name(name)

    @translate_errors
    def save(self, record: Snapshot) -> None:
        """Commit a new version of a snapshot's record. Raises NotFound if the snapshot does not exist."""
        self._names.call_with_name(record.id, lambda name: self._records.write(name, record))

    @translate_errors
    def destroy(self, snapshot_id: str, *, deferred: bool = False) -> bool:
        """Remove a snapshot. Returns False if it is only hidden, until ZFS removes its last clone or hold.

        Unless ``deferred``, raises InUseExternally, with the names of all users, if the snapshot is held or has clones
        that belong to sandboxes. With ``deferred``, or if no clone does, the snapshot is hidden.
        """
        with self._root.tree_locked():
            name = self._names.find(snapshot_id)
            is_removed = destroy_snapshot(name, deferred=deferred, check_clones=lambda: self._check_clones(name))
            self._names.remove(snapshot_id)
            self._records.forget(snapshot_id, name)
            self._instances.tree.destroy_if_unused(name.partition("@")[0])
        return is_removed

    def _check_clones(self, name: str) -> None:
        """Raise InUseExternally unless all clones of the snapshot are retired or wait for their removal."""
        clones: dict[str, str] = {}
        for clone in zfs_core.list_clones(name):
            if not self._instances.belongs_to_no_sandbox(clone):
                clones.update([self._instances.identify(clone)])
        if clones:
            raise InUseExternally({"ZFS clone": clones}, "Remove them first (`zfs destroy`).")
