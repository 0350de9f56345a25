"""The file systems of sandboxes: a clone for each instance, with the record of its sandbox.

An instance whose snapshots are still needed is retired when its sandbox is removed: it is unmounted, loses its record,
and is renamed to ``retired/``. It is destroyed with its last snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway import zfs
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.jail_zfs.storage.ballast import Ballast
from sandbox_gateway.hosts.jail_zfs.storage.marks import is_retired
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import HEAD, decode
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import RETIRED, SANDBOXES, TEMPLATE, RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.sandbox_scan import SandboxFindings
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_names import SnapshotNames
from sandbox_gateway.hosts.jail_zfs.storage.translation import check_quota, translate_errors
from sandbox_gateway.records import Sandbox


@dataclass(frozen=True)
class SpaceUsage:
    """The disk usage of an instance, in bytes. ``referenced``: reachable in it; ``unique``: freed by destroying it."""

    referenced: int
    unique: int
    available: int


class InstanceStorage:
    """Manages the datasets of instances. Methods block, are thread-safe, and raise GatewayError."""

    def __init__(self, root: RootDataset, ballast: Ballast, records: PropertyStore, names: SnapshotNames) -> None:
        self._root = root
        self._ballast = ballast
        self._records = records
        self._names = names

    def dataset(self, instance: str) -> str:
        return self._root.child(SANDBOXES, instance)

    def path(self, instance: str) -> Path:
        """Return the mount point of an instance's file system."""
        return self._root.mountpoint / SANDBOXES / instance

    # ---- creating and changing ----

    @translate_errors
    def clone(
        self, snapshot_id: str, instance: str, *, disk_mb: int | None = None, props: Mapping[str, str] | None = None
    ) -> Path:
        """Clone a snapshot as an instance, mount it, and return its path. The next scan removes it unless it is saved.

        ``disk_mb`` limits the referenced data (``refquota``), in MiB. Raises NotFound, NoSpace, OverQuota.
        """
        options: dict[str, str] = dict(props or {})
        if disk_mb is not None:
            options["refquota"] = str(disk_mb << 20)
        try:
            self._names.use(snapshot_id, lambda origin: zfs.lzc_clone(self.dataset(instance), origin, options))
        except zfs.exceptions.NoSpace:
            check_quota(self._names.find(snapshot_id), disk_mb)
            raise
        return self.path(instance)

    @translate_errors
    def mount(self, instance: str) -> Path:
        """Mount an instance's file system, if a restart of the host has unmounted it. Returns its path."""
        zfs.mount(self.dataset(instance))
        return self.path(instance)

    @translate_errors
    def set_disk(self, instance: str, disk_mb: int) -> None:
        """Change the limit of an instance's referenced data, in MiB.

        Raises OverQuota if it already contains more.
        """
        zfs.lzc_set_prop(self.dataset(instance), "refquota", disk_mb << 20)

    @translate_errors
    def save(self, record: Sandbox) -> None:
        """Commit a sandbox's record on the dataset of its instance. It replaces older records on other instances."""
        self._records.write(self.dataset(record.instance), record)

    # ---- queries ----

    @translate_errors
    def has_diverged(self, instance: str, snapshot_id: str) -> bool:
        """Return whether the instance has changed since a snapshot of itself or of an ancestor.

        Also True if the instance does not descend from the snapshot. Waits for pending writes. Raises NotFound.
        """
        try:
            return self._names.use(snapshot_id, lambda place: zfs.has_changed_since(self.dataset(instance), place))
        except zfs.exceptions.SnapshotMismatch:
            return True

    @translate_errors
    def usage(self, instance: str) -> SpaceUsage:
        facts = zfs.get_props([self.dataset(instance)], ["referenced", "used", "available"])[self.dataset(instance)]
        return SpaceUsage(facts["referenced"].number, facts["used"].number, facts["available"].number)

    def is_retired(self, dataset: str) -> bool:
        if not dataset.startswith(self._root.child(SANDBOXES, "")):
            return dataset.startswith(self._root.child(RETIRED, ""))
        facts = zfs.get_props([dataset], ["canmount", HEAD])[dataset]
        return is_retired(facts["canmount"], facts[HEAD].is_local)

    @staticmethod
    def identify(clone: str) -> tuple[str, str]:
        """Return ``(sandbox id, name)`` of a clone for error messages; ``(dataset, dataset)`` if it has no sandbox."""
        try:
            record = decode(zfs.local_props(clone), "sandbox").record
        except (ValueError, zfs.exceptions.DatasetNotFound):
            return clone, clone
        assert isinstance(record, Sandbox)
        return record.id, record.name

    # ---- removing ----

    @translate_errors
    def forget(self, instance: str) -> None:
        """Drop the record of an instance, which then belongs to no sandbox: the next scan removes it."""
        with suppress(zfs.exceptions.DatasetNotFound):
            self._records.remove(self.dataset(instance))

    @translate_errors
    def discard(self, instance: str) -> bool:
        """Remove an instance. Returns False if it is retired instead, because its snapshots must stay.

        Raises Busy if its files are in use; the instance then remains (without its record, if it has snapshots). A
        missing instance counts as removed.
        """
        with self._root.tree_lock:
            return self._discard(self.dataset(instance))

    def _discard(self, dataset: str) -> bool:
        try:
            if zfs.list_snapshots(dataset):
                self._retire(dataset)
                return False
            self.destroy_dataset(dataset)
        except zfs.exceptions.FilesystemNotFound:
            pass
        return True

    def _retire(self, dataset: str) -> None:
        """Retire a dataset. A dataset without a record and with ``canmount=noauto`` counts as retired, even before it
        is renamed.

        zfs-fuse cannot rename a dataset while clones of its snapshots are mounted. The next scan then retries.
        """
        self._records.remove(dataset)
        zfs.unmount(dataset)
        self._ballast.run_even_if_full(lambda: zfs.lzc_set_prop(dataset, "canmount", "noauto"))
        self._remove_mount_point(dataset)
        self._move_to_retired(dataset)

    def _move_to_retired(self, dataset: str) -> None:
        retired = self._root.child(RETIRED, dataset.rpartition("/")[2])
        try:
            self._ballast.run_even_if_full(lambda: zfs.lzc_rename(dataset, retired, retry=False))
        except zfs.exceptions.DatasetBusy:
            return
        self._names.move(dataset, retired)

    def destroy_dataset(self, dataset: str) -> None:
        """Destroy a dataset without snapshots, and retired datasets that are no longer needed."""
        origin = zfs.get_props([dataset], ["origin"])[dataset]["origin"].value
        zfs.unmount(dataset)
        zfs.lzc_destroy(dataset)
        self._remove_mount_point(dataset)
        if origin != "-":
            self.destroy_if_unused(origin.partition("@")[0])

    def _remove_mount_point(self, dataset: str) -> None:
        """Remove the mount point of a dataset. Ignores failures, because an empty mount point does no harm."""
        if self._root.is_mounted:
            with suppress(OSError):
                self.path(dataset.rpartition("/")[2]).rmdir()

    def destroy_if_unused(self, dataset: str) -> None:
        """Destroy a retired dataset or a template's dataset without snapshots, then its origin's dataset in the same
        way.

        Ignores failures: the caller's work is done, and the next scan retries.
        """
        with suppress(zfs.exceptions.ZFSError):
            disposable = dataset.startswith(f"{self._root.dataset}/{TEMPLATE}") or self.is_retired(dataset)
            if disposable and not zfs.list_snapshots(dataset):
                self.destroy_dataset(dataset)

    # ---- after a scan ----

    def sweep(self, found: SandboxFindings, teardown: Callable[[str], None]) -> list[str]:
        """Remove uncommitted instances. Returns a sentence for each. The caller holds ``tree_lock``.

        ``teardown(instance)`` is called before an instance is removed, to end processes in it.
        """
        notes = [self._remove(instance, reason, teardown) for instance, reason in found.superseded.items()]
        # query again, for each dataset alone, so that no value on another dataset can hide a record
        notes += [
            self._remove(instance, "it was never committed, or its removal was interrupted", teardown)
            for instance in found.uncommitted
            if HEAD not in zfs.local_props(self.dataset(instance))
        ]
        for name in found.empty:
            self.destroy_if_unused(name)
            notes.append(f"{name}: removed, because it no longer had snapshots")
        return notes + [note for name in found.to_move if (note := self._retry_move(name))]

    def _remove(self, instance: str, reason: str, teardown: Callable[[str], None]) -> str:
        dataset = self.dataset(instance)
        try:
            teardown(instance)
            gone = self._discard(dataset)
        except (GatewayError, zfs.exceptions.ZFSError) as error:
            return f"{dataset}: {reason}, but it could not be removed yet: {error}"
        return f"{dataset}: {'removed' if gone else 'retired'}, because {reason}"

    def _retry_move(self, dataset: str) -> str:
        """Retry moving a retired dataset. Returns a sentence on failure, so that the gateway can start."""
        try:
            self._move_to_retired(dataset)
        except zfs.exceptions.ZFSError as error:
            return f"{dataset}: retired, but it could not be moved to {self._root.dataset}/{RETIRED} yet: {error}"
        return ""
