"""Manage volumes in ZFS.

::

    <root>/volumes/<id>         a volume, mounted; its size is the refquota; it exists once its record is written
    <root>/volumes/<id>@<sid>   a snapshot of the volume, with its record (volume_snapshots.py)
    <root>/volumes/<id>.<n>     the volume since its nth rollback: a clone of the snapshot. The former dataset is kept
                                unmounted, without a record, until its last snapshot is removed

A rollback does not rename datasets, because zfs-fuse often cannot rename them. If two datasets have a record of the
volume, the newer record wins.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

import zfs_core

from sandbox_gateway.errors import NotFound
from sandbox_gateway.hosts.jail_zfs.storage.ballast import Ballast
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import DOOMED_PROPERTY, encode
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import VOLUMES, RootDataset, parse_volume_key
from sandbox_gateway.hosts.jail_zfs.storage.volume_datasets import VolumeDatasets
from sandbox_gateway.hosts.jail_zfs.storage.volume_scan import VolumeFindings
from sandbox_gateway.hosts.jail_zfs.storage.volume_snapshots import VolumeSnapshots
from sandbox_gateway.hosts.jail_zfs.storage.zfs_errors import attempt, check_quota, translate_errors
from sandbox_gateway.records import Volume


class VolumeStorage:
    """Manages volumes in ZFS. Methods block, are thread-safe, and raise GatewayError."""

    def __init__(
        self,
        root: RootDataset,
        ballast: Ballast,
        records: PropertyStore,
        datasets: VolumeDatasets,
        snapshots: VolumeSnapshots,
    ) -> None:
        self._root = root
        self._ballast = ballast
        self._records = records
        self._datasets = datasets
        self._snapshots = snapshots
        self._findings = VolumeFindings()

    # ---- paths ----

    @property
    def directory(self) -> Path:
        """Return the directory on the host in which volumes are mounted."""
        return self._datasets.tree.directory

    def path(self, dataset: str) -> Path:
        return self._datasets.tree.path(dataset)

    def dataset(self, volume_id: str) -> str:
        """Return the current dataset of a volume. Raises NotFound."""
        return self._datasets.get_current(volume_id)

    def find_id(self, path: str) -> str:
        """Return the id of the volume whose current or former dataset is mounted at ``path``, or "" if none is."""
        parent, _, name = path.rpartition("/")
        key = parse_volume_key(name)
        return key[0] if key is not None and parent == str(self.directory) else ""

    def is_known(self, volume_id: str) -> bool | None:
        """Return whether a volume exists, or None if its record cannot be read."""
        with self._root.index_lock:
            return None if volume_id in self._findings.unreadable_ids else self._datasets.is_known(volume_id)

    @translate_errors
    def mount(self, volume_id: str) -> Path:
        """Mount a volume if necessary, and return the path of its files on the host. Raises NotFound."""
        dataset = self.dataset(volume_id)
        try:
            zfs_core.mount(dataset)
        except zfs_core.exceptions.DatasetNotFound:
            raise NotFound("volume", volume_id) from None
        return self.path(dataset)

    @translate_errors
    def count_used_bytes(self, volume_id: str) -> int:
        """Return the size of the data in a volume, in bytes. Raises NotFound."""
        dataset = self.dataset(volume_id)
        try:
            return zfs_core.get_props([dataset], ["referenced"])[dataset]["referenced"].number
        except zfs_core.exceptions.DatasetNotFound:
            raise NotFound("volume", volume_id) from None

    # ---- creating and growing ----

    @translate_errors
    def create(self, record: Volume, source: str | None = None) -> None:
        """Create a volume as a copy of the snapshot ``source``, or empty and writable by every user.

        Raises NotFound or NoSpace, and OverQuota if the snapshot is larger than the volume.
        """
        dataset = self._root.build_child_name(VOLUMES, record.id)
        record.host = {"dataset": dataset}
        if source is None:
            self._create_empty(dataset, record)
        else:
            props = encode(record, 1) | {"refquota": str(record.size_mb << 20)}
            self._clone(source, dataset, props, record.size_mb)
        self._datasets.set_current(record.id, dataset)
        self._records.add_generations({record.id: 1})

    def _create_empty(self, dataset: str, record: Volume) -> None:
        zfs_core.lzc_create(dataset, props={"refquota": str(record.size_mb << 20)}, mounted=True)
        try:
            self.path(dataset).chmod(0o777)
            self._records.write(dataset, record)
        except BaseException:
            with suppress(zfs_core.exceptions.ZFSError):
                self._datasets.tree.destroy(dataset)
            raise

    def _clone(self, source: str, dataset: str, props: dict[str, str], size_mb: int) -> None:
        try:
            self._snapshots.names.call_with_name(
                source, lambda origin: zfs_core.lzc_clone(dataset, origin, props, mounted=True)
            )
        except zfs_core.exceptions.NoSpace:
            self._snapshots.names.call_with_name(source, lambda origin: check_quota(origin, size_mb, "volume"))
            raise

    @translate_errors
    def grow(self, record: Volume, size_mb: int) -> None:
        """Increase a volume's size to ``size_mb`` MiB. After an interruption, the next scan resets the quota."""
        dataset = self.dataset(record.id)
        zfs_core.lzc_set_prop(dataset, "refquota", size_mb << 20)
        try:
            self._records.write(dataset, record.model_copy(update={"size_mb": size_mb}))
        except BaseException:
            with suppress(zfs_core.exceptions.ZFSError):
                zfs_core.lzc_set_prop(dataset, "refquota", record.size_mb << 20)
            raise

    # ---- rollback ----

    @translate_errors
    def begin_rollback(self, record: Volume, snapshot_id: str) -> str:
        """Create the volume's next dataset as a mounted clone of the snapshot, and return its name.

        The next scan removes the dataset unless the rollback is committed.
        """
        with self._root.tree_locked():
            datasets = self._datasets.list_all(record.id)
            rollback_numbers = [key[1] for name in datasets if (key := parse_volume_key(name.rpartition("/")[2]))]
            dataset = self._root.build_child_name(VOLUMES, f"{record.id}.{max(rollback_numbers, default=0) + 1}")
            self._clone(snapshot_id, dataset, {"refquota": str(record.size_mb << 20)}, record.size_mb)
        return dataset

    @translate_errors
    def commit_rollback(self, record: Volume, dataset: str) -> None:
        """Make ``dataset`` the current dataset of the volume. Then call ``retire_former_datasets``."""
        self._records.write(dataset, record.model_copy(update={"host": {"dataset": dataset}}))
        record.host = {"dataset": dataset}
        self._datasets.set_current(record.id, dataset)

    @translate_errors
    def retire_former_datasets(self, volume_id: str) -> list[str]:
        """Retire or destroy a volume's former datasets, and return their names. If this raises Busy, call it again."""
        with self._root.tree_locked():
            current_dataset, names = self.dataset(volume_id), []
            for dataset in self._datasets.list_all(volume_id):
                if dataset != current_dataset and not self._datasets.is_retired_with_snapshots(dataset):
                    self._datasets.tree.destroy_or_retire(dataset)
                    names.append(dataset)
            return names

    # ---- removing ----

    @translate_errors
    def commit_removal(self, volume_id: str) -> None:
        """Commit the removal of a volume and its snapshots, so that later scans do not return it.

        Raises InUseExternally, with the names of all users, if other volumes are clones of its snapshots, or if other
        tools took or hold snapshots of it.
        """
        with self._root.tree_locked():
            datasets = self._datasets.list_all(volume_id)
            names = [name for dataset in datasets for name in zfs_core.list_snapshots(dataset)]
            self._snapshots.check_no_cloned_volumes(names)
            self._snapshots.check_only_own_snapshots(names)
            if datasets:
                self._ballast.run_even_if_full(partial(zfs_core.lzc_set_prop, datasets[0], DOOMED_PROPERTY, "yes"))
            with self._root.index_lock:
                self._datasets.remove(volume_id)
                self._snapshots.names.remove_names(names)

    @translate_errors
    def finish_removal(self, volume_id: str) -> None:
        """Destroy all datasets of a doomed volume. If this raises Busy, call it again."""
        with self._root.tree_locked():
            datasets = self._datasets.list_all(volume_id)
            # Mark the other datasets before the newest one, which depends on them, is destroyed.
            for dataset in reversed(datasets):
                if DOOMED_PROPERTY not in zfs_core.local_props(dataset):
                    self._ballast.run_even_if_full(partial(zfs_core.lzc_set_prop, dataset, DOOMED_PROPERTY, "yes"))
            for dataset in datasets:
                zfs_core.lzc_destroy_snaps(zfs_core.list_snapshots(dataset), False)
                self._datasets.tree.destroy(dataset)

    # ---- after a scan ----

    def load(self, findings: VolumeFindings) -> list[str]:
        """Load the result of a scan, correct quotas and mount volumes. Returns a sentence for each repair."""
        with self._root.index_lock:
            self._datasets.load(findings.datasets)
            self._snapshots.names.load(findings.snapshot_names)
            self._records.add_generations(findings.generations)
            self._findings = findings
        self._records.mark(findings.marks)
        notes = findings.marks.list_notes()
        for dataset, size in findings.correct_sizes.items():
            set_quota = partial(zfs_core.lzc_set_prop, dataset, "refquota", size)
            action = "reset to the size in its record"
            notes.append(attempt(dataset, action, "because its quota was different", set_quota))
        mount_notes = [
            attempt(dataset, "mounted", "", partial(zfs_core.mount, dataset)) for dataset in findings.unmounted_datasets
        ]
        return [note for note in notes + mount_notes if note]

    def sweep(self) -> list[str]:
        """Remove leftovers that the last scan found, unless a jail has them mounted. Returns a sentence for each."""
        findings = self._findings
        notes = []
        for snapshot_id in findings.orphaned_ids:
            destroy = partial(self._snapshots.destroy, snapshot_id, deferred=True)
            reason = "because the sandbox's snapshot that it belonged to does not exist"
            notes.append(attempt(findings.snapshot_names[snapshot_id], "removed", reason, destroy))
        with self._root.tree_locked():
            tree = self._datasets.tree
            for dataset in findings.leftover_datasets:
                reason = "because a rollback replaced it or was not completed"
                notes.append(attempt(dataset, "retired", reason, partial(tree.destroy_or_retire, dataset)))
            for dataset in findings.uncommitted_datasets:
                reason = "because it was never committed"
                notes.append(attempt(dataset, "removed", reason, partial(tree.destroy, dataset)))
        for volume_id in findings.doomed_ids:
            name = self._root.build_child_name(VOLUMES, volume_id)
            notes.append(attempt(name, "removed", "as requested", partial(self.finish_removal, volume_id)))
        return notes
