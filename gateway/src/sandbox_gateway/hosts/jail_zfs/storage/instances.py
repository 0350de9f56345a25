"""Manage the file systems of sandboxes. Each instance is a clone that stores the record of its sandbox.

An instance that has snapshots is retired when its sandbox is removed: it is unmounted, loses its record, and is moved
to ``retired/``. It is destroyed when its last snapshot is destroyed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import zfs_core

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.jail_zfs.storage.ballast import Ballast
from sandbox_gateway.hosts.jail_zfs.storage.dataset_tree import DatasetTree
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import RECORD_PROPERTY, decode
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import RETIRED, SANDBOXES, TEMPLATE_PREFIX, RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.sandbox_scan import SandboxFindings
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_names import SnapshotNames
from sandbox_gateway.hosts.jail_zfs.storage.zfs_errors import check_quota, translate_errors
from sandbox_gateway.records import Sandbox


class InstanceStorage:
    """Manages the datasets of instances. Methods block, are thread-safe, and raise GatewayError."""

    def __init__(self, root: RootDataset, ballast: Ballast, records: PropertyStore, names: SnapshotNames) -> None:
        self._root = root
        self._ballast = ballast
        self._records = records
        self._names = names
        self.tree = DatasetTree(root, SANDBOXES, ballast, records, self._is_disposable)

    def dataset(self, instance: str) -> str:
        return self._root.build_child_name(SANDBOXES, instance)

    @property
    def directory(self) -> Path:
        """Return the directory on the host in which instances are mounted."""
        return self.tree.directory

    def path(self, instance: str) -> Path:
        """Return the mount point of an instance's file system."""
        return self.directory / instance

    # ---- creating and changing ----

    @translate_errors
    def clone(
        self, snapshot_id: str, instance: str, *, disk_mb: int | None = None, props: Mapping[str, str] | None = None
    ) -> Path:
        """Create an instance as a mounted clone of a snapshot, and return its path.

        The next scan removes the instance unless its record is saved.

        ``disk_mb`` limits the referenced data (``refquota``), in MiB. Raises NotFound, NoSpace or OverQuota.
        """
        options: dict[str, str] = dict(props or {})
        if disk_mb is not None:
            options["refquota"] = str(disk_mb << 20)
        try:
            self._names.call_with_name(
                snapshot_id, lambda origin: zfs_core.lzc_clone(self.dataset(instance), origin, options, mounted=True)
            )
        except zfs_core.exceptions.NoSpace:
            check_quota(self._names.find(snapshot_id), disk_mb)
            raise
        return self.path(instance)

    @translate_errors
    def mount(self, instance: str) -> Path:
        """Mount an instance's file system unless it is already mounted, and return its path."""
        zfs_core.mount(self.dataset(instance))
        return self.path(instance)

    @translate_errors
    def save(self, record: Sandbox) -> None:
        """Store a sandbox's record on the dataset of its instance. It supersedes older records on other instances."""
        self._records.write(self.dataset(record.instance), record)

    # ---- queries ----

    @translate_errors
    def has_diverged(self, instance: str, snapshot_id: str) -> bool:
        """Return whether the instance has changed since a snapshot of itself or an ancestor.

        Also returns True if the instance does not descend from the snapshot. Waits for pending writes. Raises NotFound.
        """
        try:
            return self._names.call_with_name(
                snapshot_id, lambda name: zfs_core.has_changed_since(self.dataset(instance), name)
            )
        except zfs_core.exceptions.SnapshotMismatch:
            return True

    @translate_errors
    def count_unique_bytes(self, instance: str) -> int:
        """Return the number of bytes that would be freed if this instance were destroyed."""
        return zfs_core.used_bytes(self.dataset(instance))

    def is_retired(self, dataset: str) -> bool:
        if not dataset.startswith(self._root.build_child_name(SANDBOXES, "")):
            return dataset.startswith(self._root.build_child_name(RETIRED, ""))
        return self.tree.is_retired(dataset)

    def belongs_to_no_sandbox(self, dataset: str) -> bool:
        """Return whether a dataset is retired or a template's, or waits for its removal, for example while it is used.

        A clone that a request is creating has no record either, but requests pin the snapshots that they clone.
        """
        if dataset.startswith(f"{self._root.dataset}/{TEMPLATE_PREFIX}"):
            return True
        if not dataset.startswith(self._root.build_child_name(SANDBOXES, "")):
            return self.is_retired(dataset)
        return RECORD_PROPERTY not in zfs_core.local_props(dataset)

    def _is_disposable(self, dataset: str) -> bool:
        return dataset.startswith(f"{self._root.dataset}/{TEMPLATE_PREFIX}") or self.is_retired(dataset)

    @staticmethod
    def identify(clone: str) -> tuple[str, str]:
        """Return the id and the name of a clone's sandbox, for error messages.

        If the clone belongs to no sandbox, both values are the name of the clone.
        """
        try:
            record = decode(zfs_core.local_props(clone), "sandbox").record
        except (ValueError, zfs_core.exceptions.DatasetNotFound):
            return clone, clone
        assert isinstance(record, Sandbox)
        return record.id, record.name

    # ---- removing ----

    @translate_errors
    def forget(self, instance: str) -> None:
        """Remove the record of an instance. The instance then belongs to no sandbox, so the next scan removes it."""
        with suppress(zfs_core.exceptions.DatasetNotFound):
            self._records.remove(self.dataset(instance))

    @translate_errors
    def discard(self, instance: str) -> bool:
        """Remove an instance and return True. If it has snapshots, retire it and return False.

        Raises Busy if its files are in use. In that case, the instance remains; if it has snapshots, it loses its
        record. A missing instance counts as removed.
        """
        with self._root.tree_locked():
            return self._discard(self.dataset(instance))

    def _discard(self, dataset: str) -> bool:
        try:
            if self.tree.destroy_or_retire(dataset):
                return True
            self._move_to_retired(dataset)
            return False
        except zfs_core.exceptions.FilesystemNotFound:
            return True

    def _move_to_retired(self, dataset: str) -> None:
        """Move a retired dataset to ``retired/``.

        zfs-fuse cannot move it while clones of its snapshots are mounted; in that case, the next scan retries.
        """
        new_name = self._root.build_child_name(RETIRED, dataset.rpartition("/")[2])
        try:
            self._ballast.run_even_if_full(lambda: zfs_core.lzc_rename(dataset, new_name, remounted=True, retry=False))
        except zfs_core.exceptions.DatasetBusy:
            return
        self._names.rename_dataset(dataset, new_name)

    # ---- after a scan ----

    def sweep(self, findings: SandboxFindings, teardown: Callable[[str], None]) -> list[str]:
        """Remove the instances and datasets that ``findings`` lists for removal. Returns a sentence for each.

        ``teardown(instance)`` is called before an instance is removed, to stop the processes in it. The caller must
        hold the tree lock (``tree_locked``).
        """
        notes = [self._remove(instance, reason, teardown) for instance, reason in findings.superseded_instances.items()]
        # query each dataset again on its own, because values of other datasets in the scan could hide a record
        notes += [
            self._remove(instance, "it was never committed, or its removal was interrupted", teardown)
            for instance in findings.uncommitted_instances
            if RECORD_PROPERTY not in zfs_core.local_props(self.dataset(instance))
        ]
        for name in findings.empty_datasets:
            self.tree.destroy_if_unused(name)
            notes.append(f"{name}: removed, because it no longer had snapshots")
        return notes + [note for name in findings.pending_moves if (note := self._retry_move(name))]

    def _remove(self, instance: str, reason: str, teardown: Callable[[str], None]) -> str:
        dataset = self.dataset(instance)
        try:
            teardown(instance)
            is_removed = self._discard(dataset)
        except (GatewayError, zfs_core.exceptions.ZFSError) as error:
            return f"{dataset}: {reason}, but it could not be removed yet: {error}"
        return f"{dataset}: {'removed' if is_removed else 'retired'}, because {reason}"

    def _retry_move(self, dataset: str) -> str:
        """Try again to move a retired dataset. Returns an error message on failure, so that the gateway can start."""
        try:
            self._move_to_retired(dataset)
        except zfs_core.exceptions.ZFSError as error:
            return f"{dataset}: retired, but it could not be moved to {self._root.dataset}/{RETIRED} yet: {error}"
        return ""
