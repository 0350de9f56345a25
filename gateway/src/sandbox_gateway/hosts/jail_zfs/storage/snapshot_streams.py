"""Send snapshots as ZFS streams, and receive them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import zfs_core
from zfs_core.process import TRANSFER_TIMEOUT_SECONDS
from zfs_core.stream_format import BeginRecord, peek_begin_record

from sandbox_gateway.errors import Invalid, NotFound, Unsupported
from sandbox_gateway.hosts.base import StreamEncoding
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
    def send(self, snapshot_id: str, file: int, resume_token: str = "") -> StreamEncoding:
        """Write a stream that contains the whole snapshot, without properties, to the descriptor ``file``.

        ``resume_token``: write only the rest, after what another host has received.
        """
        return send(self._names, snapshot_id, file, resume_token)

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
        check_stream(peek_begin_record(file))
        try:
            zfs_core.lzc_receive(self._build_partial_snapshot_name(record), file)
            self.complete(record)
        except BaseException:
            with suppress(zfs_core.exceptions.ZFSError):
                destroy_partial_dataset(self._build_partial_name(record))
            raise

    @translate_errors
    def receive_part(self, record: Snapshot, file: int, size: int) -> None:
        """Receive a stream of ``size`` bytes, or its rest, from a pipe. If the pipe ends early, keeps what arrived.

        Call ``complete`` afterwards. The next scan removes what was received before that.
        """
        seconds = max(TRANSFER_TIMEOUT_SECONDS, size / _MIN_BYTES_PER_SECOND)
        zfs_core.lzc_receive_resumable(self._build_partial_snapshot_name(record), file, seconds=seconds)

    @translate_errors
    def get_resume_token(self, record: Snapshot) -> str:
        """Return the token of a snapshot that was received in part, or "" if nothing of it was kept."""
        return _get_resume_token(self._build_partial_name(record))

    @translate_errors
    def complete(self, record: Snapshot) -> None:
        """Commit the record of a snapshot that has been received, and give its dataset the final name."""
        full_name = self._build_full_name(record)
        record.host = {"zfsSnapshot": full_name}
        dataset, _, short_name = full_name.partition("@")
        partial_dataset = self._build_partial_name(record)
        partial_name, name = f"{partial_dataset}@{short_name}", f"{dataset}@{short_name}"
        try:
            for prop, value in UNMOUNTED_PROPERTIES.items():
                zfs_core.lzc_set_prop(partial_dataset, prop, value)
            self._records.write(partial_name, record)
            with self._root.tree_locked():
                zfs_core.lzc_rename(partial_dataset, dataset)
        except BaseException:
            self._records.forget(record.id, partial_name)
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

    def _build_partial_snapshot_name(self, record: Snapshot) -> str:
        return f"{self._build_partial_name(record)}@{self._build_full_name(record).partition('@')[2]}"

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


def send(names: SnapshotNames, snapshot_id: str, file: int, resume_token: str = "") -> StreamEncoding:
    """Write a stream that contains a whole snapshot, without properties, to ``file``.

    ``resume_token``: write only the rest, after what another host has received. Raises NotFound, Invalid, Unsupported
    and ZFSError.
    """
    if resume_token:
        return names.call_with_name(snapshot_id, lambda name: _send_rest(name, file, resume_token))
    return names.call_with_name(snapshot_id, lambda name: _send_whole(name, file))


def _send_whole(name: str, file: int) -> StreamEncoding:
    if not zfs_core.detect_capabilities().send_options:
        zfs_core.lzc_send(name, None, file)
        return StreamEncoding.PLAIN
    is_encrypted = zfs_core.get_props([name], ["encryption"])[name]["encryption"].value not in ("off", "-")
    encoding = StreamEncoding.RAW if is_encrypted else StreamEncoding.COMPRESSED
    zfs_core.lzc_send(name, None, file, [_FLAGS[encoding]])
    return encoding


def _send_rest(name: str, file: int, resume_token: str) -> StreamEncoding:
    if not zfs_core.detect_capabilities().send_options:
        raise Unsupported("zfs-fuse cannot send the rest of a stream: export the snapshot without a resume token")
    try:
        values = zfs_core.parse_resume_token(resume_token)
        guid, object_number, offset = (values[key] for key in ("toguid", "object", "offset"))
    except Exception:  # The token can contain anything.
        raise Invalid("the resume token is invalid: copy it from the list of interrupted imports") from None
    flags = [flag for word, flag in _FLAGS_BY_WORD.items() if word in values]
    if guid != zfs_core.get_props([name], ["guid"])[name]["guid"].number or "fromguid" in values:
        raise Invalid("the resume token belongs to another snapshot: export that one, or omit the token")
    if not isinstance(object_number, int) or not isinstance(offset, int) or not {"compress", "raw"} & {*flags}:
        raise Invalid("the resume token does not belong to an import: export the snapshot without it")
    zfs_core.lzc_send_resume(name, None, file, flags, object_number, offset)
    return StreamEncoding.RAW if "raw" in flags else StreamEncoding.COMPRESSED


_FLAGS = {StreamEncoding.COMPRESSED: "compress", StreamEncoding.RAW: "raw"}
_FLAGS_BY_WORD = {
    "embedok": "embedded_data",
    "largeblockok": "large_blocks",
    "compressok": "compress",
    "rawok": "raw",
}
"""The flags of ``lzc_send`` by the words in a resume token."""
_MIN_BYTES_PER_SECOND = 64 << 10
"""Clients that send a file more slowly are disconnected."""


def _get_resume_token(dataset: str) -> str:
    """Return the token of a dataset that was received in part, or "" if it was not, or does not exist."""
    if not zfs_core.detect_capabilities().receive_options:
        return ""
    with suppress(zfs_core.exceptions.DatasetNotFound):
        value = zfs_core.get_props([dataset], ["receive_resume_token"])[dataset]["receive_resume_token"].value
        return "" if value == "-" else value
    return ""


def destroy_partial_dataset(dataset: str) -> None:
    """Destroy a dataset that has at most the snapshot of its import. Does nothing if it does not exist."""
    with suppress(zfs_core.exceptions.FilesystemNotFound):
        if _get_resume_token(dataset):
            zfs_core.abort_receive(dataset)
            return
        zfs_core.lzc_destroy_snaps(zfs_core.list_snapshots(dataset), defer=False)
        zfs_core.lzc_destroy(dataset, unmounted=True)


def check_stream(record: BeginRecord | None, *, is_resuming: bool = False) -> None:
    """Raise Invalid unless the stream contains exactly one complete snapshot of a file system.

    ``record``: the beginning of the stream. ``is_resuming``: the stream must contain the rest of such a snapshot.
    """
    if record is None:
        problem = "does not begin with the header of a ZFS stream"
    elif record.is_package:
        problem = "is a package of several snapshots"
    elif record.is_incremental or record.is_clone or record.is_resuming != is_resuming:
        problem = "needs another snapshot"
    elif not record.is_filesystem:
        problem = "does not contain a file system"
    else:
        return
    raise Invalid(f"the ZFS stream in the snapshot file {problem}: export the snapshot again")
