"""Manage the storage of a jail host: datasets, snapshots, and records in their user properties.

docs/jail_zfs.md ("Datasets") lists the datasets.

The command that takes a snapshot also sets its record, so a snapshot exists as soon as ZFS has taken it. A sandbox
exists as soon as the record of its instance is written (``instances.save``). ``scan`` removes datasets without a
record. It keeps and reports datasets with an unreadable record, and marks them with ``sandbox:quarantine``. Nothing is
ever destroyed recursively (``-r``, ``-R``). Environments of sandboxes are in files (``secret_files``).

Methods block, are thread-safe, and raise GatewayError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import zfs_core

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.jail_zfs.storage.ballast import Ballast
from sandbox_gateway.hosts.jail_zfs.storage.host_lock import HostLock
from sandbox_gateway.hosts.jail_zfs.storage.instances import InstanceStorage
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import SANDBOXES, RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.sandbox_scan import SandboxFindings, interpret_sandboxes
from sandbox_gateway.hosts.jail_zfs.storage.secret_files import SecretFiles
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_names import SnapshotNames
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_streams import SnapshotStreams
from sandbox_gateway.hosts.jail_zfs.storage.snapshots import SnapshotStorage
from sandbox_gateway.hosts.jail_zfs.storage.volume_datasets import VolumeDatasets
from sandbox_gateway.hosts.jail_zfs.storage.volume_scan import VOLUME_SCAN_PROPERTIES, interpret_volumes
from sandbox_gateway.hosts.jail_zfs.storage.volume_snapshots import VolumeSnapshots
from sandbox_gateway.hosts.jail_zfs.storage.volume_streams import VolumeStreams
from sandbox_gateway.hosts.jail_zfs.storage.volumes import VolumeStorage
from sandbox_gateway.hosts.jail_zfs.storage.zfs_errors import translate_errors, translated_errors
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
    """The storage under the dataset ``root_dataset``, which must exist and have a mount point.

    ``state_root``: the directory for the lock and for the environments of sandboxes.
    """

    def __init__(self, root_dataset: str, *, state_root: Path) -> None:
        self.root = RootDataset(root_dataset)
        self._lock = HostLock(root_dataset, state_root)
        self._ballast = Ballast(root_dataset)
        self._secret_files = SecretFiles(state_root / "secrets" / quote(root_dataset, safe=""))
        self._records = PropertyStore(self.root, self._ballast, self._secret_files)
        self._names = SnapshotNames(self.root, "snapshot")
        self.instances = InstanceStorage(self.root, self._ballast, self._records, self._names)
        volume_datasets = VolumeDatasets(self.root, self._ballast, self._records)
        self.volume_snapshots = VolumeSnapshots(self.root, volume_datasets)
        self.volumes = VolumeStorage(self.root, self._ballast, self._records, volume_datasets, self.volume_snapshots)
        self.snapshots = SnapshotStorage(self.root, self._records, self._names, self.instances, self.volume_snapshots)
        self.streams = SnapshotStreams(self.root, self._records, self._names, self.snapshots)
        self.volume_streams = VolumeStreams(self.root, self._records, self.volume_snapshots.names, volume_datasets)

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
            self._secret_files.open()
            notes += self._ballast.refill()
        except BaseException:
            self.close()
            raise
        return notes

    def close(self) -> None:
        """Release the root dataset. Everything stays mounted, and ZFS errors are ignored."""
        self._lock.release()

    def remove_record(self, sandbox: Sandbox) -> None:
        """Remove the record of a sandbox, and its environment. The next scan removes its instance."""
        self.instances.forget(sandbox.instance)
        self._secret_files.remove(sandbox.id)

    @translate_errors
    def measure_space(self) -> tuple[int, int]:
        """Return the free space of the root dataset, and the total of its free and used space, in bytes."""
        facts = zfs_core.get_props([self.root.dataset], ["available", "used"])[self.root.dataset]
        return facts["available"].number, facts["available"].number + facts["used"].number

    @translate_errors
    def scan(self, teardown: Callable[[str], None] = lambda instance: None) -> StorageScan:
        """Find all objects and remove uncommitted ones. Damaged objects are reported and do not stop the scan.

        Leftovers of volumes are found but not removed: ``volumes.sweep`` removes them once no jail uses them.
        ``teardown(instance)`` is called before an instance is removed, to stop the processes in it. If it raises an
        exception, the error is reported and the instance stays until the next scan. Raises BackendFailed, before
        anything is changed, if a newer release has written a record that this release cannot read.
        """
        with self.root.tree_locked():
            root_dataset = self.root.dataset
            facts, local = zfs_core.get_tree(root_dataset, VOLUME_SCAN_PROPERTIES), zfs_core.local_tree(root_dataset)
            comparison_snapshots = [name for name in facts if zfs_core.is_comparison_snapshot(name)]
            facts = {name: props for name, props in facts.items() if name not in comparison_snapshots}
            findings = interpret_sandboxes(root_dataset, facts, local)
            volume_findings = interpret_volumes(root_dataset, facts, local)
            refuse_newer_records(findings.marks.newer_records | volume_findings.marks.newer_records)
            with self.root.index_lock:
                self._names.load(findings.snapshot_names)
                self._records.load(findings.generations, findings.multipart_names)
            self._records.mark(findings.marks)
            notes = self._remove_comparison_snapshots(comparison_snapshots)
            notes += self.volumes.load(volume_findings)
            notes += findings.marks.list_notes()
            notes += self.instances.sweep(findings, teardown)
            notes += self.streams.sweep(findings.unfinished_imports)
            notes += self._load_secrets(findings)
            notes += self._ballast.refill()
            instance_prefix = self.root.build_child_name(SANDBOXES, "")
            unreadable_datasets = [
                name
                for name in findings.marks.quarantine_reasons
                if name.startswith(instance_prefix) and "@" not in name
            ]
            return StorageScan(
                findings.snapshots,
                findings.sandboxes,
                notes,
                volume_findings.volumes,
                volume_findings.snapshots,
                unreadable_datasets,
            )

    @staticmethod
    def _remove_comparison_snapshots(names: Iterable[str]) -> list[str]:
        """Destroy the temporary snapshots of interrupted comparisons. Returns a sentence for each."""
        notes = []
        for name in names:
            try:
                zfs_core.lzc_destroy_snaps([name], False)
            except zfs_core.exceptions.ZFSError as error:
                notes.append(f"{name}: left behind by a comparison, but it could not be removed yet: {error}")
            else:
                notes.append(f"{name}: removed, because a comparison left it behind")
        return notes

    def _load_secrets(self, findings: SandboxFindings) -> list[str]:
        """Read the environments of sandboxes from their files, and move those that an older release left in properties.

        Removes files that are not in use, unless a record cannot be read, because it may refer to one of them.
        """
        notes = self._secret_files.load(findings.sandboxes, findings.secret_files)
        for sandbox in findings.sandboxes:
            if sandbox.env and sandbox.id not in findings.secret_files:
                dataset = self.instances.dataset(sandbox.instance)
                try:
                    with translated_errors():
                        self._records.write(dataset, sandbox)
                except GatewayError as error:
                    notes.append(f"{dataset}: every user can read its environment variables: {error.message}")
                else:
                    notes.append(f"{dataset}: moved its environment variables to a file that only root can read")
        return notes if findings.marks.quarantine_reasons else notes + self._secret_files.sweep()
