"""Manage the storage of a jail host: datasets, snapshots, and records in their user properties.

docs/jail_zfs.md ("Datasets") lists the datasets.

The command that takes a snapshot also sets its record, so a snapshot exists as soon as ZFS has taken it. A sandbox
exists as soon as the record of its instance is written (``instances.save``). ``scan`` removes datasets without a
record. It keeps and reports datasets with an unreadable record, and marks them with ``sandbox:quarantine``. Nothing is
ever destroyed recursively (``-r``, ``-R``).

Methods block, are thread-safe, and raise GatewayError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_gateway import zfs
from sandbox_gateway.hosts.jail_zfs.storage.ballast import Ballast
from sandbox_gateway.hosts.jail_zfs.storage.host_lock import HostLock
from sandbox_gateway.hosts.jail_zfs.storage.instances import InstanceStorage
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import SANDBOXES, RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.sandbox_scan import interpret_sandboxes
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_names import SnapshotNames
from sandbox_gateway.hosts.jail_zfs.storage.snapshots import SnapshotStorage
from sandbox_gateway.hosts.jail_zfs.storage.volume_datasets import VolumeDatasets
from sandbox_gateway.hosts.jail_zfs.storage.volume_scan import VOLUME_SCAN_PROPERTIES, interpret_volumes
from sandbox_gateway.hosts.jail_zfs.storage.volume_snapshots import VolumeSnapshots
from sandbox_gateway.hosts.jail_zfs.storage.volumes import VolumeStorage
from sandbox_gateway.hosts.jail_zfs.storage.zfs_errors import translate_errors
from sandbox_gateway.records import Sandbox, Snapshot, Volume, VolumeSnapshot, refuse_newer_records


@dataclass
class StorageScan:
    """The result of ``ZfsStorage.scan``."""

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
        self._lock = HostLock(root_dataset, lock_directory)
        self._ballast = Ballast(root_dataset)
        self._records = PropertyStore(self.root, self._ballast)
        self._names = SnapshotNames(self.root, "snapshot")
        self.instances = InstanceStorage(self.root, self._ballast, self._records, self._names)
        volume_datasets = VolumeDatasets(self.root, self._ballast, self._records)
        self.volume_snapshots = VolumeSnapshots(self.root, volume_datasets)
        self.volumes = VolumeStorage(self.root, self._ballast, self._records, volume_datasets, self.volume_snapshots)
        self.snapshots = SnapshotStorage(self.root, self._records, self._names, self.instances, self.volume_snapshots)

    @translate_errors
    def open(self) -> list[str]:
        """Lock the root dataset for this gateway and create missing containers in it.

        Returns a sentence for each repair. Raises Conflict if another gateway uses the dataset, and BackendFailed if it
        does not exist.
        """
        self.root.check()
        notes = self._lock.acquire()
        try:
            self.root.mount()
            notes += self._ballast.refill()
        except BaseException:
            self.close()
            raise
        return notes

    def close(self) -> None:
        """Release the root dataset. Everything stays mounted, and ZFS errors are ignored."""
        self._lock.release()

    @translate_errors
    def space(self) -> tuple[int, int]:
        """Return the free space of the root dataset, and the total of its free and used space, in bytes."""
        facts = zfs.get_props([self.root.dataset], ["available", "used"])[self.root.dataset]
        return facts["available"].number, facts["available"].number + facts["used"].number

    @translate_errors
    def scan(self, teardown: Callable[[str], None] = lambda instance: None) -> StorageScan:
        """Find all objects and remove uncommitted ones. Damaged objects are reported and do not stop the scan.

        Leftovers of volumes are found but not removed: ``volumes.sweep`` removes them when no jail uses them any more.
        ``teardown(instance)`` is called before an instance is removed, to stop the processes in it. If it raises an
        exception, the error is reported and the instance stays until the next scan. Raises BackendFailed, before
        anything is changed, if a newer release has written a record that this release cannot read.
        """
        with self.root.tree_lock:
            root_dataset = self.root.dataset
            facts, local = zfs.get_tree(root_dataset, VOLUME_SCAN_PROPERTIES), zfs.local_tree(root_dataset)
            findings = interpret_sandboxes(root_dataset, facts, local)
            volume_findings = interpret_volumes(root_dataset, facts, local)
            refuse_newer_records(findings.marks.newer | volume_findings.marks.newer)
            with self.root.index_lock:
                self._names.load(findings.snapshot_names)
                self._records.load(findings.generations, findings.multipart)
            self._records.mark(findings.marks)
            notes = self.volumes.load(volume_findings)
            notes += findings.marks.list_notes()
            notes += self.instances.sweep(findings, teardown)
            notes += self._ballast.refill()
            instance_prefix = self.root.child(SANDBOXES, "")
            unreadable_datasets = [
                name for name in findings.marks.quarantined if name.startswith(instance_prefix) and "@" not in name
            ]
            return StorageScan(
                findings.snapshots,
                findings.sandboxes,
                notes,
                volume_findings.volumes,
                volume_findings.snapshots,
                unreadable_datasets,
            )
