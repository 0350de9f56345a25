"""Send snapshots as ZFS streams, and receive them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import zfs_core
from zfs_core.stream_format import peek_begin_record

from sandbox_gateway.errors import Invalid, NotFound
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import (
    IMPORT_PREFIX,
    RETIRED,
    TEMPLATE_PREFIX,
    UNMOUNTED_PROPERTIES,
    RootDataset,
)
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_names import SnapshotNames
from sandbox_gateway.hosts.jail_zfs.storage.snapshots import BASE_NAME, SnapshotStorage
from sandbox_gateway.hosts.jail_zfs.storage.zfs_errors import attempt, translate_errors
from sandbox_gateway.records import Snapshot, SnapshotKind


class SnapshotStreams:
    """Sends and receives snapshots. Methods block, are thread-safe, and raise GatewayError."""

    def __init__(
        self, root: RootDataset, records: PropertyStore, names: SnapshotNames, snapshots: SnapshotStorage
    ) -> None:
        self._root = root
        self._records = records
        self._names = names
        self._snapshots = snapshots

    @translate_errors
    def measure(self, snapshot_id: str) -> int:
        """Return the number of bytes that the snapshot's files use in the pool."""
        return measure(self._names, snapshot_id)

    @translate_errors
    def send(self, snapshot_id: str, file: int) -> None:
        """Write a stream that contains the whole snapshot, without properties, to the descriptor ``file``."""
        send(self._names, snapshot_id, file)

    def _build_full_name(self, record: Snapshot) -> str:
        """Return the full name, ``dataset@snapshot``, that a received snapshot gets."""
        if record.kind is SnapshotKind.TEMPLATE:
            return f"{self._root.dataset}/{TEMPLATE_PREFIX}{record.id}@{BASE_NAME}"
        return f"{self._root.build_child_name(RETIRED, record.id)}@{record.id}"

    @translate_errors
    def receive(self, record: Snapshot, file: int) -> None:
        """Create a snapshot from the stream at the current position of ``file``, and set ``record.host``.

        The dataset gets its final name last. The next scan removes a dataset that was not renamed.
        """
        check_stream(file)
        full_name = self._build_full_name(record)
        record.host = {"zfsSnapshot": full_name}
        dataset, _, short_name = full_name.partition("@")
        partial_dataset = self._build_partial_name(record)
        partial_name, name = f"{partial_dataset}@{short_name}", f"{dataset}@{short_name}"
        try:
            zfs_core.lzc_receive(partial_name, file)
            for prop, value in UNMOUNTED_PROPERTIES.items():
                zfs_core.lzc_set_prop(partial_dataset, prop, value)
            self._records.write(partial_name, record)
            with self._root.tree_locked():
                zfs_core.lzc_rename(partial_dataset, dataset)
        except BaseException:
            self._records.forget(record.id, partial_name)
            with suppress(zfs_core.exceptions.ZFSError):
                destroy_partial_dataset(partial_dataset)
            raise
        with self._root.index_lock:
            self._names.add({record.id: name})
            self._records.note_multipart_name(name)

    @translate_errors
    def discard(self, record: Snapshot) -> None:
        """Remove a received snapshot, and anything that a failed ``receive`` left behind."""
        with suppress(NotFound):
            self._snapshots.destroy(record.id)
        destroy_partial_dataset(self._build_partial_name(record))

    def _build_partial_name(self, record: Snapshot) -> str:
        return build_partial_name(self._root, record.id)

    def sweep(self, datasets: list[str]) -> list[str]:
        """Remove datasets of interrupted imports. Returns a sentence for each."""
        reason = "because its import was interrupted"
        return [attempt(name, "removed", reason, partial(destroy_partial_dataset, name)) for name in datasets]


def build_partial_name(root: RootDataset, id: str) -> str:
    """Return the name of the dataset in which an import is created. The next scan removes such datasets."""
    return root.build_child_name(RETIRED, f"{IMPORT_PREFIX}{id}")


def measure(names: SnapshotNames, snapshot_id: str) -> int:
    """Return the number of bytes that a snapshot's files use in the pool. Raises NotFound and ZFSError."""
    return names.call_with_name(
        snapshot_id, lambda name: zfs_core.get_props([name], ["referenced"])[name]["referenced"].number
    )


def send(names: SnapshotNames, snapshot_id: str, file: int) -> None:
    """Write a stream that contains a whole snapshot, without properties, to ``file``. Raises NotFound and ZFSError."""
    names.call_with_name(snapshot_id, lambda name: zfs_core.lzc_send(name, None, file))


def destroy_partial_dataset(dataset: str) -> None:
    """Destroy a dataset that has at most the snapshot of its import. Does nothing if it does not exist."""
    with suppress(zfs_core.exceptions.FilesystemNotFound):
        zfs_core.lzc_destroy_snaps(zfs_core.list_snapshots(dataset), defer=False)
        zfs_core.lzc_destroy(dataset, unmounted=True)


def check_stream(file: int) -> None:
    """Raise Invalid unless the stream contains exactly one complete snapshot of a file system."""
    record = peek_begin_record(file)
    if record is None:
        problem = "does not begin with the header of a ZFS stream"
    elif record.is_package:
        problem = "is a package of several snapshots"
    elif record.is_incremental or record.is_clone or record.is_resuming:
        problem = "needs another snapshot"
    elif record.is_raw:
        problem = "is encrypted"
    elif not record.is_filesystem:
        problem = "does not contain a file system"
    else:
        return
    raise Invalid(f"the ZFS stream in the snapshot file {problem}: export the snapshot again")
