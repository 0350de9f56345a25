"""Detect whether a filesystem has changed since a snapshot, in every version of ZFS."""

from __future__ import annotations

import secrets
import struct

from zfs_core.capabilities import detect_capabilities
from zfs_core.exceptions import SnapshotMismatch, SnapshotNotFound, ZFSOutputError
from zfs_core.listing import COMPARISON_PREFIX, list_snapshots, lzc_exists
from zfs_core.names import Name, get_filesystem_name, validate_filesystem_name, validate_snapshot_name
from zfs_core.outcome import check, make_error
from zfs_core.parse import check_complete, parse_get
from zfs_core.process import read_first_bytes
from zfs_core.properties import get_props, sync, written_bytes
from zfs_core.run import run
from zfs_core.snapshots import lzc_destroy_snaps, lzc_snapshot

_MAX_HEADER_BYTES = 1 << 20
"""More than ZFS writes for the header of a filesystem alone: 4 KiB, in up to three copies, in any layout of a pool."""


def has_changed_since(name: Name, snap: Name) -> bool:
    """Return whether the filesystem ``name`` has changed since ``snap``, a snapshot of itself or of an ancestor.

    A change that was undone also counts. If little was written, OpenZFS cannot tell whether a file has changed. In that
    case, takes a temporary snapshot. If this process is killed, the snapshot remains (see ``is_comparison_snapshot``).

    Raises FilesystemNotFound, SnapshotNotFound, or SnapshotMismatch if the filesystem does not descend from ``snap``.
    Also raises SnapshotFailure.
    """
    target, snapshot = validate_filesystem_name(name), validate_snapshot_name(snap)
    sync(target)
    if not lzc_exists(snapshot):
        raise SnapshotNotFound(snapshot)
    newest_snapshot = _find_newest_snapshot(target)
    if newest_snapshot == "-":
        raise SnapshotMismatch(snapshot)
    if _has_new_changes(target, newest_snapshot):
        return _check_descent(newest_snapshot, snapshot)
    return _is_different(snapshot, newest_snapshot)


def has_written_since(name: Name, snap: Name) -> bool:
    """Return whether anything was written to the filesystem ``name`` since ``snap``, its newest snapshot.

    Changes nothing, so it is less exact than ``has_changed_since``: it misses the writes of the last seconds that are
    not on disk yet, and counts what ZFS itself writes when it mounts a filesystem. Raises FilesystemNotFound and
    SnapshotNotFound.
    """
    target, snapshot = validate_filesystem_name(name), validate_snapshot_name(snap)
    if not detect_capabilities().written_property:
        return written_bytes(target) > 0
    return _count_written_bytes(target, snapshot) > 0


def _has_new_changes(target: str, newest_snapshot: str) -> bool:
    """Return whether the filesystem has changed since the snapshot on which its current state is based.

    Mounting a filesystem writes its header if it has an intent log. A clone inherits the intent log of its origin. So a
    few bytes may have been written although no file has changed.
    """
    if not detect_capabilities().written_property:
        return written_bytes(target) > 0
    count = _count_written_bytes(target, newest_snapshot)
    if not 0 < count <= _MAX_HEADER_BYTES:
        return count > 0
    temporary_snapshot = f"{target}@{COMPARISON_PREFIX}{secrets.token_hex(8)}"
    lzc_snapshot([temporary_snapshot])
    try:
        return _stream_has_changes(newest_snapshot, temporary_snapshot)
    finally:
        lzc_destroy_snaps([temporary_snapshot], False)


def _count_written_bytes(target: str, snapshot: str) -> int:
    """Return the number of bytes written to a filesystem since the snapshot. Raises SnapshotNotFound."""
    # `written` would count only from the newest snapshot, which may be a temporary one.
    prop = f"written@{snapshot}"
    outcome = run("get", "-Hp", "-o", "name,property,value,source", prop, target, name=target)
    properties = parse_get(check(outcome, target, "get a property").output)
    check_complete(properties, [target], [prop])
    if properties[0].value == "-":
        raise SnapshotNotFound(snapshot)
    return properties[0].number


def _find_newest_snapshot(filesystem: str) -> str:
    """Return the snapshot on which a filesystem's current state is based: its newest snapshot, or its origin."""
    snapshots = list_snapshots(filesystem)
    return snapshots[-1] if snapshots else _get_origin(filesystem)


def _get_origin(filesystem: str) -> str:
    return get_props([filesystem], ["origin"])[filesystem]["origin"].value


def _check_descent(snap: str, ancestor: str) -> bool:
    """Return True if ``snap`` is ``ancestor`` or descends from it. Otherwise, raise SnapshotMismatch."""
    while snap != "-":
        snapshots = list_snapshots(get_filesystem_name(snap))
        if ancestor in snapshots[: snapshots.index(snap) + 1]:
            return True
        snap = _get_origin(get_filesystem_name(snap))
    raise SnapshotMismatch(ancestor)


_RECORD_BYTES = 312
"""The size of a record in a stream. If nothing changed, the stream consists only of a begin and an end record."""
_END_RECORD_TYPE = 5


def _is_different(older_snapshot: str, newer_snapshot: str) -> bool:
    """Return whether the snapshot ``newer_snapshot`` differs from its ancestor ``older_snapshot``."""
    while newer_snapshot != older_snapshot:
        snapshots = list_snapshots(get_filesystem_name(newer_snapshot)) if newer_snapshot != "-" else []
        earlier_snapshots = snapshots[: snapshots.index(newer_snapshot)] if newer_snapshot in snapshots else []
        base_snapshot = (
            older_snapshot
            if older_snapshot in earlier_snapshots
            else _get_origin(get_filesystem_name(newer_snapshot))
            if newer_snapshot in snapshots
            else "-"
        )
        if base_snapshot == "-":
            raise SnapshotMismatch(older_snapshot)
        if _stream_has_changes(base_snapshot, newer_snapshot):
            return _check_descent(base_snapshot, older_snapshot)
        newer_snapshot = base_snapshot
    return False


def _stream_has_changes(base_snapshot: str, end_snapshot: str) -> bool:
    data, outcome = read_first_bytes("send", "-i", base_snapshot, end_snapshot, count=_RECORD_BYTES + 4)
    if outcome is not None:
        raise make_error(outcome, end_snapshot, "compare snapshots") if outcome.cause else ZFSOutputError(end_snapshot)
    return bool(struct.unpack_from("=I", data, _RECORD_BYTES)[0] != _END_RECORD_TYPE)
