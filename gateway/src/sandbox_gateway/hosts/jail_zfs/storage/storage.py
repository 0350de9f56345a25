"""The storage of a jail host: datasets, snapshots, and records in their user properties.

::

    <root>/_template-<id>@base        a newly built template; its dataset stays unmounted
    <root>/sandboxes/<instance>       a clone, with the record of its sandbox (instances.py)
    <root>/sandboxes/<instance>@<id>  a snapshot, with its record (snapshots.py)
    <root>/retired/<instance>         an instance of a removed sandbox, kept unmounted until its last snapshot is
                                      removed (on zfs-fuse it stays in sandboxes/ while forks are mounted)
    <root>/volumes/<id>               a volume (volumes.py)
    <root>/ballast                    16 MiB reserved for a full pool (ballast.py)

A snapshot exists when ZFS has it, because the command that takes it also sets its record. A sandbox exists when the
record of its instance is written (``instances.save``). ``scan`` removes datasets without a record. Those
with an unreadable record stay in place, marked ``sandbox:quarantine``, and are reported. ``-r`` and ``-R`` are never
used to destroy anything.

Methods block, are thread-safe, and raise GatewayError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_gateway import zfs
from sandbox_gateway.hosts.jail_zfs.storage.ballast import Ballast
from sandbox_gateway.hosts.jail_zfs.storage.instances import InstanceStorage
from sandbox_gateway.hosts.jail_zfs.storage.ownership import Ownership
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import SANDBOXES, RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.sandbox_scan import interpret_sandboxes
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_names import SnapshotNames
from sandbox_gateway.hosts.jail_zfs.storage.snapshots import SnapshotStorage
from sandbox_gateway.hosts.jail_zfs.storage.translation import translate_errors
from sandbox_gateway.hosts.jail_zfs.storage.volume_datasets import VolumeDatasets
from sandbox_gateway.hosts.jail_zfs.storage.volume_scan import VOLUME_FACTS, interpret_volumes
from sandbox_gateway.hosts.jail_zfs.storage.volume_snapshots import VolumeSnapshots
from sandbox_gateway.hosts.jail_zfs.storage.volumes import VolumeStorage
from sandbox_gateway.records import Sandbox, Snapshot, Volume, VolumeSnapshot


@dataclass
class StorageScan:
    """The result of ``scan``."""

    snapshots: list[Snapshot] = field(default_factory=list)
    """Oldest first."""
    sandboxes: list[Sandbox] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    """A sentence for each object that was removed, quarantined or repaired."""
    volumes: list[Volume] = field(default_factory=list)
    volume_snapshots: list[VolumeSnapshot] = field(default_factory=list)
    unreadable_sandboxes: list[str] = field(default_factory=list)
    """Datasets of instances whose records cannot be read."""


class ZfsStorage:
    """The storage below the dataset ``root_dataset``, which must exist and have a mount point."""

    def __init__(self, root_dataset: str, *, lock_directory: Path = Path("/var/run")) -> None:
        self.root = RootDataset(root_dataset)
        self._ownership = Ownership(root_dataset, lock_directory)
        self._ballast = Ballast(root_dataset)
        self._records = PropertyStore(self.root, self._ballast)
        self._names = SnapshotNames(self.root)
        self.instances = InstanceStorage(self.root, self._ballast, self._records, self._names)
        volume_datasets = VolumeDatasets(self.root, self._ballast, self._records)
        self.volume_snapshots = VolumeSnapshots(self.root, volume_datasets)
        self.volumes = VolumeStorage(self.root, self._ballast, self._records, volume_datasets, self.volume_snapshots)
        self.snapshots = SnapshotStorage(self.root, self._records, self._names, self.instances, self.volume_snapshots)

    @translate_errors
    def open(self) -> list[str]:
        """Lock the root dataset for this gateway and create missing containers in it.

        Returns a sentence for each repair. Raises Conflict if another gateway uses it, BackendFailed if it is missing.
        """
        self.root.check()
        notes = self._ownership.take()
        try:
            self.root.mount()
            notes += self._ballast.refill()
        except BaseException:
            self.close()
            raise
        return notes

    def close(self) -> None:
        """Release the root dataset. Everything stays mounted, and errors of ZFS are ignored."""
        self._ownership.release()

    @translate_errors
    def scan(self, teardown: Callable[[str], None] = lambda instance: None) -> StorageScan:
        """Find all objects and remove uncommitted ones. Damaged objects are reported, and do not stop the scan.

        Leftovers of volumes are found but not removed: ``volumes.sweep`` removes them when no jail uses them any more.
        ``teardown(instance)`` is called before an instance is removed, to end processes in it. If it raises, the
        error is reported and the instance stays until the next scan.
        """
        with self.root.tree_lock:
            root = self.root.dataset
            facts, local = zfs.get_tree(root, VOLUME_FACTS), zfs.local_tree(root)
            found, volumes = interpret_sandboxes(root, facts, local), interpret_volumes(root, facts, local)
            with self.root.index_lock:
                self._names.load(found.snapshot_names)
                self._records.load(found.generations, found.multipart)
            self._records.mark(found)
            notes = self.volumes.load(volumes)
            notes += found.notes()
            notes += self.instances.sweep(found, teardown)
            notes += self._ballast.refill()
            instances = self.root.child(SANDBOXES, "")
            unreadable = [name for name in found.quarantined if name.startswith(instances) and "@" not in name]
            return StorageScan(found.snapshots, found.sandboxes, notes, volumes.volumes, volumes.snapshots, unreadable)
