"""Manage volumes in ZFS.

::

    <root>/volumes/<id>         a mounted volume; refquota is its size; it exists once its record is written
    <root>/volumes/<id>@<sid>   a snapshot of the volume, with its record (volume_snapshots.py)
    <root>/volumes/<id>.<n>     the volume since its nth rollback: a clone of the snapshot. Its former dataset is kept
                                unmounted, without a record, until its last snapshot is removed

A rollback renames nothing, because zfs-fuse often cannot. If two datasets have a record of the volume, the newer record
wins.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from sandbox_gateway import zfs
from sandbox_gateway.errors import GatewayError, NotFound
from sandbox_gateway.hosts.jail_zfs.storage.ballast import Ballast
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import encode
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import VOLUMES, RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.translation import check_quota, translate_errors
from sandbox_gateway.hosts.jail_zfs.storage.volume_datasets import VolumeDatasets
from sandbox_gateway.hosts.jail_zfs.storage.volume_scan import DOOMED, VolumeFindings, volume_key
from sandbox_gateway.hosts.jail_zfs.storage.volume_snapshots import VolumeSnapshots
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
        return self._datasets.directory

    def path(self, dataset: str) -> Path:
        return self._datasets.path(dataset)

    def dataset(self, volume_id: str) -> str:
        """Return the current dataset of a volume. Raises NotFound."""
        return self._datasets.current(volume_id)

    def id_at(self, path: str) -> str:
        """Return the id of the volume whose current or former dataset is mounted at ``path``; "" if there is none."""
        parent, _, name = path.rpartition("/")
        key = volume_key(name)
        return key[0] if key is not None and parent == str(self.directory) else ""

    def is_known(self, volume_id: str) -> bool | None:
        """Return whether a volume exists; None if its record cannot be read."""
        with self._root.index_lock:
            return None if volume_id in self._findings.unreadable else self._datasets.is_known(volume_id)

    @translate_errors
    def mount(self, volume_id: str) -> Path:
        """Mount a volume if necessary, and return the path of its files on the host. Raises NotFound."""
        dataset = self.dataset(volume_id)
        try:
            zfs.mount(dataset)
        except zfs.exceptions.DatasetNotFound:
            raise NotFound("volume", volume_id) from None
        return self.path(dataset)

    @translate_errors
    def used_bytes(self, volume_id: str) -> int:
        """Return the bytes of data in a volume. Raises NotFound."""
        dataset = self.dataset(volume_id)
        try:
            return zfs.get_props([dataset], ["referenced"])[dataset]["referenced"].number
        except zfs.exceptions.DatasetNotFound:
            raise NotFound("volume", volume_id) from None

    # ---- creating and growing ----

    @translate_errors
    def create(self, record: Volume, source: str | None = None) -> None:
        """Create a volume, empty and writable by every user, or as a copy of the snapshot ``source``.

        Raises NotFound, NoSpace, or OverQuota if the snapshot contains more.
        """
        dataset = self._root.child(VOLUMES, record.id)
        record.host = {"dataset": dataset}
        if source is None:
            self._create_empty(dataset, record)
        else:
            options = encode(record, 1) | {"refquota": str(record.size_mb << 20)}
            self._clone(source, dataset, options, record.size_mb)
        self._datasets.set(record.id, dataset)
        self._records.add_generations({record.id: 1})

    def _create_empty(self, dataset: str, record: Volume) -> None:
        zfs.lzc_create(dataset, props={"refquota": str(record.size_mb << 20)})
        try:
            self.path(dataset).chmod(0o777)
            self._records.write(dataset, record)
        except BaseException:
            with suppress(zfs.exceptions.ZFSError):
                self._datasets.destroy(dataset)
            raise

    def _clone(self, source: str, dataset: str, options: dict[str, str], size_mb: int) -> None:
        try:
            self._snapshots.use(source, lambda origin: zfs.lzc_clone(dataset, origin, options))
        except zfs.exceptions.NoSpace:
            self._snapshots.use(source, lambda origin: check_quota(origin, size_mb, "volume"))
            raise

    @translate_errors
    def grow(self, record: Volume, size_mb: int) -> None:
        """Increase a volume's size to ``size_mb`` MiB. If only the quota was increased, the next scan resets it."""
        dataset = self.dataset(record.id)
        zfs.lzc_set_prop(dataset, "refquota", size_mb << 20)
        try:
            self._records.write(dataset, record.model_copy(update={"size_mb": size_mb}))
        except BaseException:
            with suppress(zfs.exceptions.ZFSError):
                zfs.lzc_set_prop(dataset, "refquota", record.size_mb << 20)
            raise

    # ---- rollback ----

    @translate_errors
    def begin_rollback(self, record: Volume, snapshot_id: str) -> str:
        """Create the volume's future dataset, a mounted clone. The next scan removes it if it is not committed."""
        with self._root.tree_lock:
            own = self._datasets.all_of(record.id)
            numbers = [key[1] for name in own if (key := volume_key(name.rpartition("/")[2]))]
            dataset = self._root.child(VOLUMES, f"{record.id}.{max(numbers, default=0) + 1}")
            self._clone(snapshot_id, dataset, {"refquota": str(record.size_mb << 20)}, record.size_mb)
        return dataset

    @translate_errors
    def commit_rollback(self, record: Volume, dataset: str) -> None:
        """Make ``dataset`` the current dataset of the volume. ``settle`` then retires the former dataset."""
        self._records.write(dataset, record.model_copy(update={"host": {"dataset": dataset}}))
        record.host = {"dataset": dataset}
        self._datasets.set(record.id, dataset)

    @translate_errors
    def settle(self, volume_id: str) -> list[str]:
        """Retire or destroy the former datasets of a volume, and return their names. After Busy, call it again."""
        with self._root.tree_lock:
            current, settled = self.dataset(volume_id), []
            for dataset in self._datasets.all_of(volume_id):
                if dataset != current and not self._datasets.is_retired_for_snapshots(dataset):
                    self._datasets.retire(dataset)
                    settled.append(dataset)
            return settled

    # ---- removing ----

    @translate_errors
    def doom(self, volume_id: str) -> None:
        """Commit the removal of a volume and its snapshots, so that later scans do not return it.

        Raises UsedOutside, with all names, if volumes were made from its snapshots, or other tools took or hold
        snapshots.
        """
        with self._root.tree_lock:
            own = self._datasets.all_of(volume_id)
            names = [name for dataset in own for name in zfs.list_snapshots(dataset)]
            self._snapshots.check_no_volumes_made(names)
            self._snapshots.check_all_ours(names)
            if own:
                self._ballast.run_even_if_full(partial(zfs.lzc_set_prop, own[0], DOOMED, "yes"))
            with self._root.index_lock:
                self._datasets.remove(volume_id)
                self._snapshots.drop_names(names)

    @translate_errors
    def finish_removal(self, volume_id: str) -> None:
        """Destroy all datasets of a doomed volume. After Busy, call it again."""
        with self._root.tree_lock:
            own = self._datasets.all_of(volume_id)
            # The newest dataset depends on the others, so these must be marked before it is destroyed.
            for dataset in reversed(own):
                if DOOMED not in zfs.local_props(dataset):
                    self._ballast.run_even_if_full(partial(zfs.lzc_set_prop, dataset, DOOMED, "yes"))
            for dataset in own:
                zfs.lzc_destroy_snaps(zfs.list_snapshots(dataset), False)
                self._datasets.destroy(dataset)

    # ---- after a scan ----

    def load(self, found: VolumeFindings) -> list[str]:
        """Load the result of a scan, set sizes and mount volumes. Returns a sentence for each repair."""
        with self._root.index_lock:
            self._datasets.load(found.datasets)
            self._snapshots.load(found.snapshot_names)
            self._records.add_generations(found.generations)
            self._findings = found
        self._records.mark(found)
        notes = found.notes()
        for dataset, size in found.sizes.items():
            set_size = partial(zfs.lzc_set_prop, dataset, "refquota", size)
            notes.append(_attempt(dataset, "reset its size to the size in its record", set_size))
        mounts = [_attempt(dataset, "", partial(zfs.mount, dataset)) for dataset in found.unmounted]
        return [note for note in notes + mounts if note]

    def sweep(self) -> list[str]:
        """Remove leftovers that the last scan found, unless a jail mounts them. Returns a sentence for each."""
        found = self._findings
        notes = []
        for snapshot_id in found.orphaned:
            destroy = partial(self._snapshots.destroy, snapshot_id, deferred=True)
            reason = "removed, because the sandbox's snapshot that it belonged to does not exist"
            notes.append(_attempt(found.snapshot_names[snapshot_id], reason, destroy))
        with self._root.tree_lock:
            for dataset in found.leftover:
                reason = "retired, because a rollback replaced it or was not completed"
                notes.append(_attempt(dataset, reason, partial(self._datasets.retire, dataset)))
            for dataset in found.uncommitted:
                reason = "removed, because it was never committed"
                notes.append(_attempt(dataset, reason, partial(self._datasets.destroy, dataset)))
        for volume_id in found.doomed:
            place = self._root.child(VOLUMES, volume_id)
            notes.append(_attempt(place, "removed, as requested", partial(self.finish_removal, volume_id)))
        return notes


def _attempt(name: str, result: str, change: Callable[[], object]) -> str:
    """Make a change. Returns a sentence about its result or its failure."""
    try:
        change()
    except (GatewayError, zfs.exceptions.ZFSError) as error:
        return f"{name}: {result or 'mounted'}, but this could not be done yet: {error}"
    return result and f"{name}: {result}"
