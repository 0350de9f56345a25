"""Send snapshots of volumes as ZFS streams, and receive volumes."""

from __future__ import annotations

from contextlib import suppress

import zfs_core
from zfs_core.stream_format import peek_begin_record

from sandbox_gateway.errors import Invalid
from sandbox_gateway.hosts.base import StreamEncoding
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import VOLUMES, RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_names import SnapshotNames
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_streams import (
    build_partial_name,
    check_stream,
    destroy_partial_dataset,
    measure,
    send,
)
from sandbox_gateway.hosts.jail_zfs.storage.volume_datasets import VolumeDatasets
from sandbox_gateway.hosts.jail_zfs.storage.zfs_errors import translate_errors
from sandbox_gateway.records import Volume


class VolumeStreams:
    """Sends snapshots of volumes, and receives volumes. Methods block, are thread-safe, and raise GatewayError."""

    def __init__(
        self, root: RootDataset, records: PropertyStore, names: SnapshotNames, datasets: VolumeDatasets
    ) -> None:
        self._root = root
        self._records = records
        self._names = names
        self._datasets = datasets

    @translate_errors
    def measure(self, snapshot_id: str) -> int:
        """Return the number of bytes that the snapshot's files use in the pool."""
        return measure(self._names, snapshot_id)

    @translate_errors
    def send(self, snapshot_id: str, file: int) -> StreamEncoding:
        """Write a stream that contains the whole snapshot, without properties, to the descriptor ``file``."""
        return send(self._names, snapshot_id, file)

    @translate_errors
    def receive(self, record: Volume, file: int) -> None:
        """Create a volume from the stream at the current position of ``file``, and set ``record.host``.

        The dataset gets its final name last. The next scan removes a dataset that was not renamed.
        """
        check_stream(peek_begin_record(file))
        dataset = self._root.build_child_name(VOLUMES, record.id)
        partial_dataset = build_partial_name(self._root, record.id)
        record.host = {"dataset": dataset}
        try:
            zfs_core.lzc_receive(f"{partial_dataset}@{record.id}", file)
            zfs_core.lzc_destroy_snaps(zfs_core.list_snapshots(partial_dataset), defer=False)
            self._set_quota(partial_dataset, record.size_mb)
            self._records.write(partial_dataset, record)
            with self._root.tree_locked():
                zfs_core.lzc_rename(partial_dataset, dataset)
        except BaseException:
            self._records.forget(record.id, partial_dataset)
            with suppress(zfs_core.exceptions.ZFSError):
                destroy_partial_dataset(partial_dataset)
            raise
        self._datasets.set_current(record.id, dataset)
        self._records.note_multipart_name(dataset)
        zfs_core.mount(dataset)

    @staticmethod
    def _set_quota(dataset: str, size_mb: int) -> None:
        used_bytes = zfs_core.get_props([dataset], ["referenced"])[dataset]["referenced"].number
        if used_bytes > size_mb << 20:
            raise Invalid(
                f"the stream in the snapshot file contains {-(-used_bytes >> 20)} MiB, which is more than the size of "
                f"its volume, {size_mb} MiB: export the snapshot again"
            )
        zfs_core.lzc_set_prop(dataset, "refquota", size_mb << 20)

    @translate_errors
    def discard(self, record: Volume) -> None:
        """Remove a received volume, and anything that a failed ``receive`` left behind."""
        if self._datasets.is_known(record.id):
            with self._root.tree_locked():
                self._datasets.tree.destroy(self._datasets.get_current(record.id))
            self._datasets.remove(record.id)
        destroy_partial_dataset(build_partial_name(self._root, record.id))
