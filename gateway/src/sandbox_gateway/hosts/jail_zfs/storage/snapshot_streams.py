"""Send snapshots as ZFS streams, and receive them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import zfs_core
from zfs_core.process import TRANSFER_TIMEOUT_SECONDS
from zfs_core.stream_format import BeginRecord, peek_begin_record

from sandbox_gateway.errors import BackendFailed, Invalid, NotFound, Unsupported
from sandbox_gateway.hosts.base import ImportBase, StreamEncoding
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
    def find_export_bases(self, snapshot_id: str) -> dict[str, int]:
        """Return the guids of the snapshots since which this one can be sent, by id. The nearest is first.

        These are the earlier snapshots in its dataset, and the snapshot from which the dataset was cloned. Only OpenZFS
        can send what has changed since an older ancestor. Raises NotFound.
        """
        # No dataset must be renamed before the ids are looked up.
        with self._root.tree_locked():
            return self._names.call_with_name(snapshot_id, self._find_export_bases)

    def _find_export_bases(self, name: str) -> dict[str, int]:
        dataset = name.partition("@")[0]
        origin = zfs_core.get_props([dataset], ["origin"])[dataset]["origin"].value
        snapshots = zfs_core.list_snapshots(dataset)
        if name not in snapshots:
            raise zfs_core.exceptions.SnapshotNotFound(name)
        candidates = [*reversed(snapshots[: snapshots.index(name)]), origin]
        ids = self._names.find_ids()
        bases = {candidate: ids[candidate] for candidate in candidates if candidate in ids}
        facts = zfs_core.get_props([*bases], ["guid"]) if bases else {}
        return {id: facts[base]["guid"].number for base, id in bases.items()}

    @translate_errors
    def find_by_guid(self, guid: int) -> list[str]:
        """Return the ids of the snapshots with this guid, which a snapshot keeps when it is sent and received."""
        with self._root.tree_locked():
            facts = zfs_core.get_tree(self._root.dataset, ["guid"])
            ids = self._names.find_ids()
        return [ids[name] for name, props in facts.items() if name in ids and props["guid"].number == guid]

    @translate_errors
    def measure(self, snapshot_id: str, *, base_id: str = "") -> int:
        """Return the number of bytes that the snapshot's files use in the pool.

        ``base_id``: return at most the number of bytes that differ from this base.
        """
        size = measure(self._names, snapshot_id)
        return min(size, self._names.call_with_name(snapshot_id, _measure_dataset)) if base_id else size

    @translate_errors
    def send(self, snapshot_id: str, file: int, *, base_id: str = "", resume_token: str = "") -> StreamEncoding:
        """Write a stream that contains the whole snapshot, without properties, to the descriptor ``file``.

        ``base_id``: write only what differs from this snapshot. ``resume_token``: write only the rest, after what
        another host has received.
        """
        if resume_token:
            return self._names.call_with_name(snapshot_id, lambda name: _send_rest(name, file, resume_token))
        if base_id:
            return self._names.call_with_name(
                snapshot_id,
                lambda name: self._names.call_with_name(base_id, lambda base: _send(name, file, base=base)),
            )
        return send(self._names, snapshot_id, file)

    def _build_full_name(self, record: Snapshot) -> str:
        """Return the full name, ``dataset@snapshot``, that a received snapshot gets."""
        if record.kind is SnapshotKind.TEMPLATE:
            return f"{self._root.dataset}/{TEMPLATE_PREFIX}{record.id}@{BASE_NAME}"
        return f"{self._root.build_child_name(RETIRED, record.id)}@{record.id}"

    @translate_errors
    def receive(self, record: Snapshot, file: int, *, base: ImportBase | None = None) -> None:
        """Create a snapshot from the stream at the current position of ``file``, and set ``record.host``.

        ``base``: the snapshot that the stream needs. The dataset becomes a clone of it. The dataset gets its final name
        last. The next scan removes a dataset that was not renamed.
        """
        check_stream(peek_begin_record(file), base=base)
        name = self._build_partial_snapshot_name(record)
        try:
            if base is None:
                zfs_core.lzc_receive(name, file)
            else:
                if not zfs_core.detect_capabilities().receive_options:
                    _mark_as_clone(file)
                self._names.call_with_name(
                    base.snapshot.id, lambda origin: zfs_core.lzc_receive(name, file, origin=origin)
                )
            self.complete(record)
        except BaseException:
            with suppress(zfs_core.exceptions.ZFSError):
                destroy_partial_dataset(self._build_partial_name(record))
            raise

    @translate_errors
    def receive_part(self, record: Snapshot, file: int, size: int, *, base: ImportBase | None = None) -> None:
        """Receive a stream of ``size`` bytes, or its rest, from a pipe. If the pipe ends early, keeps what arrived.

        ``base``: see ``receive``. Call ``complete`` afterwards. The next scan removes what was received before that.
        """
        seconds = max(TRANSFER_TIMEOUT_SECONDS, size / _MIN_BYTES_PER_SECOND)
        name = self._build_partial_snapshot_name(record)
        if base is None:
            zfs_core.lzc_receive_resumable(name, file, seconds=seconds)
            return
        self._names.call_with_name(
            base.snapshot.id, lambda origin: zfs_core.lzc_receive_resumable(name, file, origin=origin, seconds=seconds)
        )

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
        self._check_origin(partial_dataset)
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

    def _check_origin(self, dataset: str) -> None:
        """Raise BackendFailed if a received dataset is a clone of a snapshot that does not belong to this gateway.

        zfs-fuse itself chooses one of the snapshots in the pool that have the right guid.
        """
        origin = zfs_core.get_props([dataset], ["origin"])[dataset]["origin"].value
        if origin != "-" and not origin.startswith(f"{self._root.dataset}/"):
            raise BackendFailed(
                f"ZFS has received the snapshot as a clone of {origin}, which does not belong to this gateway: remove "
                "or move that snapshot, and import the file again"
            )

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


def _measure_dataset(name: str) -> int:
    """Return the number of bytes that were written to a snapshot's dataset since it was created or cloned."""
    return zfs_core.used_bytes(name.partition("@")[0])


def send(names: SnapshotNames, snapshot_id: str, file: int) -> StreamEncoding:
    """Write a stream that contains a whole snapshot, without properties, to ``file``. Raises NotFound and ZFSError."""
    return names.call_with_name(snapshot_id, lambda name: _send(name, file))


def _send(name: str, file: int, *, base: str | None = None) -> StreamEncoding:
    if not zfs_core.detect_capabilities().send_options:
        zfs_core.lzc_send(name, base, file)
        return StreamEncoding.PLAIN
    is_encrypted = zfs_core.get_props([name], ["encryption"])[name]["encryption"].value not in ("off", "-")
    encoding = StreamEncoding.RAW if is_encrypted else StreamEncoding.COMPRESSED
    zfs_core.lzc_send(name, base, file, [_FLAGS[encoding]])
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


def _mark_as_clone(file: int) -> None:
    try:
        zfs_core.mark_as_clone(file)
    except ValueError as error:
        raise Invalid(f"the ZFS stream in the snapshot file is damaged: {error}. Export the snapshot again") from None


def check_stream(record: BeginRecord | None, *, is_resuming: bool = False, base: ImportBase | None = None) -> None:
    """Raise Invalid unless the stream contains exactly one complete snapshot of a file system.

    ``record``: the beginning of the stream. ``is_resuming``: the stream must contain the rest of such a snapshot.
    ``base``: the stream must contain what differs from this one.
    """
    if record is None:
        problem = "does not begin with the header of a ZFS stream"
    elif record.is_package:
        problem = "is a package of several snapshots"
    elif base is None and (record.is_incremental or record.is_clone):
        problem = "needs another snapshot"
    elif base is not None and record.from_guid != base.guid:
        problem = "does not need the snapshot that the file names"
    elif record.is_resuming != is_resuming:
        problem = "needs another snapshot" if record.is_resuming else "is not the rest of a snapshot"
    elif not record.is_filesystem:
        problem = "does not contain a file system"
    else:
        return
    raise Invalid(f"the ZFS stream in the snapshot file {problem}: export the snapshot again")
