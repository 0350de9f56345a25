"""Manage snapshots of sandboxes, and the templates from which they descend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from sandbox_gateway import zfs
from sandbox_gateway.errors import UsedOutside
from sandbox_gateway.hosts.jail_zfs.storage.instances import InstanceStorage
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import encode
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import TEMPLATE, RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_names import SnapshotNames
from sandbox_gateway.hosts.jail_zfs.storage.translation import translate_errors
from sandbox_gateway.hosts.jail_zfs.storage.volume_snapshots import VolumeSnapshots
from sandbox_gateway.records import Snapshot, VolumeSnapshot

_BASE = "base"


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

    def full_name(self, snapshot_id: str) -> str:
        """Return the current ``dataset@snapshot``. Raises NotFound."""
        return self._names.find(snapshot_id)

    @translate_errors
    def create_base(self, record: Snapshot, fill: Callable[[Path], None]) -> Snapshot:
        """Create a dataset, let ``fill`` write a file system into the given directory, and commit it as ``@base``.

        Nothing remains if ``fill`` raises.
        """
        dataset = f"{self._root.dataset}/{TEMPLATE}{record.id}"
        zfs.lzc_create(dataset, props={"canmount": "noauto", "atime": "off", "com.sun:auto-snapshot": "false"})
        try:
            zfs.mount(dataset)
            fill(self._root.mountpoint / f"{TEMPLATE}{record.id}")
            zfs.unmount(dataset)
            self._capture(f"{dataset}@{_BASE}", record)
        except BaseException:
            with suppress(zfs.exceptions.ZFSError):
                self._instances.destroy_dataset(dataset)
            raise
        return record

    @translate_errors
    def capture(self, instance: str, record: Snapshot, volumes: Sequence[VolumeSnapshot] = ()) -> Snapshot:
        """Snapshot an instance's file system and volumes at once, all or none.

        The snapshot contains everything that programs have written; memory-mapped data only if it was synced.
        """
        self._capture(f"{self._instances.dataset(instance)}@{record.id}", record, volumes)
        return record

    def _capture(self, name: str, record: Snapshot, volumes: Sequence[VolumeSnapshot] = ()) -> None:
        props = encode(record, 1)
        volume_names, volume_props = self._volume_snapshots.describe(volumes)
        # Without atomicity, volumes must come first: their snapshots are ignored without the sandbox's snapshot.
        zfs.lzc_snapshot([*volume_names.values(), name], volume_props | props)
        with self._root.index_lock:
            self._volume_snapshots.add(volume_names)
            self._names.add(record.id, name)
            self._records.add_generations({record.id: 1})
            if len(props) > 1:
                self._records.note_multipart(name)

    @translate_errors
    def save(self, record: Snapshot) -> None:
        """Commit a new version of a snapshot's record. Raises NotFound if the snapshot does not exist."""
        self._names.use(record.id, lambda name: self._records.write(name, record))

    @translate_errors
    def bytes_held(self, snapshot_id: str) -> int:
        """Return the number of bytes that only this snapshot uses."""
        return self._names.use(snapshot_id, zfs.used)

    @translate_errors
    def destroy(self, snapshot_id: str, *, deferred: bool = False) -> bool:
        """Remove a snapshot. Returns False if it is only hidden: ZFS removes it with the last clone or hold.

        Unless ``deferred``, raises UsedOutside, with all names, if the snapshot is held or has clones (sandboxes, or
        datasets of others). Retired clones do not count: the snapshot is then hidden.
        """
        with self._root.tree_lock:
            name = self._names.find(snapshot_id)
            gone = self._destroy(snapshot_id, name, deferred)
            self._names.remove(snapshot_id)
            self._records.forget(snapshot_id, name)
            self._instances.destroy_if_unused(name.partition("@")[0])
        return gone

    def _destroy(self, snapshot_id: str, name: str, deferred: bool) -> bool:
        try:
            zfs.lzc_destroy_snaps([name], False)
        except zfs.exceptions.SnapshotDestructionFailure as failure:
            held = isinstance(failure.errors[0], zfs.exceptions.SnapshotIsHeld)
            if not held and not isinstance(failure.errors[0], zfs.exceptions.SnapshotIsCloned):
                raise
            if not deferred:
                self._check_unused(name, held)
            zfs.lzc_destroy_snaps([name], True)
            return not zfs.lzc_exists(name)
        return True

    def _check_unused(self, name: str, held: bool) -> None:
        """Raise UsedOutside if it has a hold, or clones that are not retired."""
        clones: dict[str, str] = {}
        for clone in zfs.list_clones(name):
            if not self._instances.is_retired(clone):
                clones.update([self._instances.identify(clone)])
        if clones:
            raise UsedOutside({"ZFS clone": clones}, "Remove them first (`zfs destroy`).")
        if held:
            raise UsedOutside({"hold": {name: name}}, "Release it first (`zfs release`).")
